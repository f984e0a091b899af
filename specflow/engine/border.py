"""The border between device and host: the only place where the engine reads values back."""

import numpy as np
import torch

from specflow.core.draft import Verdict


def read_verdict(verdict: Verdict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [B, K+1], emitted [B] and accepted [B] as host arrays; waits for the device."""
    packed = torch.cat([verdict.token_ids, verdict.num_emitted.unsqueeze(1), verdict.num_accepted.unsqueeze(1)], 1)
    host = packed.cpu().numpy()
    return host[:, :-2], host[:, -2], host[:, -1]


def read_counts(*counts: torch.Tensor) -> np.ndarray:
    """Several [B] int64 tensors as one host array [len(counts), B]; waits for the device."""
    return torch.stack(counts).cpu().numpy()


def read_logprobs(*values: torch.Tensor) -> tuple[list, ...]:
    """Several tensors of log-probabilities and ids as lists; waits for the device."""
    return tuple(value.tolist() for value in values)


class Readback:
    """Brings results of a ring on the device to the host, each as soon as its step has ended, while later ones run.

    On a CPU a result is simply there; it is copied, since its place in the ring is used again.
    """

    def __init__(self, results: torch.Tensor) -> None:
        """results: [R, ...] on any device; entry number r is read before it is written again."""
        self._results = results
        self._on_gpu = results.device.type == "cuda"
        if self._on_gpu:
            self._stream = torch.cuda.Stream(results.device)
            self._host = torch.zeros(results.shape, dtype=results.dtype, pin_memory=True)
            self._done = [torch.cuda.Event() for _ in results]

    def send(self, turn: int) -> None:
        """Let entry `turn` follow what has been queued so far."""
        if self._on_gpu:
            self._stream.wait_stream(torch.cuda.current_stream(self._results.device))
            with torch.cuda.stream(self._stream):
                self._host[turn].copy_(self._results[turn], non_blocking=True)
                self._done[turn].record(self._stream)

    def settle(self) -> None:
        """Wait until all that was sent is on the host."""
        if self._on_gpu:
            self._stream.synchronize()

    def receive(self, turn: int) -> np.ndarray:
        """Entry `turn` on the host; waits for its step, not for later ones."""
        if not self._on_gpu:
            return self._results[turn].numpy().copy()
        self._done[turn].synchronize()
        return self._host[turn].numpy().copy()
