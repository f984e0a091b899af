"""Rows of the target pass that stay, and where a head keeps what it makes of them.

Every committed position passes through the target exactly once while its request holds a slot, and `propose` is called
after each pass; so a head that handles these rows every time has its own pages complete, through prompt chunks,
rejected drafts and pre-emption alike, and keeps no books.
"""

from dataclasses import dataclass

import numpy as np
import torch

from specflow.core.attention import AttentionInputs
from specflow.errors import ProposerError
from specflow.kernels.paged_attention import plan_groups
from specflow.proposers.base import Features, ProposeContext


@dataclass(frozen=True)
class FeatureRows:
    """N rows of the features, request after request, in order of position."""

    rows: torch.Tensor  # [N] int64: row in `Features.hidden`
    owners: torch.Tensor  # [N] int64: request of the context
    last: torch.Tensor  # [B] int64: which of the N rows is the request's newest kept position
    attention: AttentionInputs  # positions [N], slots [N] and the groups for causal attention over the head's pages


def features_of(context: ProposeContext, name: str) -> Features:
    """The features of the step. Raises `ProposerError` when the target gave none (user case C78)."""
    if context.features is None:
        raise ProposerError(f"proposer {name!r} needs the target's hidden states, and this target delivered none.")
    return context.features


def feature_rows(context: ProposeContext, block_size: int, width: int, name: str) -> FeatureRows:
    """Rows of all B requests of a context; `name` is the proposer's, for messages.

    On a GPU a step of pure decoding, with at most `width` kept rows per request, gives `width` rows for each, so that
    its shapes do not depend on what was accepted: surplus rows repeat a kept one and write to block 0, which nobody
    reads. Elsewhere, and with prompt chunks, only rows that exist are there.
    """
    features = features_of(context, name)
    host, device = context.host, context.slots.device
    uniform = device.type != "cpu" and int(host.chunk_len.max(initial=0)) <= width
    lengths = np.full(len(host.slots), width, dtype=np.int64) if uniform else host.chunk_len
    starts = np.cumsum(lengths) - lengths
    host_owners = np.repeat(np.arange(len(lengths)), lengths)
    owners = torch.from_numpy(host_owners).to(device)
    step = torch.from_numpy(np.arange(lengths.sum()) - starts[host_owners]).to(device)
    kept = features.num_valid[owners]
    within = torch.minimum(step, kept - 1)
    rows = features.start[owners] + within
    positions = features.positions[rows]
    slots = context.block_table[owners, positions // block_size] * block_size + positions % block_size
    if uniform:
        slots = torch.where(step < kept, slots, positions % block_size)
    ends = host.chunk_start + host.chunk_len
    attention = AttentionInputs(
        positions=positions,
        slot_mapping=slots,
        block_table=context.block_table,
        seq_len=torch.from_numpy(ends).to(device),
        groups=plan_groups(lengths, ends, host.block_table, block_size),
    )
    last = torch.from_numpy(starts).to(device) + features.num_valid - 1
    return FeatureRows(rows, owners, last, attention)
