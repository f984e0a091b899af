"""config.json of a DFlash head, in the formats of z-lab and SpecForge, speculators, and DeepSpec."""

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specflow.checkpoints.folder import read_json
from specflow.checkpoints.head_layers import describe_layers, layer_windows, read_layer_shape
from specflow.checkpoints.mask_token import MASK_KEYS, find_mask_token
from specflow.checkpoints.target_tables import OTHER_TARGET, check_fit
from specflow.core.layer_numbers import from_vllm
from specflow.errors import CheckpointError, UnsupportedModelError
from specflow.heads.dflash import BlockLayer, DFlashConfig

if TYPE_CHECKING:
    from specflow.targets.base import TargetFacts

_PLAIN = ("DFlashDraftModel", "DFlashSpeculator")
_DEEPSPEC = "markov_rank"  # a config.json of DeepSpec has it for every kind of head, 0 for a plain block
_OTHERS = {"dflash2": "DFlash2", "domino": "Domino", "xpress": "XPress", "lilicorr": "LiLiCorr", "laguna": "Laguna"}
# Entries that change what a layer computes, and what they would ask for.
_CHANGED_LAYERS = {"attention_sink_bias": "attention sinks", "attention_value_scale": "scaled values"}
_CONVENTION = "target_layer_ids: l = residual stream after decoder layer l, from 0; -1 = embedding output"


@dataclass(frozen=True)
class Description:
    """A config.json, read."""

    config: DFlashConfig
    layout: str  # how `sample_from_anchor` was found
    trained_for: str | None  # the target, if the file names it


def default_capture_layers(num_layers: int, count: int) -> tuple[int, ...]:
    """Up to `count` layers of a target of N layers, ascending, as `Taps` counts.

    z-lab's rule, which a z-lab config without a list means: round(1 + i (N - 4) / (count - 1)), or N // 2 for one.
    Where it gives no `count` different layers (shallow targets, user case C32) they are spread over all but the last,
    or over all if there are no more than that.
    """
    if count == 1:
        return (num_layers // 2,)
    layers = tuple(round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count))
    if _ascending(layers) and layers[0] >= 0 and layers[-1] < num_layers:
        return layers
    count = min(count, num_layers)
    last = num_layers - 1 if count == num_layers else num_layers - 2
    return tuple(round(i * last / max(1, count - 1)) for i in range(count))


def read_description(
    folder: Path,
    names: Collection[str],
    facts: "TargetFacts",
    from_anchor: bool | None = None,
    mask_keys: Collection[str] = (),
) -> Description:
    """Read config.json of a head with tensors `names`, for a target. Heads on top of the block are not looked at.

    from_anchor: the layout where config.json says nothing of it; None = as plain heads of its format have it.
    mask_keys: other names of the mask token in config.json.
    Raises `CheckpointError` (incomplete, contradictory, or of another target) or `UnsupportedModelError`.
    """
    raw: Mapping[str, Any] = read_json(folder / "config.json")
    layers: Mapping[str, Any] = raw.get("transformer_layer_config") or raw
    shape = read_layer_shape(folder, layers)
    _refuse_changed_layers(folder, raw)
    vocab_size = int(layers.get("vocab_size") or facts.vocab_size)
    layout, reason = answers_from_anchor(raw, from_anchor)
    num_layers = _number(folder, layers, "num_hidden_layers")
    config = DFlashConfig(
        shape=shape,
        block_layers=_block_layers(folder, raw, layers, num_layers),
        block_size=_number(folder, raw, "block_size"),
        sample_from_anchor=layout,
        capture_layers=_capture_layers(folder, raw, facts, num_layers),
        target_hidden_size=int(_entry(raw, "target_hidden_size") or shape.hidden_size),
        num_target_layers=_entry(raw, "num_target_layers"),
        mask_token_id=_mask_token(folder, raw, mask_keys),
        vocab_size=vocab_size,
        draft_vocab_size=int(raw.get("draft_vocab_size") or vocab_size),
        own_embedding="embed_tokens.weight" in names,
        own_head="lm_head.weight" in names,
        embedding_scale=float(_entry(raw, "input_embedding_scale") or 1.0),
        logit_scale=float(_entry(raw, "output_multiplier") or 1.0),
        logit_softcap=_entry(raw, "final_logit_softcapping") or None,
    )
    _check(folder, config, facts)
    trained_for = (raw.get("speculators_config") or {}).get("verifier", {}).get("name_or_path")
    return Description(config, reason, trained_for)


def refuse_other_methods(folder: Path) -> None:
    """Raise `UnsupportedModelError` unless config.json describes a plain DFlash head."""
    raw: Mapping[str, Any] = read_json(folder / "config.json")
    kind, projector = raw.get("speculators_model_type"), _entry(raw, "projector_type")
    names = [str(name) for name in (*(raw.get("architectures") or ()), kind, projector) if name]
    advice = "proposer=dflash runs plain DFlash heads"
    for word, method in _OTHERS.items():
        if any(word in name.lower() for name in names) or _entry(raw, f"{word}_enabled"):
            raise UnsupportedModelError(f"{folder} is a {method} head ({', '.join(names)}); {advice}.")
    if _entry(raw, "selector_rank") or _entry(raw, "conv_kernel_size"):
        raise UnsupportedModelError(f"{folder} has convolutions or a selector, as DFlash2 heads have; {advice}.")
    serial = [key for key in ("markov_rank", "enable_confidence_head") if _entry(raw, key)]
    if serial or kind not in (None, "dflash") or projector not in (None, "dflash"):
        found = f"{serial[0]}={_entry(raw, serial[0])}" if serial else ", ".join(names)
        raise UnsupportedModelError(
            f"{folder} has a further head on top of its block ({found}), which corrects drafts; {advice}. "
            "Use a proposer made for it."
        )
    known = [name for name in raw.get("architectures") or () if name in _PLAIN]
    if not known and kind != "dflash" and not {"dflash_config", _DEEPSPEC} & raw.keys():
        shown = ", ".join(names) or "no architecture"
        raise UnsupportedModelError(f"{folder} is no DFlash head (its config.json names {shown}); {advice}.")


def answers_from_anchor(raw: Mapping[str, Any], silent: bool | None = None) -> tuple[bool, str]:
    """Which way the rows of a block answer, see `DFlashConfig.sample_from_anchor`, and how that was found.

    The config's own word counts first, then `silent`. Without either it is fill-in, except DeepSpec's and those whose
    projector says otherwise; a checkpoint's name says nothing.
    """
    given = _entry(raw, "sample_from_anchor")
    if given is not None:
        return bool(given), f"sample_from_anchor={str(bool(given)).lower()} in config.json"
    if silent is not None:
        return silent, "the method's layout"
    kind = raw.get("speculators_model_type")
    if kind is not None:
        return False, f"speculators' default for {kind}"
    if _DEEPSPEC in raw:
        return True, "DeepSpec's layout"
    projector = _entry(raw, "projector_type")
    if projector == "domino":
        return bool(_entry(raw, "shift_label")), "shift_label in config.json"
    return False, "z-lab's layout"


def describe_dflash(config: DFlashConfig) -> dict[str, Any]:
    """config.json of a head of our own, in z-lab's format with its layout and layer convention spelt out.

    Raises `ValueError` for layers that the format cannot tell apart.
    """
    windows = {layer.window for layer in config.block_layers if layer.window is not None}
    causal = {layer.causal for layer in config.block_layers}
    usual = all(layer.causal == (layer.window is not None) for layer in config.block_layers)
    if len(windows) > 1 or (not usual and len(causal) > 1):
        raise ValueError(f"z-lab's format has one window and one causal rule, and the head has {config.block_layers}")
    num_layers = len(config.block_layers)
    kinds = ["full_attention" if layer.window is None else "sliding_attention" for layer in config.block_layers]
    content = describe_layers(config.shape, num_layers, config.vocab_size) | {
        "architectures": ["DFlashDraftModel"],
        "block_size": config.block_size,
        "num_target_layers": config.num_target_layers,
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "layer_types": kinds,
        "sliding_window": windows.pop() if windows else None,
        "use_sliding_window": "sliding_attention" in kinds,
        "max_window_layers": num_layers,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": list(config.capture_layers),
            "layer_convention": _CONVENTION,
            "sample_from_anchor": config.sample_from_anchor,
            "input_embedding_scale": config.embedding_scale,
            "output_multiplier": config.logit_scale,
            "final_logit_softcapping": config.logit_softcap or 0.0,
        },
    }
    return content if usual else content | {"is_causal": causal.pop()}


def _entry(raw: Mapping[str, Any], key: str) -> Any:
    """An entry of `dflash_config`, or of the top level; None where neither has it."""
    nested = raw.get("dflash_config") or {}
    return nested[key] if nested.get(key) is not None else raw.get(key)


def _number(folder: Path, raw: Mapping[str, Any], key: str) -> int:
    value = _entry(raw, key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{folder / 'config.json'} has {key}={value!r}: it must be a number of 1 or more.")
    return value


def _mask_token(folder: Path, raw: Mapping[str, Any], other_keys: Collection[str]) -> int:
    if (folder / "mask_embedding.pt").exists():
        raise UnsupportedModelError(
            f"{folder} has mask_embedding.pt, an embedding of its own for the mask token, which is not read: "
            "proposer=dflash takes the mask's row of the embedding table."
        )
    found = find_mask_token(raw, (*MASK_KEYS, *other_keys))
    if found is None or not isinstance(found.value, int):
        raise CheckpointError(f"{folder / 'config.json'} names no mask_token_id (in dflash_config or at the top).")
    return found.value


def _refuse_changed_layers(folder: Path, raw: Mapping[str, Any]) -> None:
    for key, meaning in _CHANGED_LAYERS.items():
        if _entry(raw, key):
            raise UnsupportedModelError(f"{folder} has layers with {meaning} ({key}), which are not run.")
    if _entry(raw, "use_aux_hidden_state") is False:
        raise UnsupportedModelError(f"{folder} reads only the target's last state (use_aux_hidden_state=false).")
    if raw.get("is_neox_style") is False:
        raise UnsupportedModelError(f"{folder} rotates neighbouring pairs (is_neox_style=false), which is not run.")


def _capture_layers(folder: Path, raw: Mapping[str, Any], facts: "TargetFacts", num_layers: int) -> tuple[int, ...]:
    """As `Taps` counts. speculators counts the layers before a tensor, which is one more; the others count as we do."""
    speculators = "speculators_model_type" in raw
    key = "aux_hidden_state_layer_ids" if speculators else "target_layer_ids"
    listed = _entry(raw, key)
    if not listed and speculators:
        raise CheckpointError(f"{folder / 'config.json'} names no {key}: the layers of the target that the head reads.")
    depth = int(_entry(raw, "num_target_layers") or facts.num_layers)
    numbers = tuple(map(int, listed)) if listed else default_capture_layers(depth, num_layers)
    layers = tuple(map(from_vllm, numbers)) if speculators else numbers
    if not _ascending(layers) or layers[0] < -1:
        raise CheckpointError(f"{folder / 'config.json'} has {key}={listed}: the layers must be different and ascend.")
    return layers


def _ascending(layers: tuple[int, ...]) -> bool:
    return all(first < second for first, second in itertools.pairwise(layers))


def _block_layers(
    folder: Path, raw: Mapping[str, Any], layers: Mapping[str, Any], num_layers: int
) -> tuple[BlockLayer, ...]:
    """Window and direction of each layer; who trained the head decides what a sliding layer means."""
    kinds = layers.get("layer_types") or ["full_attention"] * num_layers
    if len(kinds) != num_layers:
        raise CheckpointError(f"{folder / 'config.json'} has {len(kinds)} layer_types for {num_layers} layers.")
    swa_size = _entry(raw, "swa_window_size")
    window = swa_size or layers.get("sliding_window")
    all_sliding = bool(_entry(raw, "use_swa")) and "sliding_attention" not in kinds
    if all_sliding:
        kinds = ["sliding_attention"] * num_layers
    if "sliding_attention" in kinds and not window:
        raise CheckpointError(f"{folder / 'config.json'} has sliding layers but no sliding_window.")
    windows = layer_windows({"layer_types": kinds, "sliding_window": window}, num_layers)
    sliding_is_causal = not all_sliding
    forced = None
    if "speculators_model_type" in raw:
        sliding_is_causal = not raw.get("sliding_window_non_causal", False)
    else:
        forced = raw.get("is_causal", (raw.get("dflash_config") or {}).get("causal"))
    return tuple(
        BlockLayer(window=size, causal=bool(forced) if forced is not None else size is not None and sliding_is_causal)
        for size in windows
    )


def _check(folder: Path, config: DFlashConfig, facts: "TargetFacts") -> None:
    """Raise `CheckpointError` where head and target do not fit."""
    check_fit(folder, config, config.shape.hidden_size, facts)
    if config.num_target_layers not in (None, facts.num_layers) or config.capture_layers[-1] >= facts.num_layers:
        trained = config.num_target_layers or "more"
        raise CheckpointError(
            f"{folder} reads layers {list(config.capture_layers)} of a target with {trained} layers, and target "
            f"{facts.name} has {facts.num_layers}: {OTHER_TARGET}."
        )
    rows = config.vocab_size if config.own_embedding else facts.vocab_size
    if not 0 <= config.mask_token_id < rows:
        raise CheckpointError(f"{folder} has mask_token_id={config.mask_token_id}, and the embedding has {rows} rows.")
    if config.reduced and not config.own_head:
        raise CheckpointError(
            f"{folder} drafts {config.draft_vocab_size} of {config.vocab_size} ids but lacks lm_head.weight: it is "
            "incomplete."
        )
    if config.max_drafts < 1:
        raise CheckpointError(f"{folder} has block_size={config.block_size}, which leaves no draft.")
