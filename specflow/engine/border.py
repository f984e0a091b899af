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
