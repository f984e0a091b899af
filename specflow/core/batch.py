"""The packed, ragged batch that one target pass runs, and what the pass returns."""

from dataclasses import dataclass, field

import numpy as np
import torch

from specflow.core.attention import AttentionInputs


@dataclass(frozen=True)
class PackedBatch:
    """One step's tokens, all requests in one row without padding. Filled by `engine.buffers`, device unless said."""

    token_ids: torch.Tensor  # [T] int64: prompt chunk, or anchor followed by its drafts
    positions: torch.Tensor  # [T] int64: position of each token in its request
    slots: torch.Tensor  # [B] int64: row of the request in the per-request tables
    query_start: torch.Tensor  # [B+1] int64: first packed token of each request
    logit_rows: torch.Tensor  # [N] int64: packed tokens whose logits are wanted, ascending, each once
    attention: AttentionInputs  # where keys and values go and who sees what
    query_len_host: np.ndarray  # [B] int64, host: tokens of each request in this step


@dataclass
class TargetOutput:
    """Result of one target pass; tensors are valid until the next pass."""

    logits: torch.Tensor  # [N, V] in the model's dtype or float32, one row per entry of `logit_rows`
    hidden: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [T, E] residual stream after that layer
    last_hidden: torch.Tensor | None = None  # [T, E] after the final norm: what the output head reads
