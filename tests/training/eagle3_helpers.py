"""Packs for a trainable EAGLE-3 head over a random target."""

from typing import Any

import torch
from torch import Tensor

from specflow.targets.base import TokenTables
from specflow.training.eagle3 import Eagle3Training, Eagle3TrainingOptions
from specflow.training.objective import TrainBatch
from tests.heads.eagle3_helpers import VOCAB, WIDTH, tiny_facts

SMALL = {"head_dim": 16, "layers": (0, 1, 3), "ttt_length": 4}


def random_tables(seed: int = 5) -> TokenTables:
    rows = torch.Generator().manual_seed(seed)
    return TokenTables(torch.randn(VOCAB, WIDTH, generator=rows), 0.3 * torch.randn(VOCAB, WIDTH, generator=rows))


def make_training(counts: Tensor | None = None, facts: Any = None, seed: int = 0, **options: Any) -> Eagle3Training:
    torch.manual_seed(seed)
    training = Eagle3Training(Eagle3TrainingOptions(**SMALL | options))
    facts = facts or tiny_facts(eos_token_ids=(0,), architecture="LlamaForCausalLM")
    training.build(facts, random_tables(), counts, torch.device("cpu"))
    return training


def make_batch(lengths: list[int], padding: int = 0, seed: int = 1, prompt: int = 2, captures: int = 3) -> TrainBatch:
    """Documents of these lengths; the first `prompt` tokens of each are no labels."""
    rows = torch.Generator().manual_seed(seed)
    total = sum(lengths) + padding
    documents = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)] + [torch.full((padding,), -1)])
    positions = torch.cat([torch.arange(n) for n in lengths] + [torch.zeros(padding, dtype=torch.int64)])
    return TrainBatch(
        token_ids=torch.randint(2, VOCAB, (total,), generator=rows),
        predicted=(positions >= prompt) & (documents >= 0),
        documents=documents,
        positions=positions,
        hidden=torch.randn(total, captures, WIDTH, generator=rows),
        last_hidden=torch.randn(total, WIDTH, generator=rows),
        sample_ids=tuple(f"s{i}" for i in range(len(lengths))),
        seed=0,
    )


def part_of(batch: TrainBatch, document: int) -> TrainBatch:
    """One document of a pack, alone."""
    rows = batch.documents == document
    assert batch.last_hidden is not None
    return TrainBatch(
        token_ids=batch.token_ids[rows],
        predicted=batch.predicted[rows],
        documents=torch.zeros_like(batch.documents[rows]),
        positions=batch.positions[rows],
        hidden=batch.hidden[rows],
        last_hidden=batch.last_hidden[rows],
        sample_ids=(batch.sample_ids[document],),
        seed=batch.seed,
    )
