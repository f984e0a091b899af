"""Training runs on a tiny target without a command line, in this process or in one that can be killed."""

import json
import multiprocessing
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry, Source, load_plugins
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.schedulers.continuous import ContinuousOptions, ContinuousScheduler
from specflow.targets.hf import HfOptions, HfTarget
from specflow.training.train_options import TrainOptions
from specflow.training.training_parts import TrainingParts
from specflow.training.training_run import TrainingRun
from specflow.workloads.base import Prompt
from tests.tasks.helpers import FixedWorkload
from tests.training.fake_head import FakePlugin

SMALL = {
    "head": {"layer": 1, "dropout": 0.1, "noise": 0.05},
    "response_tokens": 24,
    "held_out": 0.3,
    "pack_length": 96,
    "packs_per_step": 2,
    "steps": 24,
    "learning_rate": 1e-2,
    "bf16": False,
    "log_every": 5,
    "evaluate_every": 0,
    "evaluate_prompts": 4,
    "evaluate_tokens": 24,
    "checkpoint_every": 4,
}


class Notes:
    """A display that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.curve: list[tuple[int, Mapping[str, float]]] = []

    def progress(self, stage: str, done: int, total: int, text: str = "") -> None:
        pass

    def say(self, line: str) -> None:
        self.lines.append(line)

    def points(self, step: int, values: Mapping[str, float]) -> None:
        self.curve.append((step, values))


def words(count: int = 30, seed: int = 0) -> list[Prompt]:
    """Random prompts."""
    draw = random.Random(seed)
    text = ["".join(draw.choice("abcdefgh ij") for _ in range(draw.randint(5, 30))) for _ in range(count)]
    return [Prompt(f"p{index}", (f"x{line}",), chat=False) for index, line in enumerate(text)]


def fake_registry(folder: Path) -> Registry:
    """The built-in components and the fake head."""
    registry = load_plugins(only="")
    registry.add(FakePlugin(folder), Source("fake", "fake-pack", "1"))
    return registry


def make_run(model: Path, output: Path, prompts: list[Prompt] | None = None, **options: Any) -> TrainingRun:
    """A run of the fake head; `prove` is off, everything else as the command line makes it."""
    sampling = {key.removeprefix("s_"): options.pop(key) for key in list(options) if key.startswith("s_")}
    proposer = options.pop("proposer", {})
    scheduler = ContinuousOptions(max_num_seqs=8, max_num_batched_tokens=64, block_size=4, max_model_len=128)
    parts = {
        Kind.TARGET: lambda: HfTarget(HfOptions(path=str(model), dtype="float32", prove=False)),
        Kind.SAMPLER: lambda: StandardSampler(StandardOptions()),
        Kind.SCHEDULER: lambda: ContinuousScheduler(scheduler),
        Kind.BACKEND: lambda: CpuBackend(CpuOptions()),
        Kind.WORKLOAD: lambda: FixedWorkload(prompts or words()),
    }
    config = {"proposer": {"name": "fake", **proposer}, "sampling": {"ignore_eos": True, **sampling}}
    chosen = TrainOptions(**{**SMALL, **options})
    registry = fake_registry(output.parent / "conf")
    return TrainingRun(TrainingParts(chosen, config, lambda kind: parts[kind](), registry, output), Notes())


def train(model: Path, output: Path, **options: Any) -> TrainingRun:
    """Run it to its end."""
    run = make_run(model, output, **options)
    run.run()
    return run


def in_process(model: Path, output: Path, **options: Any) -> multiprocessing.Process:
    """Start a run in a process of its own, which may be killed. It ends with 130 when it was interrupted."""
    process = multiprocessing.get_context("fork").Process(target=_in_process, args=(model, output, options))
    process.start()
    return process


def _in_process(model: Path, output: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    try:
        train(model, output, **options)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def steps(output: Path) -> list[int]:
    """Steps that have a checkpoint."""
    names = [path.name.removeprefix("step_") for path in output.glob("checkpoints/step_*")]
    return [int(name) for name in names if name.isdigit()]


def checkpoint(output: Path) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """The newest checkpoint: step, tensors, facts."""
    folder = output / "checkpoints" / f"step_{max(steps(output))}"
    facts = json.loads((folder / "state.json").read_text())
    return facts["step"], torch.load(folder / "state.pt", weights_only=True), facts


def curve(output: Path) -> list[dict[str, float]]:
    """All points, without what depends on the clock."""
    rows = [json.loads(line) for line in (output / "curve.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "per_second" not in name} for row in rows]
