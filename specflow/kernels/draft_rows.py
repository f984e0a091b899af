"""Which rows a pass of a trained head has, and where in its pages they stand: found where the numbers lie.

Shapes follow from the number of requests alone, and nothing is read on the host. On a GPU one launch each.
"""

from dataclasses import dataclass

import torch

from specflow.kernels.triton_choice import triton_available


@dataclass(frozen=True)
class KeptRows:
    """`width` rows for each of B requests, request after request; int64 all."""

    rows: torch.Tensor  # [B * width]: row of the target pass; surplus ones repeat the last kept one
    owners: torch.Tensor  # [B * width]: request
    last: torch.Tensor  # [B]: which of these rows is the request's newest kept one
    positions: torch.Tensor  # [B * width]
    slots: torch.Tensor  # [B * width]: place in the pages; in block 0, which nobody reads, for surplus rows
    seq_len: torch.Tensor  # [B]: positions up to the newest kept one


@dataclass(frozen=True)
class MaskedBlock:
    """A block of rows for each of R requests: its newest token, the anchor, and masks behind it; int64 all."""

    anchors: torch.Tensor  # [R]
    token_ids: torch.Tensor  # [R * rows]
    positions: torch.Tensor  # [R * rows]
    slots: torch.Tensor  # [R * rows]
    seq_len: torch.Tensor  # [R]: positions up to the end of the block


def kept_rows(
    start: torch.Tensor,
    num_kept: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    width: int,
) -> KeptRows:
    """start, num_kept [B] int64: first row of a request in the target pass, and how many of its rows stay, 1 … width;
    positions [T] int64 of the rows of the pass; block_table [B, blocks] int64."""
    if start.is_cuda and triton_available():
        from specflow.kernels import draft_rows_triton

        return draft_rows_triton.kept_rows(start, num_kept, positions, block_table, block_size, width)
    steps, kept = torch.arange(width, device=start.device), num_kept.unsqueeze(1)
    rows = start.unsqueeze(1) + torch.minimum(steps, kept - 1)  # [B, width]
    standing = positions[rows]
    places = standing % block_size
    slots = torch.add(places, block_table.gather(1, standing // block_size), alpha=block_size)
    numbers = torch.arange(len(start), device=start.device)
    return KeptRows(
        rows=rows.flatten(),
        owners=numbers.unsqueeze(1).expand(-1, width).flatten(),
        last=numbers * width + num_kept - 1,
        positions=standing.flatten(),
        slots=torch.where(steps < kept, slots, places).flatten(),
        seq_len=standing[:, -1] + 1,
    )


def masked_tokens(
    slots: torch.Tensor, num_tokens: torch.Tensor, token_table: torch.Tensor, num_rows: int, mask_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Anchors [R] and token ids [R * rows] of blocks, see `block_rows`, where nobody asks for their places."""
    anchors = token_table[slots, num_tokens - 1]
    token_ids = anchors.new_full((len(anchors), num_rows), mask_id)
    token_ids[:, 0] = anchors
    return anchors, token_ids.flatten()


def block_rows(
    slots: torch.Tensor,
    num_tokens: torch.Tensor,
    token_table: torch.Tensor,
    block_table: torch.Tensor,
    block_size: int,
    num_rows: int,
    mask_id: int,
) -> MaskedBlock:
    """slots, num_tokens [R] int64: row of a request in token_table [slots, positions] int64, and its tokens so far;
    block_table [R, blocks] int64, with columns for all rows of a block."""
    if slots.is_cuda and triton_available():
        from specflow.kernels import draft_rows_triton

        return draft_rows_triton.block_rows(slots, num_tokens, token_table, block_table, block_size, num_rows, mask_id)
    anchors, token_ids = masked_tokens(slots, num_tokens, token_table, num_rows, mask_id)
    steps = torch.arange(-1, num_rows - 1, device=slots.device)
    positions = num_tokens.unsqueeze(1) + steps  # [R, rows]
    blocks = block_table.gather(1, positions // block_size)
    return MaskedBlock(
        anchors=anchors,
        token_ids=token_ids,
        positions=positions.flatten(),
        slots=torch.add(positions % block_size, blocks, alpha=block_size).flatten(),
        seq_len=num_tokens - 1 + num_rows,
    )
