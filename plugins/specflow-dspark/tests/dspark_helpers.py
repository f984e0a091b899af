"""Heads of the kit's tiny target, made on the spot."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from specflow_dspark.training import DSparkTraining, DSparkTrainingOptions

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.targets.base import TargetFacts, TokenTables
from specflow.targets.hf import HfOptions, HfTarget
from specflow.testing.tiny_models import tiny_target

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"num_layers": 2, "block_size": 5, "mask_token_id": 383, "markov_rank": 8}
COSTS = [[1, 2.0], [8, 3.0], [64, 12.0]]  # milliseconds: some drafts pay and some do not


@cache
def target_parts(folder: Path | None = None) -> tuple[TargetFacts, TokenTables]:
    """Facts and tables of a target, the kit's tiny one unless given."""
    target = HfTarget(HfOptions(path=str(folder or tiny_target()), dtype="float32", prove=False))
    target.load(CpuBackend(CpuOptions()))
    return target.facts, target.token_tables()


def make_training(target: Path | None = None, **options: Any) -> DSparkTraining:
    """A training with its fresh head, the same each time."""
    training = DSparkTraining(DSparkTrainingOptions(**SIZES | options))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        training.build(*target_parts(target), None, CPU)
    return training


def scatter(training: DSparkTraining, spread: float = 0.2) -> None:
    """Move all weights at random, those of the confidence head far: chances from near 0 to near 1."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        for name, weight in training.module.named_parameters():
            if name != "calibration":
                weight.data += spread * torch.randn(weight.shape)
        if training.module.confidence_head is not None:
            training.module.confidence_head.proj.weight.data.normal_(std=0.4)


def random_head(folder: Path, **options: Any) -> Path:
    """A saved head that knows nothing of the target but is sure of much."""
    training = make_training(**options)
    scatter(training)
    training.save(folder)
    return folder
