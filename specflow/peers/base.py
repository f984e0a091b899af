"""Contract of another project's engine that runs a composition.

It gets the same composition and the same requests, as token ids. It says by option name what it cannot do
before anything is loaded, and returns tokens, times and what it counted of drafts.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.core.sampling_params import SamplingParams
from specflow.engine.outputs import RequestOutput
from specflow.errors import ConfigError
from specflow.metrics.acceptance import AcceptanceCounts
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry

if TYPE_CHECKING:
    import torch

__all__ = [
    "DecodingEngine",
    "PeerPass",
    "PeerRequest",
    "PeerSession",
    "PeerSetup",
    "SpecflowEngine",
    "SpecflowEngineOptions",
    "engine_of",
]

OnFinish = Callable[[RequestOutput], None]


@dataclass(frozen=True)
class PeerRequest:
    """One request; the prompt is given as ids, so that every engine answers the same one."""

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams  # with the request's own seed


@dataclass(frozen=True)
class PeerPass:
    """What one run over all requests gave."""

    outputs: Sequence[RequestOutput]  # in the order of the requests
    wall_seconds: float  # first arrival to last token
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)  # as the engine counts it
    peak_memory_bytes: int | None = None  # None: it does not say


@dataclass(frozen=True)
class PeerSetup:
    """What an engine is loaded from."""

    config: Mapping[str, Any]  # the composition, checked
    registry: Registry
    speculate: bool  # False: plain decoding, whatever the composition's proposer
    device: "torch.device"  # of the composition's backend
    output_dir: Path  # for logs


class PeerSession(ABC):
    """A loaded engine."""

    @abstractmethod
    def run(self, requests: Sequence[PeerRequest], concurrency: int, on_finish: OnFinish) -> PeerPass:
        """Answer all requests, at most `concurrency` at a time. Nothing is kept from an earlier run that could make
        this one faster. Raises `SpecflowError` when the engine fails."""

    @abstractmethod
    def describe(self) -> Mapping[str, str]:
        """Versions, precision, kernels and options in force, for the report."""


class DecodingEngine(ABC):
    """An engine that is not loaded yet. Built from its options."""

    name: str = "engine"

    @abstractmethod
    def check(self, config: Mapping[str, Any], registry: Registry) -> None:
        """Whether it can run the composition with `task=bench`; nothing is loaded.

        Raises `ConfigError` with a line for every option that it cannot do.
        """

    @abstractmethod
    def open(self, setup: PeerSetup) -> AbstractContextManager[PeerSession]:
        """Load it for the length of a `with` block. Raises `SpecflowError` when that fails."""

    def caveats(self, config: Mapping[str, Any], registry: Registry) -> Sequence[str]:
        """Options that it runs in another way, which keeps the output: sentences for the report."""
        return ()


@dataclass(frozen=True, kw_only=True)
class SpecflowEngineOptions:
    """Options of `engine=specflow`: none."""


class SpecflowEngine:
    """The name of specflow's own engine, which the tasks build part by part."""

    name = "specflow"

    def __init__(self, options: SpecflowEngineOptions) -> None:
        self.options = options


def engine_of(config: Mapping[str, Any], registry: Registry | None) -> DecodingEngine | None:
    """The other engine of a composition, not loaded; None for specflow's own, also where none is named.

    Raises `ConfigError` for an unknown one or wrong options.
    """
    node = config.get(Kind.ENGINE)
    if node is None or node.get("name") == SpecflowEngine.name:
        return None
    assert registry is not None
    engine: DecodingEngine = registry.get(Kind.ENGINE, str(node.get("name"))).build(node)
    if not isinstance(engine, DecodingEngine):
        raise ConfigError(f"engine={node['name']} is no specflow.peers.base.DecodingEngine.")
    return engine
