"""A proposer that is right, and many that are wrong in one way each: what the conformance kit has to tell apart."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.proposers.base import HostProposer, ProposeContext, Proposer, Requirements
from specflow.testing.subject import Subject


class Repeat(Proposer):
    """Drafts the last token again and again, on the device."""

    name = "repeat"

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = num_speculative_tokens

    def attach(self, target: Any, limits: EngineLimits) -> None:
        self.limits = limits
        self.ids = torch.zeros(limits.max_num_seqs, self.num_speculative_tokens, dtype=torch.int64)

    def last(self, context: ProposeContext) -> torch.Tensor:
        return context.token_table[context.slots, context.num_tokens - 1]

    def propose(self, context: ProposeContext) -> Draft:
        ids = self.ids[: len(context.slots)]
        ids.copy_(self.last(context).unsqueeze(1).expand_as(ids))
        return Draft(ids, context.max_drafts.clone())

    def describe(self) -> dict[str, str]:
        return {"repeats": "the last token"}


class OtherLength(Repeat):
    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens + 1)


class Silent(Repeat):
    def propose(self, context: ProposeContext) -> Draft:
        return Draft(super().propose(context).token_ids, torch.zeros_like(context.max_drafts))


class TooMany(Repeat):
    def propose(self, context: ProposeContext) -> Draft:
        return Draft(super().propose(context).token_ids, context.max_drafts + self.num_speculative_tokens + 1)


class Narrow(Repeat):
    def propose(self, context: ProposeContext) -> Draft:
        draft = super().propose(context)
        return Draft(draft.token_ids[:, :1], draft.num_drafts.clamp(max=1))


class SmallIntegers(Repeat):
    def propose(self, context: ProposeContext) -> Draft:
        draft = super().propose(context)
        return Draft(draft.token_ids, draft.num_drafts.to(torch.int32))


class Foreign(Repeat):
    def last(self, context: ProposeContext) -> torch.Tensor:
        return super().last(context) + self.limits.vocab_size


class UndeclaredLaw(Repeat):
    def propose(self, context: ProposeContext) -> Draft:
        draft = super().propose(context)
        return Draft(draft.token_ids, draft.num_drafts, torch.zeros(*draft.token_ids.shape, self.limits.vocab_size))


class FalseLaw(Repeat):
    """Says that its drafts were drawn from a uniform law."""

    def requirements(self) -> Requirements:
        return Requirements(draft_logits=True)

    def propose(self, context: ProposeContext) -> Draft:
        draft = super().propose(context)
        return Draft(draft.token_ids, draft.num_drafts, torch.zeros(*draft.token_ids.shape, self.limits.vocab_size))


class Remembers(HostProposer):
    """Drafts the number of requests that have ended; reset changes nothing."""

    name = "remembers"

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens, self.ended = num_speculative_tokens, 0

    def draft(self, tokens: Any, max_drafts: int, request_id: str) -> Sequence[int]:
        return [self.ended % 50] * max_drafts

    def finish(self, request_id: str, slot: int, token_ids: Sequence[int]) -> None:
        self.ended += 1


class Counts(Remembers):
    """Drafts the number of its calls for the request: rejected drafts leave a trace."""

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens)
        self.calls: dict[str, int] = {}

    def draft(self, tokens: Any, max_drafts: int, request_id: str) -> Sequence[int]:
        self.calls[request_id] = self.calls.get(request_id, 0) + 1
        return [self.calls[request_id]] * max_drafts


class Shared(Counts):
    """The same in the class, for all engines."""

    shared: ClassVar[list[str]] = []

    def draft(self, tokens: Any, max_drafts: int, request_id: str) -> Sequence[int]:
        self.shared.append(request_id)
        return [len(self.shared) % 50] * max_drafts


class StartsOnce(Remembers):
    """Does not know pre-emption."""

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens)
        self.known: set[str] = set()

    def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
        if request_id in self.known:
            raise RuntimeError(f"{request_id} is here already")
        self.known.add(request_id)


class ForgetsNobody(Remembers):
    """Raises when an aborted request is finished."""

    def finish(self, request_id: str, slot: int, token_ids: Sequence[int]) -> None:
        if len(token_ids) < 20:
            raise RuntimeError("too short")


class FailsOnOneToken(Remembers):
    def draft(self, tokens: Any, max_drafts: int, request_id: str) -> Sequence[int]:
        if len(tokens) == 2:
            raise IndexError("no bigram")
        return [1] * max_drafts


def reading(read: Callable[[ProposeContext], Any]) -> type[Repeat]:
    """One whose `propose` also does this."""

    class Reads(Repeat):
        def propose(self, context: ProposeContext) -> Draft:
            read(context)
            return super().propose(context)

    return Reads


class Moves(Repeat):
    """Makes a new buffer every time."""

    def propose(self, context: ProposeContext) -> Draft:
        self.ids = self.ids.clone()
        return super().propose(context)


class Grows(Repeat):
    """Keeps what it returned."""

    def __init__(self, num_speculative_tokens: int) -> None:
        super().__init__(num_speculative_tokens)
        self.kept: list[torch.Tensor] = []

    def propose(self, context: ProposeContext) -> Draft:
        self.kept.append(context.num_tokens.clone())
        return super().propose(context)


class Mute(Repeat):
    def describe(self) -> dict[str, str]:
        return {}


class Numbers(Repeat):
    def describe(self) -> dict[str, str]:
        return {"k": self.num_speculative_tokens}  # type: ignore[dict-item]


class Addresses(Repeat):
    def describe(self) -> dict[str, str]:
        return {"what": str(object())}


def subject(cls: Any) -> Subject:
    """The kit's view of such a class."""
    return Subject(cls)
