"""What a conformance check is about: a proposer, the small target it drafts for, and engines of both."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.engine.outputs import RequestOutput
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry, load_plugins
from specflow.proposers.base import Proposer
from specflow.samplers.base import Sampler
from specflow.testing.tiny_models import tiny_target

__all__ = ["PROMPTS", "Subject", "greedy", "installed"]

# With repeats, which drafts from a request's own text need, and without; every id fits a vocabulary of 64.
PROMPTS: list[list[int]] = [
    [5, 9, 17, 3, 5, 9, 17, 3, 5, 9],
    [40, 41, 42, 43, 44, 45, 46, 47, 48],
    [7],
    [31, 2, 31, 2, 31, 2, 11],
]
_SIZES = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 128}

_PLAIN_ENGINES: dict[str, Engine] = {}
_PLAIN: dict[str, list[RequestOutput]] = {}


@cache
def installed() -> Registry:
    """The registry of this process, made once."""
    return load_plugins()


@dataclass(frozen=True)
class Subject:
    """A proposer under test. `make(K)` returns a fresh, unloaded one that drafts up to K tokens per round."""

    make: Callable[[int], Proposer]
    target: Path = field(default_factory=tiny_target)
    backend: str = "cpu"
    num_drafts: int = 3  # K where a check needs only one
    sizes: Mapping[str, Any] = field(default_factory=dict)  # scheduler options that the proposer needs
    backend_options: Mapping[str, Any] = field(default_factory=dict)

    def engine(
        self,
        wrap: Callable[[Proposer], Proposer] = lambda proposer: proposer,
        *,
        num_drafts: int | None = None,
        sampler: str = "standard",
        sampler_options: Mapping[str, Any] | None = None,
        **scheduler: Any,
    ) -> Engine:
        """An engine on the target in float32 with a fresh proposer inside `wrap`; scheduler options by name."""
        proposer = wrap(self.make(num_drafts or self.num_drafts))
        chosen = installed().get(Kind.SAMPLER, sampler).build(sampler_options or {})
        return self._engine(proposer, chosen, {**_SIZES, **self.sizes, **scheduler})

    def plain(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams],
        sampler: str = "standard",
    ) -> list[RequestOutput]:
        """What plain decoding of the target makes of the prompts, by an engine without any proposer.

        It does not depend on the proposer, so it is computed once per process and shared by all subjects.
        """
        key = repr((self.target, self.backend, self.backend_options, prompts, sampling, sampler))
        if key not in _PLAIN:
            place = repr((self.target, self.backend, self.backend_options, sampler))
            if place not in _PLAIN_ENGINES:
                sizes = {**_SIZES, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
                _PLAIN_ENGINES[place] = self._engine(None, installed().get(Kind.SAMPLER, sampler).build({}), sizes)
            _PLAIN[key] = _PLAIN_ENGINES[place].generate(prompts, sampling)
        return _PLAIN[key]

    def _engine(self, proposer: Proposer | None, sampler: Sampler, scheduler: Mapping[str, Any]) -> Engine:
        known = installed()
        target = {"path": str(self.target), "dtype": "float32", "prove": False}
        return Engine(
            known.get(Kind.TARGET, "hf").build(target),
            proposer,
            sampler,
            known.get(Kind.SCHEDULER, "continuous").build(scheduler),
            known.get(Kind.BACKEND, self.backend).build(self.backend_options),
        )


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    """Greedy decoding of exactly that many tokens."""
    return SamplingParams(max_tokens=max_tokens, **{"ignore_eos": True, **options})
