"""Reading DSpark checkpoints: the block by specflow's own reader, and the heads on top of it."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specflow.checkpoints.dflash import LoadedDFlash, load_block_head
from specflow.checkpoints.dflash_config import read_description
from specflow.checkpoints.tensors import locate_tensors
from specflow_dspark.description import SerialDescription, read_serial, refuse_other_blocks, silent_layout
from specflow_dspark.heads import ConfidenceHead, DSparkHead, MarkovHead

if TYPE_CHECKING:
    from specflow.targets.base import TargetFacts, TokenTables

_PARTS = ("markov_head.", "confidence_head.")


@dataclass(frozen=True)
class LoadedDSpark:
    """A head ready to run."""

    block: LoadedDFlash
    markov: MarkovHead | None
    confidence: ConfidenceHead | None  # in float32
    description: SerialDescription


def load_dspark(
    folder: Path,
    facts: "TargetFacts",
    tables: "TokenTables | None",
    *,
    device: torch.device,
    dtype: torch.dtype,
    dummy: bool = False,
) -> LoadedDSpark:
    """Read, check and complete a DSpark head in the format of DeepSpec, speculators, SpecForge or our own.

    tables, dummy: see `load_block_head`, which also names what is raised. Besides: `UnsupportedModelError` for a block
    without further heads, `CheckpointError` where they contradict their description.
    """
    refuse_other_blocks(folder)
    names = frozenset() if dummy else locate_tensors(folder).keys()
    from_anchor = silent_layout(folder)
    block = read_description(folder, names, facts, from_anchor, mask_keys=("dspark_noise_token_id",)).config
    described = read_serial(folder, names, block)
    with torch.device("meta"):
        heads = DSparkHead(block, described.config)
    shapes = {name: tuple(w.shape) for name, w in heads.state_dict().items() if name.startswith(_PARTS)}
    renamed = {described.prefix + name: shape for name, shape in shapes.items()}
    loaded = load_block_head(
        folder, facts, tables, device=device, dtype=dtype, extra=renamed, from_anchor=from_anchor, dummy=dummy
    )
    weights = {name: loaded.extra[described.prefix + name] for name in shapes}
    markov = heads.markov_head
    if markov is not None:
        _fill(markov, weights, "markov_head.", device, dtype)
        _fit(markov, len(loaded.head.head_table), facts.vocab_size)
    if heads.confidence_head is not None:
        _fill(heads.confidence_head, weights, "confidence_head.", device, torch.float32)
    return LoadedDSpark(loaded, markov, heads.confidence_head, described)


def _fill(module: nn.Module, weights: dict[str, Tensor], prefix: str, device: torch.device, dtype: torch.dtype) -> None:
    own = {name.removeprefix(prefix): w.to(device, dtype) for name, w in weights.items() if name.startswith(prefix)}
    module.load_state_dict(own, assign=True)
    module.requires_grad_(False)


def _fit(markov: MarkovHead, output_rows: int, vocab_size: int) -> None:
    """Every id of the target may come before a draft, and only what the block can say gets a bias: either may pad."""
    before, after = markov.markov_w1.weight, markov.markov_w2.weight
    table = F.pad(before, (0, 0, 0, max(0, vocab_size - len(before))))
    markov.markov_w1.weight = nn.Parameter(table, requires_grad=False)
    markov.markov_w2.weight = nn.Parameter(after[:output_rows], requires_grad=False)
