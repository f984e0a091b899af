"""Prompt lookup for a whole batch on the device: where the text's last tokens stood before, and what followed.

The definition is that of `proposer=ngram` (prompt lookup, A. Saxena, 2023): the longest n-gram wins, then the earliest
occurrence, or the latest. Here it is plain torch, the reference; `ngram_match_triton` holds the kernels for GPUs.

There is no torch.compile beside them: on a GPU its code is Triton's, so it needs what the kernels need and is slower.
Measured for 8 texts of 2000 and of 32 000 tokens, replayed as graphs on an H200 (torch 2.11): kernels 5 and 6 µs,
compiled 18 and 209 µs, plain torch 83 and 92 µs; compiling took 15 s, the kernels 0.8 s. On one CPU core (torch 2.13)
it took 4 to 20 s, and a call then between half and twice the time of plain torch (0.3 and 2.5 ms); the host scan of
`proposer=ngram` takes 0.02 and 0.4 ms there.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True)
class MatchRule:
    """What counts as a match and how much of it is drafted; host constants of a run."""

    n_min: int  # shortest n-gram that counts
    n_max: int  # longest n-gram looked for
    latest: bool  # of several matches of one length the last wins, not the first
    num_drafts: int  # K


def ngram_drafts(
    table: torch.Tensor, slots: torch.Tensor, num_tokens: torch.Tensor, max_drafts: torch.Tensor, rule: MatchRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts [B, K] int64, -1 where there is none, and their counts [B] int64.

    table: [S, W] int64, row slots[b] begins with the num_tokens[b] ≤ W tokens of request b (0: none, a padded row);
    what stands behind them is never looked at. slots, num_tokens, max_drafts: [B] int64; max_drafts[b] < 1 = no draft.
    The draft ends where the text does. All shapes follow from B, W and the rule, and nothing is read on the host, so
    a call can be captured in a graph; its time grows with W, not with num_tokens, so pass no more columns than needed.
    """
    width, n_max = table.shape[1], min(rule.n_max, table.shape[1])
    # A match cannot begin before the text: -1 stands there and equals no token.
    rows = F.pad(table[slots], (n_max - 1, 0), value=-1)
    last = (num_tokens - 1).unsqueeze(1)
    suffix = rows.gather(1, (last + torch.arange(n_max, device=rows.device)).clamp_min(0))
    ends = torch.arange(width, device=rows.device)
    # length[b, e]: common suffix of the text and of its first e + 1 tokens, at most n_max.
    alive = ends < last
    length = torch.zeros_like(alive, dtype=torch.uint8 if n_max < 256 else torch.int32)
    for shift in range(n_max - 1, -1, -1):
        alive &= rows[:, shift : shift + width] == suffix[:, shift : shift + 1]
        length += alive
    longest = length.amax(1, keepdim=True)
    order = ends if rule.latest else width - 1 - ends
    best = torch.where(length == longest, order, -1).amax(1)
    start = (best if rule.latest else width - 1 - best) + 1
    return _copied(table, slots, start, num_tokens, max_drafts * (longest.squeeze(1) >= rule.n_min), rule.num_drafts)


def _copied(
    table: torch.Tensor,
    slots: torch.Tensor,
    start: torch.Tensor,
    num_tokens: torch.Tensor,
    most: torch.Tensor,
    num_drafts: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens from start[b] on, up to the end of the text, most[b] or K."""
    counts = torch.minimum(most, num_tokens - start).clamp(0, num_drafts)
    steps = torch.arange(num_drafts, device=table.device)
    columns = (start.unsqueeze(1) + steps).clamp_max(table.shape[1] - 1)
    ids = table[slots.unsqueeze(1), columns]
    return ids.masked_fill(steps >= counts.unsqueeze(1), -1), counts
