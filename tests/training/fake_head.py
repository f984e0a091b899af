"""The smallest head there is: one matrix on the state at t, which predicts token t + 2. With its proposer, as a plugin.

What it needs of everything around it is what a real head needs: captured layers, the last state, the target's tables,
labels within documents, and files that its proposer loads.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specflow.core.draft import Draft
from specflow.errors import ConfigError
from specflow.plugins import Component, hookimpl
from specflow.proposers.base import ProposeContext, Proposer, Requirements
from specflow.proposers.feature_rows import features_of
from specflow.targets.base import Taps, TargetFacts, TokenTables
from specflow.training.objective import LossParts, TrainableHead, TrainBatch


@dataclass(frozen=True, kw_only=True)
class FakeTrainingOptions:
    """Options of the head."""

    layer: int = 2  # the target layer that is read
    dropout: float = 0.0  # by torch's global generator, as modules do it
    noise: float = 0.0  # on the states, from the pack's seed

    def __post_init__(self) -> None:
        if self.dropout < 0:
            raise ConfigError(f"dropout={self.dropout} must be 0 or more.")


class FakeTraining(TrainableHead):
    """See the module."""

    num_speculative_tokens = 1

    def __init__(self, options: FakeTrainingOptions) -> None:
        self.options = options
        self.layers = (options.layer,)
        self.counts: Tensor | None = None

    def build(self, facts: TargetFacts, tables: TokenTables, token_counts: Tensor | None, device: torch.device) -> None:
        linear = nn.Linear(facts.hidden_size, facts.hidden_size)
        self.module = nn.Sequential(nn.Dropout(self.options.dropout), linear).to(device)
        self.tables, self.counts = tables, token_counts

    def loss(self, batch: TrainBatch) -> LossParts:
        states = batch.hidden[:, 0]
        if self.options.noise:
            generator = torch.Generator().manual_seed(batch.seed)
            states = states + self.options.noise * torch.randn(states.shape, generator=generator)
        same = (batch.documents[:-2] == batch.documents[2:]) & (batch.documents[2:] >= 0)
        rows = torch.nonzero(same & batch.predicted[2:]).flatten()
        labels = batch.token_ids[rows + 2]
        logits = self.module(states[rows]).float() @ self.tables.head.float().T
        assert batch.last_hidden is not None
        teacher = torch.softmax(batch.last_hidden[rows + 1].float() @ self.tables.head.float().T, -1)
        count = torch.tensor(float(len(rows)))
        hits = (logits.argmax(-1) == labels).sum().float()
        shared = torch.minimum(torch.softmax(logits, -1), teacher).sum().detach()
        measures = {"accuracy/0": (hits, count), "acceptance/0": (shared, count)}
        return LossParts(F.cross_entropy(logits, labels, reduction="sum"), count, measures)

    def save(self, folder: Path) -> None:
        (folder / "config.json").write_text(json.dumps({"layer": self.options.layer}))
        save_file({name: value.contiguous() for name, value in self.module[1].state_dict().items()}, folder / "w.st")

    def state(self) -> dict[str, Tensor]:
        assert self.counts is not None
        return {"counts": self.counts}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        self.counts = state["counts"]


@dataclass(frozen=True, kw_only=True)
class FakeOptions:
    """Options of the proposer."""

    path: str | None = None
    num_speculative_tokens: int = 3
    spoil: bool = False  # reads the wrong row, as a proposer would that is run otherwise than it was trained


class FakeProposer(Proposer):
    """Drafts one token."""

    name = "fake"

    def __init__(self, options: FakeOptions) -> None:
        self.options, self.num_speculative_tokens = options, options.num_speculative_tokens

    def load(self, target: Any, backend: Any) -> None:
        folder = Path(str(self.options.path))
        self.layer = json.loads((folder / "config.json").read_text())["layer"]
        weights = load_file(folder / "w.st")
        self.linear = nn.Linear(*weights["weight"].T.shape)
        self.linear.load_state_dict(weights)
        self.head = target.token_tables().head.detach()

    def requirements(self) -> Requirements:
        return Requirements(taps=Taps(layers=(self.layer,)))

    def propose(self, context: ProposeContext) -> Draft:
        features = features_of(context, self.name)
        rows = features.start + (0 if self.options.spoil else features.num_valid - 1)
        with torch.no_grad():
            states = features.hidden[self.layer][rows]
            ids = (self.linear(states * (-1 if self.options.spoil else 1)) @ self.head.T).argmax(-1, keepdim=True)
        return Draft(ids, context.max_drafts.clamp(max=1))


class FakePlugin:
    """Registers the two, and a proposer that nobody can train is there anyway."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        file = folder / "proposer" / "fake.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("name: fake\npath: null\nnum_speculative_tokens: 3\nspoil: false\n")

    @hookimpl
    def specflow_proposers(self) -> Sequence[Component]:
        return [Component("fake", FakeProposer, FakeOptions, "for tests")]

    @hookimpl
    def specflow_trainable_heads(self) -> Sequence[Component]:
        return [Component("fake", FakeTraining, FakeTrainingOptions, "for tests")]

    @hookimpl
    def specflow_config_dirs(self) -> Sequence[Path]:
        return [self._folder]
