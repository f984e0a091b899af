"""Do masks work? Told from how many drafts were accepted, which the host knows anyway."""

import numpy as np

from specflow.proposers.base import HostView

_FEWEST_ROUNDS = 300
_GOOD_FIRST = 0.3
_COLLAPSE = 0.25  # second drafts are this much rarer right, after a right first one, than first drafts


class MaskWatch:
    """Counts rounds of K drafts, and those whose first and second draft were accepted.

    Only the second draft and later ones come from masks. If they fail while first ones are good, the model was not
    trained with this mask token.
    """

    def __init__(self, max_num_seqs: int, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._drafted_at = np.full(max_num_seqs + 1, -1, dtype=np.int64)  # per slot: tokens when K drafts were made
        self._rounds = self._first = self._second = 0

    def forget(self, slot: int) -> None:
        """The slot's drafts will not be verified any more."""
        self._drafted_at[slot] = -1

    def see(self, host: HostView) -> None:
        """Take note of one call of `propose`: what became of the last drafts, and who gets new ones."""
        verified = self._drafted_at[host.slots] == host.chunk_start + 1
        accepted = host.chunk_len[verified] - 1
        self._rounds += len(accepted)
        self._first += int((accepted >= 1).sum())
        self._second += int((accepted >= 2).sum())
        full = host.wants_drafts & (host.max_drafts >= self._num_drafts)
        self._drafted_at[host.slots] = np.where(full, host.num_tokens, -1)

    def warning(self) -> str | None:
        """What to tell the user; None while all is well or too little was seen."""
        if self._num_drafts < 2 or self._rounds < _FEWEST_ROUNDS:
            return None
        first, second = self._first / self._rounds, self._second / max(self._first, 1)
        if first < _GOOD_FIRST or second >= _COLLAPSE * first:
            return None
        return (
            f"{first:.0%} of first drafts were accepted, but only {second:.0%} of the second ones after them "
            f"({self._rounds} rounds): the model does not seem to be trained with this mask token"
        )
