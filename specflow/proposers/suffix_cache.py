"""The texts that suffix decoding learns from: each running request's own, and the outputs of all requests so far."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from specflow.kernels.suffix_store import Sequence, Speculation, SuffixTree, speculate_both

_NOTHING = Speculation(np.zeros(0, np.int32), np.zeros(0, np.float32), 0.0, 0)


@dataclass(eq=False)
class _Running:
    """A request that is being decoded."""

    prompt_len: int
    own: SuffixTree
    text: Sequence  # prompt and output, in its own tree
    output: Sequence | None = None  # in the shared tree, where it stays after the request has ended
    unsure: bool = False  # `output` is an earlier one of this id: the same request after a pre-emption, or another


class SuffixCache:
    """One suffix tree per running request, over prompt and output, and one shared tree over outputs alone.

    Outputs of requests that run at the same time are visible to each other at once. The shared tree holds those of the
    last `max_requests` requests in the order of their starts; 0 switches it off. A request whose output was evicted
    while it still runs goes on with its own tree. One that starts again under the same id (after a pre-emption) goes
    on with its output in the shared tree, if that is how its text begins; otherwise the earlier output stays as a past
    one, and a new one begins.
    """

    def __init__(self, depth: int, max_requests: int, outputs: Iterable[np.ndarray] = ()) -> None:
        kept = [ids for ids in outputs if len(ids)]
        self.depth, self.max_requests = depth, max_requests
        self.changes = 0  # tokens ever added to the shared tree by requests
        self._first = kept[max(0, len(kept) - max_requests) :]  # of an earlier run
        self._running: dict[str, _Running] = {}
        self._spare: list[SuffixTree] = []
        self.reset()

    def reset(self) -> None:
        """Forget all outputs but those of earlier runs. A request that runs goes on with its own tree alone."""
        self.shared = SuffixTree(self.depth, sum(map(len, self._first)))
        self._cached: deque[tuple[str | None, Sequence]] = deque()  # oldest start first
        self._by_id: dict[str, Sequence] = {}
        for ids in self._first:
            self.shared.append(self._open(None), ids)
        for running in self._running.values():
            running.output, running.unsure = None, False

    @property
    def running(self) -> tuple[str, ...]:
        """Ids of the requests being decoded."""
        return tuple(self._running)

    @property
    def cached(self) -> tuple[str | None, ...]:
        """Ids of the requests whose output is in the shared tree, oldest first; None: from an earlier run."""
        return tuple(name for name, _ in self._cached)

    def outputs(self) -> list[np.ndarray]:
        """The outputs in the shared tree, oldest first, each [n] int32 with n ≥ 1."""
        return [self.shared.read(output) for _, output in self._cached if output.length]

    def start(self, request_id: str, prompt_len: int) -> None:
        """A request begins; its tokens come with `update`."""
        self.stop(request_id)
        own = self._spare.pop() if self._spare else SuffixTree(self.depth)
        running = self._running[request_id] = _Running(prompt_len, own, own.open())
        if self.max_requests:
            earlier = self._by_id.get(request_id)
            running.unsure = earlier is not None
            running.output = earlier or self._open(request_id)

    def stop(self, request_id: str, tokens: np.ndarray | None = None) -> None:
        """A request has ended or lost its slot: its own tree is dropped, its output stays.

        tokens: its committed tokens [L], prompt and output, if they are more than the last `update` brought.
        """
        running = self._running.pop(request_id, None)
        if running is None:
            return
        if tokens is not None:
            self._update_output(request_id, running, tokens)
        running.own.clear()
        self._spare.append(running.own)

    def update(self, request_id: str, tokens: np.ndarray) -> None:
        """Add what is new in the committed tokens [L] of a request, prompt and output."""
        running = self._running[request_id]
        if running.text.length < len(tokens):
            running.own.append(running.text, tokens[running.text.length :].astype(np.int32))
        self._update_output(request_id, running, tokens)

    def draft(
        self, request_id: str, tokens: np.ndarray, most: int, max_spec_factor: float, min_token_prob: float
    ) -> Speculation:
        """The better continuation of the last tokens: from the own text, which wins ties, or from past outputs."""
        if most < 1:
            return _NOTHING
        running = self._running[request_id]
        output = running.output if running.output is not None and not running.output.evicted else None
        context = tokens[-self.depth :].astype(np.int32)
        own, shared = (running.own, running.text), (self.shared, None if running.unsure else output)
        return speculate_both(own, shared, context, most, max_spec_factor, min_token_prob)

    def _update_output(self, request_id: str, running: _Running, tokens: np.ndarray) -> None:
        output = tokens[running.prompt_len :]
        if not len(output):
            return
        if running.unsure:
            running.unsure = False
            if not self._continues(running.output, output):
                running.output = self._open(request_id)
        known = running.output
        if known is not None and known.evicted:
            running.output = known = None
        if known is not None and known.length < len(output):
            fresh = output[known.length :].astype(np.int32)
            self.shared.append(known, fresh)
            self.changes += len(fresh)

    def _continues(self, known: Sequence | None, output: np.ndarray) -> bool:
        """Whether a recorded output is how this one begins."""
        if known is None or known.evicted or known.length > len(output):
            return False
        return bool(np.array_equal(self.shared.read(known), output[: known.length]))

    def _open(self, request_id: str | None) -> Sequence:
        """A new output in the shared tree; the oldest one makes room for it."""
        while len(self._cached) >= self.max_requests:
            name, oldest = self._cached.popleft()
            self.shared.remove(oldest)
            if name is not None and self._by_id.get(name) is oldest:
                del self._by_id[name]
        output = self.shared.open()
        self._cached.append((request_id, output))
        if request_id is not None:
            self._by_id[request_id] = output
        return output
