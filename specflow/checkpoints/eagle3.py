"""EAGLE-3 heads in the formats that are published: EAGLE's own, SpecForge, NVIDIA, speculators, DeepSpec."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from specflow.checkpoints.capture_layers import AuxLayerConvention, CaptureLayers, capture_layers
from specflow.checkpoints.dummy import random_tensors
from specflow.checkpoints.folder import read_json
from specflow.checkpoints.head_layers import describe_layers, layer_windows, read_layer_shape
from specflow.checkpoints.target_tables import borrow_tables, check_fit, check_ids, fit_rows, is_copy
from specflow.checkpoints.tensors import locate_tensors, read_tensors
from specflow.checkpoints.vocabulary_map import take_vocabulary_map, vocabulary_maps
from specflow.checkpoints.weights_hash import weights_hash
from specflow.core.layer_numbers import to_vllm
from specflow.errors import UnsupportedModelError
from specflow.heads.eagle3 import Eagle3Config, Eagle3Head

if TYPE_CHECKING:
    from specflow.targets.base import TargetFacts, TokenTables

# Written by some tools, and of no use here: tables of the target, and frequencies that follow from the config.
_UNUSED = ("verifier_norm.weight", "verifier_lm_head.weight", "t2d", "d2t")

# Names that tell a head apart; one of random weights has output rows of its own and the target's embedding.
_TELLING = ("layers.0.hidden_norm.weight", "lm_head.weight")


@dataclass(frozen=True)
class LoadedEagle3:
    """A head ready to run, and what is worth reporting about it."""

    head: Eagle3Head
    captures: CaptureLayers
    checkpoint_hash: str  # of the tensors as they were read
    num_parameters: int  # of the checkpoint; borrowed tables not counted
    borrowed: tuple[str, ...]  # tables of the target that the head uses


@dataclass(frozen=True)
class Description:
    """config.json of a head, read."""

    config: Eagle3Config
    captures: CaptureLayers


def load_eagle3(
    folder: Path,
    facts: "TargetFacts",
    tables: "TokenTables | None",
    *,
    device: torch.device,
    dtype: torch.dtype,
    convention: AuxLayerConvention = "auto",
    rope_theta: float | None = None,
    dummy: bool = False,
) -> LoadedEagle3:
    """Read, check and complete a head for a target.

    tables: what the head borrows from where it ships no table of its own; None = it must ship both.
    rope_theta: replaces the rotary base of the config. dummy: random weights; the folder needs config.json only.
    Raises `CheckpointError` (incomplete, unknown tensors, shapes, inconsistent vocabulary maps, another target) or
    `UnsupportedModelError` (another method, family or a quantised checkpoint).
    """
    names = {name: name for name in _TELLING} if dummy else _internal_names(folder)
    found = describe_eagle3(folder, facts, convention, frozenset(names.values()))
    config = found.config
    if rope_theta is not None:
        layer = replace(config.layer, rope=replace(config.layer.rope, theta=rope_theta))
        config = replace(config, layer=layer)
    tensors = random_tensors(eagle3_shapes(config), device, dtype) if dummy else _read(folder, config, names)
    digest = weights_hash(tensors)
    ids = take_vocabulary_map(folder, tensors, config.draft_vocab_size, config.vocab_size)
    check_ids(folder, config, ids, facts)
    # A copy of the target's own table is not kept twice.
    if tables is not None and config.own_embedding and is_copy(tensors["embed_tokens.weight"], tables.embedding):
        del tensors["embed_tokens.weight"]
        config = replace(config, own_embedding=False)
    count = sum(tensor.numel() for tensor in tensors.values())
    with torch.device("meta"):
        head = Eagle3Head(config)
    head.load_state_dict({name: tensor.to(device, dtype) for name, tensor in tensors.items()}, assign=True)
    if config.reduced:
        head.ids = ids.to(device)
    head.requires_grad_(False)
    fit_rows(head, facts)
    borrowed = borrow_tables(folder, head, facts, tables, dtype)
    return LoadedEagle3(head, found.captures, digest, count, borrowed)


def describe_eagle3(
    folder: Path, facts: "TargetFacts", convention: AuxLayerConvention, names: frozenset[str]
) -> Description:
    """What config.json says, with the defaults of the tool that wrote it; `names` are our names of the tensors."""
    raw: Mapping[str, Any] = read_json(folder / "config.json")
    _refuse_other_methods(folder, raw, names)
    speculators = "speculators_model_type" in raw
    layers: Mapping[str, Any] = raw.get("transformer_layer_config", {}) if speculators else raw
    shape = read_layer_shape(folder, layers)
    nested: Mapping[str, Any] = raw.get("eagle_config") or {}
    captures = capture_layers(folder, raw, facts.num_layers, convention)
    vocab_size = int(layers.get("vocab_size") or facts.vocab_size)
    num_layers = int(raw.get("draft_num_hidden_layers") or layers.get("num_hidden_layers") or 1)
    config = Eagle3Config(
        layer=shape,
        num_layers=num_layers,
        capture_layers=captures.layers,
        target_hidden_size=int(raw.get("target_hidden_size") or shape.hidden_size),
        vocab_size=vocab_size,
        draft_vocab_size=int(raw.get("draft_vocab_size") or (32_000 if speculators else vocab_size)),
        # vLLM takes a silent speculators config as true, and any other as false.
        norm_before_residual=bool(raw.get("norm_before_residual", speculators)),
        norm_before_fc=bool(nested.get("norm_before_fc", raw.get("norm_before_fc", False))),
        fc_norm=bool(raw.get("fc_norm", False)),
        norm_output=bool(raw.get("norm_output", False)),
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        logit_scale=float(raw.get("logit_scale", 1.0)),
        windows=layer_windows(layers, num_layers),
    )
    check_fit(folder, config, shape.hidden_size, facts)
    return Description(config, captures)


def _refuse_other_methods(folder: Path, raw: Mapping[str, Any], names: frozenset[str]) -> None:
    kind = raw.get("speculators_model_type", "eagle3")
    if "mask_hidden" in names or kind == "peagle":
        raise UnsupportedModelError(f"{folder} is a P-EAGLE head (parallel drafting); proposer=eagle3 runs EAGLE-3.")
    if kind != "eagle3":
        raise UnsupportedModelError(f"{folder} is a {kind!r} head; proposer=eagle3 runs EAGLE-3.")
    nested = raw.get("eagle_config") or {}
    if nested.get("use_aux_hidden_state") is False:
        raise UnsupportedModelError(
            f"{folder} sets eagle_config.use_aux_hidden_state=false: such heads read the target's last state "
            "instead of captured layers, which proposer=eagle3 does not do."
        )
    if "layers.0.hidden_norm.weight" not in names:
        raise UnsupportedModelError(
            f"{folder} has no hidden_norm in its first layer, as EAGLE-3 heads have (EAGLE-1 and others do not): "
            "proposer=eagle3 cannot run it."
        )


def _internal_names(folder: Path) -> dict[str, str]:
    """Names in the files -> the module's names."""
    return {name: name.removeprefix("model.").replace("midlayer.", "layers.0.") for name in locate_tensors(folder)}


def eagle3_shapes(config: Eagle3Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a head's weights, vocabulary maps left out."""
    with torch.device("meta"):
        return {name: tuple(weight.shape) for name, weight in Eagle3Head(config).state_dict().items()}


def _read(folder: Path, config: Eagle3Config, names: Mapping[str, str]) -> dict[str, Tensor]:
    """All weights, and the vocabulary maps that are there, under the module's names."""
    shapes = eagle3_shapes(config)
    present = set(names.values())
    if "d2t" in present or config.reduced:
        shapes["d2t"] = (config.draft_vocab_size,)
    if "t2d" in present:
        shapes["t2d"] = (config.vocab_size,)
    in_file = {ours: name for name, ours in names.items()}
    ignored = {name for name, ours in names.items() if ours in _UNUSED or ours.endswith("rotary_emb.inv_freq")}
    wanted = {in_file.get(ours, ours): shape for ours, shape in shapes.items()}
    tensors = read_tensors(folder, wanted, ignored - wanted.keys())
    return {names[name]: tensor for name, tensor in tensors.items()}


def save_eagle3(
    folder: Path,
    head: Eagle3Head,
    *,
    target_name: str,
    target_architecture: str,
    max_positions: int,
    num_speculative_tokens: int,
) -> None:
    """Write a head in the speculators format: config.json and model.safetensors in bfloat16.

    max_positions: of the target; vLLM loads no head that does not say it.

    Borrowed tables are left out, except that a reduced vocabulary's rows of the target are written, since other
    engines can borrow a whole table only.
    """
    config = head.config
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in head.state_dict().items()}
    maps: dict[str, Tensor] = {}
    if config.reduced:
        weights.setdefault("lm_head.weight", head.head_table.detach().to("cpu", torch.bfloat16))
        maps = vocabulary_maps(head.ids, config.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    content = _config_json(config, target_name, target_architecture, max_positions, num_speculative_tokens)
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in (weights | maps).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _config_json(
    config: Eagle3Config, name: str, architecture: str, max_positions: int, num_drafts: int
) -> dict[str, Any]:
    layers = describe_layers(config.layer, config.num_layers, config.vocab_size)
    layers["max_position_embeddings"] = max_positions
    if any(config.windows):
        kinds = ["sliding_attention" if window else "full_attention" for window in config.windows]
        layers |= {"layer_types": kinds, "sliding_window": max(window or 0 for window in config.windows)}
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(map(to_vllm, config.capture_layers)),
        "aux_layer_convention": "boundary: 0 is the embedding output, b the residual stream entering decoder layer b",
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "transformer_layer_config": layers,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": num_drafts,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": name, "architectures": [architecture]},
        },
    }
