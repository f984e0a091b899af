"""How many drafts of a request will be accepted, learnt from the rounds before.

A round with k drafts is a chain of trials: trial i succeeds when draft i is accepted, given that those before it were.
The method has a chance of failing (a hazard) for every position. Each request has a factor on the odds of failing,
found as failures over the expected ones and drawn to 1 as strongly as some failures of its own draw it elsewhere (the
mean of a Gamma posterior). How many of the drafts asked for are made at all is counted apart. Old rounds are forgotten,
so that all of this follows a text that changes.
"""

from dataclasses import dataclass

__all__ = ["AcceptanceBook", "RequestHistory"]

_POSITION_WEIGHT = 4.0  # trials that the prior of a position counts
_REQUEST_WEIGHT = 8.0  # failures that the prior of a request counts
_LONGER = 10.0  # the method's memory against a request's
_SUREST = 0.995  # most that a draft's chance is taken for


@dataclass
class RequestHistory:
    """What one request has shown, old rounds forgotten."""

    failures: float = 0.0
    expected: float = 0.0  # failures that the method's hazards foretold
    asked: float = 0.0  # drafts
    drafted: float = 0.0

    def fade(self, factor: float) -> None:
        """Forget a part of everything."""
        self.failures *= factor
        self.expected *= factor
        self.asked *= factor
        self.drafted *= factor

    @property
    def factor(self) -> float:
        """On the odds of failing: above 1 for a request whose drafts fail more often."""
        return (self.failures + _REQUEST_WEIGHT) / (self.expected + _REQUEST_WEIGHT)


class AcceptanceBook:
    """Chances of acceptance by position, of one drafting method and of each request."""

    def __init__(self, num_drafts: int, prior: float, forgetting: float) -> None:
        """num_drafts: K. prior: chance of a draft before anything is known. forgetting: what a round leaves of a
        request's older ones; the method's are kept ten times as long."""
        self.num_drafts, self._forgetting = num_drafts, forgetting
        self._method_forgetting = 1 - (1 - forgetting) / _LONGER
        self._first_hazard = 1 - prior
        self._trials = [0.0] * num_drafts
        self._failures = [0.0] * num_drafts
        self._asked = self._drafted = 0.0
        self._requests: dict[str, RequestHistory] = {}
        self._hazards = [self._first_hazard] * num_drafts

    def history(self, request_id: str) -> RequestHistory:
        """A request's history, empty for a new one."""
        return self._requests.setdefault(request_id, RequestHistory())

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._requests.pop(request_id, None)

    def add(self, request_id: str, asked: int, drafted: int, accepted: int) -> None:
        """Learn from a round: drafts asked for, made, and accepted. A step that asked for none only fades a little."""
        one = self.history(request_id)
        if not asked:
            one.fade(self._forgetting**0.25)
            return
        one.fade(self._forgetting)
        reached = min(accepted + 1, drafted)
        failed = accepted < drafted
        one.failures += failed
        one.expected += sum(self._hazards[:reached])
        one.asked += asked
        one.drafted += drafted
        kept = self._method_forgetting
        self._trials = [kept * value for value in self._trials]
        self._failures = [kept * value for value in self._failures]
        for position in range(reached):
            self._trials[position] += 1
        if failed:
            self._failures[accepted] += 1
        self._asked, self._drafted = kept * self._asked + asked, kept * self._drafted + drafted
        self._hazards = self._estimate()

    def _estimate(self) -> list[float]:
        """Hazard of every position; the one before it is the prior."""
        found, prior = [], self._first_hazard
        for trials, failures in zip(self._trials, self._failures, strict=True):
            prior = (failures + _POSITION_WEIGHT * prior) / (trials + _POSITION_WEIGHT)
            found.append(prior)
        return found

    @property
    def hazards(self) -> list[float]:
        """Chance that draft i, once made, fails when those before it were accepted, K values."""
        return self._hazards

    @property
    def filled(self) -> float:
        """Drafts made per draft asked for, in 0 … 1."""
        return (self._drafted + 1) / (self._asked + 1)

    def survival(self, request_id: str) -> list[float]:
        """Chance that drafts 1 … j of the request are all accepted once they are made, K values."""
        factor = self.history(request_id).factor
        found, alive = [], 1.0
        for hazard in self._hazards:
            alive *= min(_SUREST, (1 - hazard) / (1 - hazard + hazard * factor))
            found.append(alive)
        return found

    def fill(self, request_id: str) -> float:
        """Drafts that the method will make for the request per draft asked for, in 0 … 1."""
        one = self.history(request_id)
        weight = float(self.num_drafts)
        return min(1.0, (one.drafted + weight * self.filled) / (one.asked + weight))
