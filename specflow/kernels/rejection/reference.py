"""The four stages in plain torch, each with the inputs and outputs of its kernel; written to be read, not fast."""

from dataclasses import dataclass

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.kernels.noise import COIN, TARGET, gumbel_noise, uniform
from specflow.kernels.rejection.workspace import blocks_of

DONE, PLAIN, ONE_HOT, RESIDUAL = 0, 1, 2, 3
_MINUS_INF = float("-inf")


@dataclass(frozen=True)
class BlockStats:
    """Statistics [B, K+1, NB]; the kernel leaves those that nobody asks for unwritten."""

    target_max: torch.Tensor
    target_sum: torch.Tensor
    target_arg: torch.Tensor  # int64
    draft_max: torch.Tensor | None  # None for one-hot drafts; row K is -inf
    draft_sum: torch.Tensor | None


@dataclass(frozen=True)
class Decision:
    """Outcome of the rejection stage, [B] each."""

    accepted: torch.Tensor  # int64: leading drafts kept
    kind: torch.Tensor  # int64: what the last token is drawn from
    token: torch.Tensor  # int64: final token of a greedy request, else the rejected draft or -1
    norm_p: torch.Tensor  # float32: log normaliser of the row that is drawn from
    norm_q: torch.Tensor  # float32: of the draft's law there, 0 for one-hot drafts


def clean(logits: torch.Tensor) -> torch.Tensor:
    """Float32; NaN counts as -inf and +inf as the largest finite value of the input's type."""
    return torch.nan_to_num(logits, nan=_MINUS_INF, posinf=torch.finfo(logits.dtype).max, neginf=_MINUS_INF).float()


def rows_of(inputs: VerifyInputs, num_rows: int) -> torch.Tensor:
    """Row of each (request, step), [B, K+1]; arbitrary behind a request's last row."""
    steps = torch.arange(inputs.draft_ids.shape[1] + 1, device=inputs.cu_rows.device)
    return (inputs.cu_rows[:-1].unsqueeze(1) + steps).clamp(max=num_rows - 1)


def split(values: torch.Tensor, block: int) -> torch.Tensor:
    """[..., V] -> [..., NB, block], padded with -inf."""
    missing = blocks_of(values.shape[-1], block) * block - values.shape[-1]
    padded = torch.nn.functional.pad(values, (0, missing), value=_MINUS_INF)
    return padded.unflatten(-1, (-1, block))


def _max_and_sum(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    top = tiles.amax(-1)
    return top, torch.exp(tiles - top.masked_fill(top == _MINUS_INF, 0.0).unsqueeze(-1)).sum(-1)


def block_stats(logits: torch.Tensor, inputs: VerifyInputs, block: int) -> BlockStats:
    """Stage 1 over all rows; logits [N, V]."""
    tiles = split(clean(logits)[rows_of(inputs, len(logits))], block)
    top, total = _max_and_sum(tiles)
    starts = torch.arange(tiles.shape[2], device=logits.device) * block
    arg = tiles.argmax(-1) + starts
    if inputs.draft_logits is None:
        return BlockStats(top, total, arg, None, None)
    laws = torch.nn.functional.pad(inputs.draft_logits.float(), (0, 0, 0, 1), value=_MINUS_INF)
    return BlockStats(top, total, arg, *_max_and_sum(split(laws, block)))


def _log_normaliser(top: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    best = top.amax(-1)
    shift = best.masked_fill(best == _MINUS_INF, 0.0)
    return shift + torch.log((total * torch.exp(top - shift.unsqueeze(-1))).sum(-1))


def reject(logits: torch.Tensor, inputs: VerifyInputs, stats: BlockStats) -> Decision:
    """Stage 2: greedy requests compare, others flip a coin per draft."""
    ids = torch.nn.functional.pad(inputs.draft_ids, (0, 1), value=-1)
    steps = torch.arange(ids.shape[1], device=ids.device)
    rows = rows_of(inputs, len(logits))
    valid = (ids >= 0) & (ids < logits.shape[1]) & (steps < inputs.num_drafts.unsqueeze(1))
    best = stats.target_arg.gather(2, stats.target_max.argmax(-1, keepdim=True)).squeeze(-1)
    norm_p = _log_normaliser(stats.target_max, stats.target_sum)
    log_q, norm_q = torch.zeros_like(norm_p), torch.zeros_like(norm_p)
    if inputs.draft_logits is not None and stats.draft_max is not None and stats.draft_sum is not None:
        norm_q = _log_normaliser(stats.draft_max, stats.draft_sum)
        laws = torch.nn.functional.pad(inputs.draft_logits.float(), (0, 0, 0, 1))
        log_q = laws.gather(2, ids.clamp(min=0).unsqueeze(2)).squeeze(2) - norm_q
    positions = inputs.positions.unsqueeze(1) + steps
    coins = uniform(inputs.seeds.unsqueeze(1).expand_as(positions), positions, COIN)
    log_p = clean(logits)[rows, ids.clamp(min=0)] - norm_p
    sampled = (log_q > _MINUS_INF) & (log_p > torch.log(coins) + log_q)
    greedy = inputs.temperature == 0
    accept = valid & torch.where(greedy.unsqueeze(1), ids == best, sampled)
    accepted = accept.long().cumprod(1).sum(1)
    here = accepted.unsqueeze(1)
    residual = ONE_HOT if inputs.draft_logits is None else RESIDUAL
    kind = torch.where((valid & torch.isfinite(norm_q)).gather(1, here).squeeze(1), residual, PLAIN)
    return Decision(
        accepted,
        kind.masked_fill(greedy, DONE),
        torch.where(greedy.unsqueeze(1), best, ids).gather(1, here).squeeze(1),
        norm_p.gather(1, here).squeeze(1),
        norm_q.gather(1, here).squeeze(1),
    )


def law_to_draw_from(logits: torch.Tensor, inputs: VerifyInputs, decision: Decision) -> torch.Tensor:
    """Log of the law of each request's last token up to a constant, [B, V] float32; -inf where it has no mass."""
    values = clean(logits)[inputs.cu_rows[:-1] + decision.accepted]
    kind = decision.kind.unsqueeze(1)
    columns = torch.arange(values.shape[1], device=values.device)
    without = (kind == ONE_HOT) & (columns == decision.token.unsqueeze(1))
    values = values.masked_fill(without, _MINUS_INF)
    if inputs.draft_logits is None or not inputs.draft_logits.shape[1]:
        return values
    step = decision.accepted.clamp(max=inputs.draft_logits.shape[1] - 1)
    laws = inputs.draft_logits[torch.arange(len(step), device=step.device), step].float()
    log_p, log_q = values - decision.norm_p.unsqueeze(1), laws - decision.norm_q.unsqueeze(1)
    ratio = torch.exp(log_q - log_p)
    residual = torch.where(ratio < 1, log_p + torch.log1p(-ratio.clamp(max=1)), _MINUS_INF)
    return torch.where(kind == RESIDUAL, residual, values)


def resample(
    logits: torch.Tensor, inputs: VerifyInputs, decision: Decision, block: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stage 3: best noisy score of every block and its id, [B, NS] each."""
    noise = gumbel_noise(inputs.seeds, inputs.positions + decision.accepted, TARGET, logits.shape[1], dtype)
    tiles = split(law_to_draw_from(logits, inputs, decision).to(dtype) + noise, block)
    starts = torch.arange(tiles.shape[1], device=logits.device) * block
    return tiles.amax(-1), tiles.argmax(-1) + starts


def insert(
    logits: torch.Tensor, inputs: VerifyInputs, decision: Decision, best_score: torch.Tensor, best_id: torch.Tensor
) -> Verdict:
    """Stage 4: accepted drafts, the last token, then -1; a residual without mass is drawn from p."""
    winner = best_score.argmax(-1, keepdim=True)
    token = best_id.gather(1, winner).squeeze(1)
    rows = clean(logits)[inputs.cu_rows[:-1] + decision.accepted].to(best_score.dtype)
    noise = gumbel_noise(inputs.seeds, inputs.positions + decision.accepted, TARGET, rows.shape[1], best_score.dtype)
    empty = best_score.amax(-1) == _MINUS_INF
    token = torch.where(empty, (rows + noise).argmax(-1), token)
    token = torch.where(decision.kind == DONE, decision.token, token)
    steps = torch.arange(inputs.draft_ids.shape[1] + 1, device=logits.device)
    here = decision.accepted.unsqueeze(1)
    ids = torch.nn.functional.pad(inputs.draft_ids, (0, 1), value=-1).masked_fill(steps > here, -1)
    tokens = torch.where(steps == here, token.unsqueeze(1), ids)
    return Verdict(tokens, decision.accepted + 1, decision.accepted)


def verify(
    logits: torch.Tensor, inputs: VerifyInputs, block: int = 8192, dtype: torch.dtype = torch.float32
) -> Verdict:
    """All four stages."""
    decision = reject(logits, inputs, block_stats(logits, inputs, block))
    return insert(logits, inputs, decision, *resample(logits, inputs, decision, block, dtype))
