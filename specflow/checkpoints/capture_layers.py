"""Which layers of the target an EAGLE-3 checkpoint was trained on: the same number means two things in the wild.

*Boundary* (vLLM, speculators, EAGLE): 0 is the embedding output, b the residual stream entering decoder layer b.
*Output* (SpecForge, older NVIDIA heads, DeepSpec): l is the residual stream leaving decoder layer l, which is how
`specflow.core.layer_numbers` counts. So output = boundary - 1. A wrong guess breaks nothing and halves acceptance.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from specflow.core.layer_numbers import absent_layers, from_vllm, to_vllm
from specflow.errors import CheckpointError, ConfigError

AuxLayerConvention = Literal["auto", "boundary", "output"]
CONVENTIONS = get_args(AuxLayerConvention)
_IDS = "eagle_aux_hidden_state_layer_ids"
_FEWEST_FOR_RULE = 7  # layers from which on the three default numbers differ


@dataclass(frozen=True)
class CaptureLayers:
    """Layers as `Taps` counts, ascending, and how they were found, for the report."""

    layers: tuple[int, ...]
    source: str

    @property
    def boundaries(self) -> tuple[int, ...]:
        """The same in vLLM's numbers."""
        return tuple(map(to_vllm, self.layers))


def default_layers(num_layers: int) -> tuple[int, ...] | None:
    """What a config that says nothing means, for a target of N layers: boundaries 2, N // 2 and N - 3.

    None below 7 layers, where these are not three different layers (user case C32).
    """
    if num_layers < _FEWEST_FOR_RULE:
        return None
    return (1, num_layers // 2 - 1, num_layers - 4)


def capture_layers(
    folder: Path, raw: Mapping[str, Any], num_layers: int, convention: AuxLayerConvention = "auto"
) -> CaptureLayers:
    """Find the captured layers of a head for a target of `num_layers` layers.

    convention: what the numbers in the config mean; auto = as the tool that wrote this kind of entry means them.
    Raises `CheckpointError` for layers that the target does not have, or when none are named and there is no default.
    """
    numbers, usual, entry = _named(raw)
    if numbers is None:
        return _defaults(folder, raw, num_layers, convention)
    meant = usual if convention == "auto" else convention
    layers = sorted({from_vllm(int(number)) if meant == "boundary" else int(number) for number in numbers})
    if absent_layers(layers, num_layers):
        raise CheckpointError(
            f"{folder} captures layers {list(numbers)} of its target ({entry}, read as {meant}), but the target has "
            f"{num_layers} layers: the head belongs to another target, or set proposer.aux_layer_convention."
        )
    return CaptureLayers(tuple(layers), f"{entry} = {list(numbers)}, read as {meant}")


def _named(raw: Mapping[str, Any]) -> tuple[Sequence[int] | None, str, str]:
    """The numbers of a config, what they usually mean there, and the entry they stand in."""
    nested = raw.get("eagle_config") or {}
    if raw.get(_IDS):
        return raw[_IDS], "boundary", _IDS
    if raw.get("target_layer_ids"):
        return raw["target_layer_ids"], "output", "target_layer_ids"
    if nested.get(_IDS):
        # Tools that count outputs start at layer 1; those that count boundaries at 2 or deeper.
        numbers = nested[_IDS]
        return numbers, "output" if numbers[0] == 1 else "boundary", f"eagle_config.{_IDS}"
    if nested.get("layer_ids"):
        return nested["layer_ids"], "boundary", "eagle_config.layer_ids"
    return None, "", ""


def _defaults(folder: Path, raw: Mapping[str, Any], num_layers: int, convention: AuxLayerConvention) -> CaptureLayers:
    if convention != "auto":
        raise ConfigError(
            f"proposer.aux_layer_convention={convention}, but {folder} names no layers: leave the option at auto."
        )
    count = raw.get("num_aux_hidden_states") or raw.get("num_aux_layers") or 3
    layers = default_layers(num_layers)
    silent = f"{folder / 'config.json'} does not say which layers of its target it reads"
    if count != 3:
        raise CheckpointError(f"{silent}, and there is no rule for {count}: add {_IDS} (0 = embedding output) to it.")
    if layers is None:
        raise CheckpointError(
            f"{silent}, and the usual three (2, N // 2, N - 3) are not three different ones for N={num_layers} layers: "
            f"add {_IDS} (0 = embedding output) to it."
        )
    return CaptureLayers(layers, "the config names none: usual layers 2, N // 2, N - 3, read as boundary")
