"""The parts of a training run, each made when it is first needed and once."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specflow.backends.base import Backend
from specflow.backends.gpu import GpuBackend
from specflow.core.layer_numbers import check_layers
from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError
from specflow.options import build_options
from specflow.plugins.component import TRAINABLE_HEAD, Kind
from specflow.plugins.registry import Registry
from specflow.targets.base import Taps, TokenTables
from specflow.training import responses
from specflow.training.documents import DocumentSet, data_hash, documents_of, label_counts
from specflow.training.hidden_provider import HiddenProvider, HybridProvider, OnlineProvider, StoredProvider
from specflow.training.objective import TrainableHead
from specflow.training.processes import Processes
from specflow.training.resident_target import ResidentTarget
from specflow.training.responses import ResponseFile
from specflow.training.train_checkpoint import Checkpoints
from specflow.training.train_options import TrainOptions
from specflow.training.trainer import Trainer

__all__ = ["TrainingParts"]

# Options on which the trained weights do not depend; of `steps` and `epochs` the one that counts is added.
_FREE = (
    *("head", "stage", "output", "capture", "epochs", "steps", "forward_tokens", "recompute"),
    *("log_every", "checkpoint_every", "keep", "evaluate_every", "evaluate_prompts", "evaluate_tokens"),
)


@dataclass
class TrainingParts:
    """What the stages of one run share, in one process."""

    options: TrainOptions
    config: Mapping[str, Any]  # the composition
    build: Callable[[Kind], Any]
    registry: Registry
    output: Path
    processes: Processes = field(default_factory=Processes)

    @property
    def method(self) -> str:
        """Name of the proposer that is trained."""
        return str(self.config["proposer"]["name"])

    @property
    def head_folder(self) -> Path:
        """Where the trained head goes."""
        return self.output / "head"

    @property
    def hidden_folder(self) -> Path:
        """Where captured hidden states lie."""
        return self.output / "hidden"

    @cached_property
    def backend(self) -> Backend:
        """The device of this process."""
        backend: Backend = self.build(Kind.BACKEND)
        if self.processes.size > 1 and isinstance(backend, GpuBackend):
            backend = type(backend)(dataclasses.replace(backend.options, device_index=self.processes.local_rank))
        backend.setup()
        self.processes.join(backend.device)
        return backend

    @cached_property
    def target(self) -> ResidentTarget:
        """The target, loaded once."""
        return ResidentTarget(self.build(Kind.TARGET))

    @cached_property
    def rows(self) -> list[responses.Response]:
        """All responses. Raises `ConfigError` when there are none, or of another target."""
        file = ResponseFile(self.output)
        if not file.rows:
            raise ConfigError(f"{self.output} holds no responses: run task.stage=regenerate first, or task.stage=all.")
        responses.check_target(self.output, self.target.facts)
        rows = list(file.rows.values())
        responses.check_splits(rows, self.options.held_out)
        return rows

    @property
    def trained_on_chat(self) -> bool | None:
        """True when all training prompts were rendered with a chat template, False when none was, else None."""
        kinds = {row.chat for row in self.rows if row.split == "train"}
        return kinds.pop() if len(kinds) == 1 else None

    @cached_property
    def documents(self) -> DocumentSet:
        """What is trained on."""
        return documents_of((row for row in self.rows if row.split == "train"), self.options.pack_length)

    @cached_property
    def held_out(self) -> DocumentSet:
        """What is only measured on."""
        return documents_of((row for row in self.rows if row.split == "held_out"), self.options.pack_length)

    @cached_property
    def head(self) -> TrainableHead:
        """The head with fresh weights."""
        return self._build_head(label_counts(self.documents.documents, self.target.facts.vocab_size))

    def check_head(self) -> None:
        """Build a head for nothing, with counts that say nothing: what does not fit the target is refused before
        answers are written. Raises `ConfigError`."""
        self._build_head(torch.ones(self.target.facts.vocab_size, dtype=torch.int64))

    def _build_head(self, counts: Tensor) -> TrainableHead:
        head: TrainableHead = self.registry.get(TRAINABLE_HEAD, self.method).build(self.options.head)
        facts = self.target.facts
        torch.manual_seed(self.options.seed)
        head.build(facts, self.tables, counts, self.backend.device)
        check_layers(head.layers, facts.num_layers, "task.head: target layers")
        if self.options.recompute and not head.can_recompute:
            raise ConfigError(f"task.recompute=true: {self.method!r} cannot compute its layers again. Leave it out.")
        head.recompute = self.options.recompute
        return head

    @cached_property
    def tables(self) -> TokenTables:
        """The target's tables, without gradients."""
        tables = self.target.token_tables()
        return TokenTables(tables.embedding.detach(), tables.head.detach(), tables.logit_softcap)

    @property
    def taps(self) -> Taps:
        """What the head reads of the target."""
        return Taps(layers=tuple(self.head.layers), last_hidden=self.head.needs_last_hidden)

    @cached_property
    def online(self) -> OnlineProvider:
        """Hidden states from the target in this process."""
        return OnlineProvider(self.target.model, self.taps, self.backend.device, self.options.forward_tokens)

    def provider(self) -> HiddenProvider:
        """Where training gets hidden states from. Raises `StorageError` when nothing was captured."""
        mode, known = self.options.capture, self.target.facts
        if mode == "online":
            return self.online
        if mode == "offline":
            return StoredProvider(self.hidden_folder, known, self.taps, self.backend.device)
        if self.processes.size > 1:
            raise ConfigError("task.capture=hybrid works in one process: with torchrun use offline or online.")
        return HybridProvider(self.hidden_folder, self.online, known, self.taps)

    def trainer(self, provider: HiddenProvider) -> Trainer:
        """A trainer that stands where the newest checkpoint does."""
        return Trainer(
            self.head,
            self.documents.documents,
            provider,
            self.options,
            Checkpoints(self.output / "checkpoints", self.settings, self.options.keep),
            self.backend.device,
            self.processes,
        )

    @cached_property
    def settings(self) -> dict[str, Any]:
        """What the trained weights depend on."""
        own = {key: value for key, value in dataclasses.asdict(self.options).items() if key not in _FREE}
        length = {"steps": self.options.steps} if self.options.steps else {"epochs": self.options.epochs}
        return {
            "method": self.method,
            "head": dict(self.options.head),
            "target_hash": self.target.facts.checkpoint_hash,
            "data_hash": data_hash(self.documents.documents),
            **length,
            **own,
        }

    def response_sampling(self) -> SamplingParams:
        """Sampling of the answers: the run's, at most `response_tokens` long."""
        given: SamplingParams = build_options(SamplingParams, self.config.get("sampling") or {}, "sampling")
        return dataclasses.replace(given, max_tokens=self.options.response_tokens)

    def response_settings(self, sampling: SamplingParams) -> dict[str, Any]:
        """What all answers of a folder have in common."""
        temperatures = list(self.options.response_temperatures) or [sampling.temperature]
        return {
            "target": self.target.facts.name,
            "target_hash": self.target.facts.checkpoint_hash,
            "sampling": {k: v for k, v in dataclasses.asdict(sampling).items() if k not in ("temperature", "logprobs")},
            "temperatures": temperatures,
            "held_out": self.options.held_out,
            "seed": self.options.seed,
        }
