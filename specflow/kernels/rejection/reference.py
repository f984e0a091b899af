"""The stages in plain torch, each with the inputs and outputs of its kernel; written to be read, not fast."""

from dataclasses import dataclass

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.kernels.noise import CHUNK_IDS, COIN, TARGET, gumbel_argmax, gumbel_noise, uniform
from specflow.kernels.rejection.workspace import blocks_of

DONE, PLAIN, ONE_HOT, RESIDUAL = 0, 1, 2, 3
_MINUS_INF = float("-inf")


@dataclass(frozen=True)
class BlockStats:
    """Statistics [B, K+1, NB]; the kernel leaves those that nobody asks for unwritten."""

    target_max: torch.Tensor
    target_sum: torch.Tensor
    target_arg: torch.Tensor  # int64
    target_chunks: torch.Tensor  # [B, K+1, NB * chunks of a block]: sums relative to the block's maximum
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


def _max_and_chunks(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Maxima [..., NB] of tiles [..., NB, block], and sums of exponentials [..., NB, chunks] relative to them."""
    top = tiles.amax(-1)
    scaled = torch.exp(tiles - top.masked_fill(top == _MINUS_INF, 0.0).unsqueeze(-1))
    return top, scaled.unflatten(-1, (-1, CHUNK_IDS)).sum(-1)


def block_stats(logits: torch.Tensor, inputs: VerifyInputs, block: int) -> BlockStats:
    """Stage 1 over all rows; logits [N, V]."""
    tiles = split(clean(logits)[rows_of(inputs, len(logits))], block)
    top, chunks = _max_and_chunks(tiles)
    starts = torch.arange(tiles.shape[2], device=logits.device) * block
    arg = tiles.argmax(-1) + starts
    if inputs.draft_logits is None:
        return BlockStats(top, chunks.sum(-1), arg, chunks.flatten(-2), None, None)
    laws = torch.nn.functional.pad(inputs.draft_logits.float(), (0, 0, 0, 1), value=_MINUS_INF)
    peak, masses = _max_and_chunks(split(laws, block))
    return BlockStats(top, chunks.sum(-1), arg, chunks.flatten(-2), peak, masses.sum(-1))


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
    """Log of the law of each request's last token up to a constant, [B, V] float32; -inf where it has no mass.

    A residual without any mass, which only rounding can leave (p equals q, or p(d) is 1), is replaced by p.
    """
    values = clean(logits)[inputs.cu_rows[:-1] + decision.accepted]
    kind = decision.kind.unsqueeze(1)
    columns = torch.arange(values.shape[1], device=values.device)
    residual = values.masked_fill(columns == decision.token.unsqueeze(1), _MINUS_INF)
    if inputs.draft_logits is not None and inputs.draft_logits.shape[1]:
        step = decision.accepted.clamp(max=inputs.draft_logits.shape[1] - 1)
        laws = inputs.draft_logits[torch.arange(len(step), device=step.device), step].float()
        log_p, log_q = values - decision.norm_p.unsqueeze(1), laws - decision.norm_q.unsqueeze(1)
        ratio = torch.exp(log_q - log_p)
        residual = torch.where(ratio < 1, log_p + torch.log1p(-ratio.clamp(max=1)), _MINUS_INF)
    rejected = (kind == ONE_HOT) | (kind == RESIDUAL)
    return torch.where(rejected & (residual.amax(-1, keepdim=True) > _MINUS_INF), residual, values)


def masses(law: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stage 3a: block maxima [B, NB] of a law [B, V], and its chunks' sums relative to them, [B, NB * chunks]."""
    top, chunks = _max_and_chunks(split(law, block))
    return top, chunks.flatten(1)


def draw(
    law: torch.Tensor,
    inputs: VerifyInputs,
    decision: Decision,
    law_max: torch.Tensor,
    law_chunks: torch.Tensor,
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Stage 3b: a chunk by its mass, then an id of the law [B, V] inside it; [B] int64."""
    log_masses = law_max.repeat_interleave(law_chunks.shape[1] // law_max.shape[1], 1) + torch.log(law_chunks)
    position = inputs.positions + decision.accepted
    noise = gumbel_noise(inputs.seeds, position, TARGET, CHUNK_IDS + law_chunks.shape[1], dtype)
    chunk = gumbel_argmax(log_masses, noise[:, CHUNK_IDS:])
    inside = split(law, CHUNK_IDS)[torch.arange(len(chunk), device=chunk.device), chunk]
    return chunk * CHUNK_IDS + gumbel_argmax(inside, noise[:, :CHUNK_IDS])


def insert(inputs: VerifyInputs, decision: Decision, drawn: torch.Tensor) -> Verdict:
    """Stage 4: accepted drafts, the last token, then -1; drawn [B] int64 is ignored for greedy requests."""
    token = torch.where(decision.kind == DONE, decision.token, drawn)
    steps = torch.arange(inputs.draft_ids.shape[1] + 1, device=token.device)
    here = decision.accepted.unsqueeze(1)
    ids = torch.nn.functional.pad(inputs.draft_ids, (0, 1), value=-1).masked_fill(steps > here, -1)
    tokens = torch.where(steps == here, token.unsqueeze(1), ids)
    return Verdict(tokens, decision.accepted + 1, decision.accepted)


def verify(
    logits: torch.Tensor, inputs: VerifyInputs, block: int = 8192, dtype: torch.dtype = torch.float32
) -> Verdict:
    """All stages."""
    decision = reject(logits, inputs, block_stats(logits, inputs, block))
    law = law_to_draw_from(logits, inputs, decision)
    return insert(inputs, decision, draw(law, inputs, decision, *masses(law, block), dtype))
