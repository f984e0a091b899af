"""DFlash heads on disk: reading them complete and fitted to a target, and writing our own."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from specflow.checkpoints.dflash_config import Description, describe_dflash, read_description, refuse_other_methods
from specflow.checkpoints.dummy import random_tensors
from specflow.checkpoints.folder import read_json
from specflow.checkpoints.target_tables import borrow_tables, check_ids, fit_rows, is_copy
from specflow.checkpoints.tensors import Shapes, locate_tensors, read_tensors
from specflow.checkpoints.vocabulary_map import take_vocabulary_map, vocabulary_maps
from specflow.checkpoints.weights_hash import weights_hash
from specflow.heads.dflash import DFlashConfig, DFlashHead

if TYPE_CHECKING:
    from specflow.targets.base import TargetFacts, TokenTables

# Parts of the target that some training tools leave in the file.
_UNUSED = ("verifier_lm_head.weight", "verifier_norm.weight")


@dataclass(frozen=True)
class LoadedDFlash:
    """A head ready to run, and what is worth reporting about it."""

    head: DFlashHead
    description: Description
    checkpoint_hash: str  # of the tensors as they were read
    num_parameters: int  # in memory; borrowed tables not counted
    borrowed: tuple[str, ...]  # tables of the target that the head uses
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # what `load_block_head` was asked for besides


def load_dflash(
    folder: Path,
    facts: "TargetFacts",
    tables: "TokenTables | None",
    *,
    device: torch.device,
    dtype: torch.dtype,
    dummy: bool = False,
) -> LoadedDFlash:
    """Read, check and complete a plain DFlash head for a target; see `load_block_head`."""
    refuse_other_methods(folder)
    return load_block_head(folder, facts, tables, device=device, dtype=dtype, dummy=dummy)


def load_block_head(
    folder: Path,
    facts: "TargetFacts",
    tables: "TokenTables | None",
    *,
    device: torch.device,
    dtype: torch.dtype,
    extra: Shapes | None = None,
    from_anchor: bool | None = None,
    dummy: bool = False,
) -> LoadedDFlash:
    """Read, check and complete the block part of a head, whatever stands on top of it.

    tables: what the head borrows from where it ships no table of its own; None = it must ship both.
    extra: further tensors that the folder must hold, for heads with more than a block; they come back unchanged.
    from_anchor: see `read_description`.
    dummy: random weights; the folder needs config.json only.
    Raises `CheckpointError` (incomplete, unknown tensors, shapes, vocabulary maps, another target) or
    `UnsupportedModelError` (other layers, quantised).
    """
    names = _names_of_dummy(folder) if dummy else locate_tensors(folder).keys()
    described = read_description(folder, names, facts, from_anchor)
    config = described.config
    shapes = dflash_shapes(config)
    for name, length in (("d2t", config.draft_vocab_size), ("t2d", config.vocab_size)):
        if name in names or (name == "d2t" and config.reduced and not dummy):
            shapes[name] = (length,)
    shapes |= extra or {}
    tensors = random_tensors(shapes, device, dtype) if dummy else read_tensors(folder, shapes, _UNUSED)
    digest = weights_hash(tensors)
    further = {name: tensors.pop(name) for name in extra or ()}
    ids = take_vocabulary_map(folder, tensors, config.draft_vocab_size, config.vocab_size)
    check_ids(folder, config, ids, facts)
    config = _drop_copies(config, tensors, tables)
    with torch.device("meta"):
        head = DFlashHead(config)
    head.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    if config.reduced:
        head.ids = ids.to(device)
    head.requires_grad_(False)
    fit_rows(head, facts)
    borrowed = borrow_tables(folder, head, facts, tables, dtype)
    if "head" in borrowed and config.logit_softcap is None and tables is not None:
        head.config = replace(config, logit_softcap=tables.logit_softcap)
    count = sum(tensor.numel() for tensor in (*head.parameters(), *further.values()))
    described = replace(described, config=head.config)
    return LoadedDFlash(head, described, digest, count, borrowed, further)


def _names_of_dummy(folder: Path) -> frozenset[str]:
    """Tables that a head of random weights brings itself; what it lacks it borrows, and a reduced one cannot."""
    raw = read_json(folder / "config.json")
    reduced = raw.get("draft_vocab_size") not in (None, raw.get("vocab_size"))
    return frozenset({"lm_head.weight"} if reduced else ())


def dflash_shapes(config: DFlashConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's weights, vocabulary maps left out."""
    with torch.device("meta"):
        return {name: tuple(weight.shape) for name, weight in DFlashHead(config).state_dict().items()}


def save_dflash(folder: Path, head: DFlashHead, extra: Mapping[str, Tensor] | None = None) -> None:
    """Write config.json and model.safetensors in bfloat16, in z-lab's format; borrowed tables are left out.

    extra: further tensors, for heads with more than a block; the caller then completes config.json.
    """
    config = head.config
    weights = {**head.state_dict(), **(extra or {})}
    tensors = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in weights.items()}
    if config.reduced:
        tensors |= vocabulary_maps(head.ids, config.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(describe_dflash(config), indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _drop_copies(config: DFlashConfig, tensors: dict[str, Tensor], tables: "TokenTables | None") -> DFlashConfig:
    """A copy of the target's own table is not kept twice."""
    if tables is None:
        return config
    if config.own_embedding and is_copy(tensors["embed_tokens.weight"], tables.embedding):
        del tensors["embed_tokens.weight"]
        config = replace(config, own_embedding=False)
    if config.own_head and not config.reduced and is_copy(tensors["lm_head.weight"], tables.head):
        del tensors["lm_head.weight"]
        config = replace(config, own_head=False)
    return config
