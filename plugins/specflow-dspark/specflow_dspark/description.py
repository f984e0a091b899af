"""config.json of a DSpark head: what DeepSpec, speculators and SpecForge say of the heads on top of the block."""

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specflow.checkpoints.folder import read_json
from specflow.errors import CheckpointError, UnsupportedModelError
from specflow.heads.dflash import DFlashConfig
from specflow_dspark.calibration import Calibration, read_calibration
from specflow_dspark.heads import MARKOV_KINDS, SerialConfig

_CALIBRATION = "confidence_calibration"
_MARKOV, _CONFIDENCE = "markov_head.markov_w1.weight", "confidence_head.proj.weight"
PREFIXES = ("", "logit_head.")  # of the heads' tensors; the second in early exports of SpecForge


@dataclass(frozen=True)
class SerialDescription:
    """What a checkpoint says of the heads on top of its block."""

    config: SerialConfig
    prefix: str  # of their tensors
    calibration: Calibration
    calibrated: bool  # config.json has one


def complete_config(folder: Path, serial: SerialConfig, calibration: Calibration | None) -> None:
    """Add the heads to the config.json that `save_dflash` has written, as SpecForge does."""
    path = folder / "config.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    content["architectures"] = ["DSparkDraftModel"]
    nested = content["dflash_config"]
    nested["projector_type"] = "dspark"
    nested |= {"markov_rank": serial.markov_rank, "enable_confidence_head": serial.confidence}
    if serial.markov_rank:
        nested["markov_head_type"] = serial.markov_kind
    if serial.confidence:
        nested["confidence_head_with_markov"] = serial.confidence_with_markov
    if calibration is not None:
        nested[_CALIBRATION] = calibration.as_json()
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def refuse_other_blocks(folder: Path) -> None:
    """Raise `UnsupportedModelError` for heads whose block is not of Qwen3's kind."""
    names = read_json(folder / "config.json").get("architectures")
    other = [str(name) for name in names if "gemma" in str(name).lower()] if isinstance(names, list) else []
    if other:
        raise UnsupportedModelError(f"{folder} is a {other[0]}, whose layers are Gemma's: only Qwen3's kind is run.")


def silent_layout(folder: Path) -> bool | None:
    """Whether rows answer from the anchor on where config.json does not say so: in SpecForge's format they do; None
    where specflow's own rules for block heads decide."""
    return True if _entry(read_json(folder / "config.json"), "projector_type") == "dspark" else None


def read_serial(folder: Path, names: Collection[str], block: DFlashConfig) -> SerialDescription:
    """The heads that config.json describes, on top of a block. names: tensors of the checkpoint.

    Raises `UnsupportedModelError` for a block without them and for kinds of heads that are not known, `CheckpointError`
    where file and description contradict each other.
    """
    raw: Mapping[str, Any] = read_json(folder / "config.json")
    prefix = next((p for p in PREFIXES if p + _MARKOV in names or p + _CONFIDENCE in names), "")
    rank = _entry(raw, "markov_rank")
    if rank is None:
        rank = 0 if prefix + _MARKOV not in names else -1
    confidence = _entry(raw, "enable_confidence_head")
    confidence = prefix + _CONFIDENCE in names if confidence is None else bool(confidence)
    if not isinstance(rank, int) or rank < 0:
        raise CheckpointError(f"{folder / 'config.json'} has markov_rank={rank!r}: it must be a number of 0 or more.")
    if not rank and not confidence:
        raise UnsupportedModelError(
            f"{folder} has neither a Markov nor a confidence head on top of its block: use proposer=dflash."
        )
    kind = str(_entry(raw, "markov_head_type") or "vanilla").lower()
    if kind not in MARKOV_KINDS:
        raise UnsupportedModelError(f"{folder} has a Markov head of type {kind}; there are {', '.join(MARKOV_KINDS)}.")
    if kind == "rnn" and not block.sample_from_anchor:
        raise UnsupportedModelError(
            f"{folder} has a recurrent Markov head on a block in the fill-in layout (sample_from_anchor=false), whose "
            "memory begins at a row that says no draft: it is not run."
        )
    with_markov = _entry(raw, "confidence_head_with_markov")
    with_markov = bool(rank) if with_markov is None else bool(with_markov)
    if confidence and with_markov and not rank:
        raise CheckpointError(f"{folder / 'config.json'} has confidence_head_with_markov but markov_rank=0.")
    try:
        calibration = read_calibration(_entry(raw, _CALIBRATION), block.max_drafts)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / 'config.json'} has a {_CALIBRATION} that cannot be read: {error}.") from None
    config = SerialConfig(
        markov_rank=rank,
        markov_kind=kind,  # type: ignore[arg-type]
        confidence=confidence,
        confidence_with_markov=with_markov,
    )
    return SerialDescription(config, prefix, calibration, _entry(raw, _CALIBRATION) is not None)


def _entry(raw: Mapping[str, Any], key: str) -> Any:
    """An entry of `dflash_config`, or of the top level; None where neither has it."""
    nested = raw.get("dflash_config") or {}
    return nested[key] if nested.get(key) is not None else raw.get(key)
