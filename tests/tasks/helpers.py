"""A task's surroundings without a command line: components by hand, events in a list."""

from pathlib import Path
from typing import Any

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.plugins.component import Kind
from specflow.proposers.base import Proposer
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.schedulers.continuous import ContinuousOptions, ContinuousScheduler
from specflow.targets.hf import HfOptions, HfTarget
from specflow.tasks.base import TaskContext
from specflow.workloads.base import Prompt, Workload


class Recorder:
    """Stands for the life-cycle hooks and keeps what they are called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda **event: self.calls.append((name, next(iter(event.values()))))

    def of(self, name: str) -> list[Any]:
        return [event for called, event in self.calls if called == name]


class FixedWorkload(Workload):
    """Prompts given in the test."""

    name = "fixed"
    request_rate = None
    seed = 0

    def __init__(self, prompts: list[Prompt]) -> None:
        self._prompts = prompts

    def load(self) -> list[Prompt]:
        return self._prompts


def texts(*prompts: str) -> list[Prompt]:
    return [Prompt(f"p{index}", (text,), chat=False) for index, text in enumerate(prompts)]


def make_context(
    folder: Path,
    output_dir: Path,
    proposer: Proposer | None = None,
    prompts: list[Prompt] | None = None,
    sampler: Any = None,
    **sampling: Any,
) -> TaskContext:
    scheduler = ContinuousOptions(max_num_seqs=4, max_num_batched_tokens=64, block_size=4, max_model_len=128)
    parts = {
        Kind.TARGET: lambda: HfTarget(HfOptions(path=str(folder), dtype="float32", prove=False)),
        Kind.PROPOSER: lambda: proposer,
        Kind.SAMPLER: lambda: sampler or StandardSampler(StandardOptions()),
        Kind.SCHEDULER: lambda: ContinuousScheduler(scheduler),
        Kind.BACKEND: lambda: CpuBackend(CpuOptions()),
        Kind.WORKLOAD: lambda: FixedWorkload(prompts or texts("the rain in spain", "a rose is a rose is a rose")),
    }
    config = {"seed": 3, "sampling": {"max_tokens": 24, **sampling}}
    return TaskContext(config, output_dir, lambda kind: parts[kind](), Recorder(), {})
