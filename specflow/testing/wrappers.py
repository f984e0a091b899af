"""Proposers around a proposer: one that notes what happens, one that decides what the target will accept."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.proposers.base import PassCost, ProposeContext, Proposer, Requirements

if TYPE_CHECKING:
    from specflow.backends.base import Backend
    from specflow.targets.base import Target

__all__ = ["Asked", "Ended", "Steered", "Watched", "Wrapper"]


class Wrapper(Proposer):
    """Another proposer, unchanged; a subclass changes what it wants to."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner
        self.name = inner.name

    @property
    def num_speculative_tokens(self) -> int:  # type: ignore[override]
        """The inner proposer's, which some know only once they are loaded."""
        return self.inner.num_speculative_tokens

    @property
    def trained_on_chat(self) -> bool | None:  # type: ignore[override]
        """The inner proposer's."""
        return self.inner.trained_on_chat

    def load(self, target: "Target", backend: "Backend") -> None:
        """See `Proposer.load`."""
        self.inner.load(target, backend)

    def requirements(self) -> Requirements:
        """See `Proposer.requirements`. Never inside a graph, where there would be nothing to see or change."""
        return dataclasses.replace(self.inner.requirements(), graph_safe=False)

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """See `Proposer.attach`."""
        self.inner.attach(target, limits)

    def calibrate(self, costs: Sequence[PassCost]) -> None:
        """See `Proposer.calibrate`."""
        self.inner.calibrate(costs)

    def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
        """See `Proposer.start`."""
        self.inner.start(request_id, slot, prompt)

    def propose(self, context: ProposeContext) -> Draft:
        """See `Proposer.propose`."""
        return self.inner.propose(context)

    def finish(self, request_id: str, slot: int, token_ids: Sequence[int]) -> None:
        """See `Proposer.finish`."""
        self.inner.finish(request_id, slot, token_ids)

    def reset(self) -> None:
        """See `Proposer.reset`."""
        self.inner.reset()

    def describe(self) -> dict[str, str]:
        """See `Proposer.describe`."""
        return self.inner.describe()


@dataclass(frozen=True)
class Asked:
    """One request in one call of `propose`, and what came back for it."""

    request_id: str
    tokens: tuple[int, ...]  # committed, the anchor included
    max_drafts: int
    drafts: tuple[int, ...]  # as many as may be used
    ended_before: int  # requests that had left their slots by then


@dataclass(frozen=True)
class Ended:
    """One call of `finish`."""

    request_id: str
    tokens: tuple[int, ...]
    seen: int  # tokens of this request in its last `propose` since its start; 0 for none


class Watched(Wrapper):
    """Notes every call, and in `problems` whatever breaks the contract on either side of it."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.asked: list[Asked] = []
        self.ended: list[Ended] = []
        self.running: dict[str, int] = {}  # slot of every request between start and finish
        self.num_starts = 0
        self.problems: list[str] = []
        self._seen: dict[str, int] = {}
        self.limits: EngineLimits  # from `attach` on

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """See `Proposer.attach`."""
        self.limits = limits
        self.inner.attach(target, limits)

    def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
        """Noted and handed on."""
        if request_id in self.running:
            self.problems.append(f"start({request_id!r}) came twice without finish")
        if slot in self.running.values():
            self.problems.append(f"start({request_id!r}) in slot {slot}, which is taken")
        self.running[request_id] = slot
        self.num_starts += 1
        self._seen[request_id] = 0
        self.inner.start(request_id, slot, prompt)

    def finish(self, request_id: str, slot: int, token_ids: Sequence[int]) -> None:
        """Noted and handed on."""
        if self.running.pop(request_id, None) != slot:
            self.problems.append(f"finish({request_id!r}, slot={slot}) without a start in that slot")
        self.ended.append(Ended(request_id, tuple(token_ids), self._seen.pop(request_id, 0)))
        self.inner.finish(request_id, slot, token_ids)

    def propose(self, context: ProposeContext) -> Draft:
        """The inner proposer's drafts, noted."""
        draft = self.inner.propose(context)
        known = len(self.problems)
        self._check(draft, context)
        if len(self.problems) == known:
            self._note(draft, context)
        return draft

    def _note(self, draft: Draft, context: ProposeContext) -> None:
        ids, counts, host = draft.token_ids.tolist(), draft.num_drafts.tolist(), context.host
        table = context.token_table
        for row, name in enumerate(host.request_ids):
            count, most = int(host.num_tokens[row]), int(host.max_drafts[row])
            tokens = tuple(table[int(host.slots[row]), :count].tolist())
            drafts = tuple(ids[row][: min(counts[row], most)])
            self.asked.append(Asked(name, tokens, most, drafts, len(self.ended)))
            self._seen[name] = count

    def _check(self, draft: Draft, context: ProposeContext) -> None:
        """The shape of what was returned, by `Draft` and `Requirements`."""
        limits, size = self.limits, len(context.host.slots)
        most, ids, counts = limits.num_speculative_tokens, draft.token_ids, draft.num_drafts
        found = {
            f"token_ids {_kind(ids)}, expected [{size}, {most}] int64": (ids.shape, ids.dtype)
            != ((size, most), torch.int64),
            f"num_drafts {_kind(counts)}, expected [{size}] int64": (counts.shape, counts.dtype)
            != ((size,), torch.int64),
            f"tensors on {ids.device} and {counts.device}, expected {limits.device}": {
                ids.device.type,
                counts.device.type,
            }
            != {limits.device.type},
        }
        if not any(found.values()):
            found[f"num_drafts {counts.tolist()}, expected each in 0 … {most}"] = bool(
                ((counts < 0) | (counts > most)).any()
            )
            used = torch.arange(most, device=ids.device) < torch.minimum(counts, context.max_drafts).unsqueeze(1)
            outside = used & ((ids < 0) | (ids >= limits.vocab_size))
            found[f"drafts outside the vocabulary of {limits.vocab_size}: {ids[outside].tolist()}"] = bool(
                outside.any()
            )
        if draft.logits is not None:
            shape = [size, most, limits.vocab_size]
            found[f"logits {_kind(draft.logits)}, expected {shape} float32"] = (
                list(draft.logits.shape) != shape or draft.logits.dtype != torch.float32
            )
            found[
                "logits, but requirements().draft_logits is False: nobody keeps them"
            ] = not self.inner.requirements().draft_logits
        self.problems += [f"propose returned {text}" for text, wrong in found.items() if wrong]


class Steered(Watched):
    """Replaces the drafts, so that the target accepts as many of them as a test wants, whatever the inner proposer is.

    texts: per request id the tokens that the target is known to choose, prompt first. accept(request_id, call) says how
    many drafts are right; behind them follows a wrong one, if there is room. The inner proposer is asked all the same
    (its own drafts are in `asked`), and sees what it sees when drafts are accepted: several new tokens at once.
    """

    def __init__(self, inner: Proposer, texts: Mapping[str, Sequence[int]], accept: Callable[[str, int], int]) -> None:
        super().__init__(inner)
        self.texts, self.accept = dict(texts), accept
        self._calls = 0

    def propose(self, context: ProposeContext) -> Draft:
        """What the target will say, spoilt behind the accepted part."""
        draft, host = super().propose(context), context.host
        self._calls += 1
        ids, counts = torch.zeros_like(draft.token_ids), torch.zeros_like(draft.num_drafts)
        for row, name in enumerate(host.request_ids):
            first, most = int(host.num_tokens[row]), int(host.max_drafts[row])
            planned = list(self.texts[name][first : first + most])
            right = self.accept(name, self._calls)
            if right < len(planned):
                planned = [*planned[:right], (planned[right] + 1) % self.limits.vocab_size]
            ids[row, : len(planned)] = torch.tensor(planned, dtype=torch.int64)
            counts[row] = len(planned)
        return dataclasses.replace(draft, token_ids=ids, num_drafts=counts)


def _kind(tensor: torch.Tensor) -> str:
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
