"""Layer numbers: ours, and what other projects call the same tensor.

Ours (`specflow.targets.base.Taps`): l is the residual stream after decoder layer l, counted from 0; -1 is the embedding
output. Never the final norm. vLLM and speculators count the layers before the tensor instead; z-lab's DFlash configs
(`target_layer_ids`) count as we do. The table is in docs/hidden_states.md.
"""

from collections.abc import Sequence

from specflow.errors import ConfigError

__all__ = ["CONVENTION", "absent_layers", "check_layers", "from_vllm", "to_vllm"]

CONVENTION = "l = residual stream after decoder layer l, from 0; -1 = embedding output; before the final norm"


def to_vllm(layer: int) -> int:
    """Our layer as an entry of vLLM's `eagle_aux_hidden_state_layer_ids`: 0 is the embedding output."""
    return layer + 1


def from_vllm(layer_id: int) -> int:
    """An entry of `eagle_aux_hidden_state_layer_ids` as our layer."""
    return layer_id - 1


def absent_layers(layers: Sequence[int], num_layers: int) -> list[int]:
    """Those of our layers that a target of `num_layers` decoder layers does not have."""
    return [layer for layer in layers if not -1 <= layer < num_layers]


def check_layers(layers: Sequence[int], num_layers: int, option: str) -> None:
    """Refuse layers that the target does not have. Raises `ConfigError`."""
    wrong = absent_layers(layers, num_layers)
    if wrong:
        hint = " The last layer of a count that starts at 1 is one less here." if wrong == [num_layers] else ""
        raise ConfigError(
            f"{option}={list(layers)}: the target has no layer {wrong[0]}. Its decoder layers are 0 to "
            f"{num_layers - 1}, and -1 is the embedding output.{hint}"
        )
