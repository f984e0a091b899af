"""Learning from a target model: its distributions, text it wrote itself, and how often its first choice is met."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from specflow.training.token_data import random_windows


def divergence(student: Tensor, teacher: Tensor, counted: Tensor | None = None) -> Tensor:
    """Mean Kullback-Leibler divergence of the student from the teacher, a scalar in nats per position.

    student, teacher: logits [..., vocabulary] of any floating type; computed in float32.
    counted: bool [...], the positions that the mean is over; None is all of them.
    """
    expected = F.log_softmax(teacher.float(), dim=-1)
    given = F.log_softmax(student.float(), dim=-1)
    each = F.kl_div(given, expected, log_target=True, reduction="none").sum(dim=-1)
    return each.mean() if counted is None else (each * counted).sum() / counted.sum()


@torch.no_grad()
def continue_text(
    model: Any, prompts: Tensor, new_tokens: int, temperature: float = 0.0, generator: torch.Generator | None = None
) -> Tensor:
    """Continue every prompt by `new_tokens` tokens, past an end-of-text token too.

    prompts: int64 [count, length]. Returns int64 [count, length + new_tokens].
    temperature: 0 takes the most probable token; otherwise samples with `generator` (on the model's device).
    """
    pieces = [prompts]
    cache = DynamicCache(config=model.config)
    for _ in range(new_tokens):
        # The cache goes by position: its keyword differs between releases of transformers.
        output = model(pieces[-1], None, None, cache, use_cache=True, logits_to_keep=1)
        pieces.append(_choose(output.logits[:, -1].float(), temperature, generator))
    return torch.cat(pieces, dim=1)


def write_target_text(
    model: Any,
    tokens: Tensor,
    *,
    amount: int,
    prompt_tokens: int,
    new_tokens: int,
    batch: int,
    temperature: float,
    seed: int,
) -> Tensor:
    """Text written by the target, int64 [count, prompt_tokens + new_tokens], at least `amount` new tokens in all.

    tokens: training text, int32 [tokens], from which the prompts are cut.
    batch: continuations at once. Batches are greedy and sampled at `temperature` in turn.
    """
    places = torch.Generator().manual_seed(seed)
    draws = torch.Generator(device=tokens.device).manual_seed(seed)
    rows: list[Tensor] = []
    while sum(len(row) for row in rows) * new_tokens < amount or len(rows) < 2:
        prompts = random_windows(tokens, batch, prompt_tokens, places)
        rows.append(continue_text(model, prompts, new_tokens, temperature if len(rows) % 2 else 0.0, draws))
    return torch.cat(rows)


@torch.no_grad()
def greedy_agreement(draft: Any, target: Any, prompts: Tensor, new_tokens: int, end_of_text: int) -> float:
    """How often the draft's argmax is the token the target chose, over the target's greedy continuations.

    prompts: int64 [count, length]. A continuation counts up to and including its first end-of-text token.
    Returns a share from 0 to 1: the chance that one drafted token is accepted by greedy verification.
    """
    text = continue_text(target, prompts, new_tokens)
    chosen = text[:, prompts.shape[1] :]
    drafted = draft(input_ids=text[:, :-1], use_cache=False).logits[:, prompts.shape[1] - 1 :].argmax(dim=-1)
    ends = (chosen == end_of_text).long()
    live = (ends.cumsum(dim=1) - ends) == 0
    return ((drafted == chosen) & live).sum().item() / live.sum().item()


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    """One token per row, int64 [count, 1], from float32 logits [count, vocabulary]."""
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    return torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator)
