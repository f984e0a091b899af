"""Drafts and what becomes of them."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Draft:
    """What a proposer returns for the B requests it was asked about.

    An id outside [0, V) counts as "no draft here": it and everything behind it in its row is dropped and counted as
    a warning, never verified.
    """

    token_ids: torch.Tensor  # [B, K] int64; entries at and past num_drafts are ignored
    num_drafts: torch.Tensor  # [B] int64, each in 0 … K
    # Logits whose softmax is exactly the law q that each draft was sampled from (temperature and any filter applied),
    # or None when every draft was chosen deterministically, which makes q one-hot.
    logits: torch.Tensor | None = None  # [B, K, V] float32


@dataclass(frozen=True)
class VerifyInputs:
    """What a sampler needs beside the logits. B requests, all of which emit at least one token."""

    cu_rows: torch.Tensor  # [B+1] int64: first logits row of each request; it has num_drafts + 1 of them
    draft_ids: torch.Tensor  # [B, K] int64; -1 where there is no draft
    num_drafts: torch.Tensor  # [B] int64
    positions: torch.Tensor  # [B] int64: sequence position of the token that row 0 predicts
    temperature: torch.Tensor  # [B] float32; 0 = greedy
    seeds: torch.Tensor  # [B] int64
    rounds: torch.Tensor  # [B] int64: verification steps this request has seen, for randomness that must be fresh
    draft_logits: torch.Tensor | None  # [B, K, V] float32, see `Draft.logits`
    all_greedy: bool  # host knowledge: every temperature is 0
    # [B] int64: row of each request in draft_logits, which then is [slots, K, V]; None: it has B rows in order. Only a
    # sampler that `reads_draft_slots` gets them, all others a gathered copy.
    draft_slots: torch.Tensor | None = None
    scaled: bool = True  # host knowledge: sampling rows are divided by their temperature; else the sampler has to


@dataclass(frozen=True)
class Verdict:
    """Result of verification."""

    token_ids: torch.Tensor  # [B, K+1] int64: accepted drafts, then one recovered or bonus token, then -1
    num_emitted: torch.Tensor  # [B] int64, each in 1 … K+1
    num_accepted: torch.Tensor  # [B] int64: leading drafts accepted
