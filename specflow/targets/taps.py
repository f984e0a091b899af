"""Hidden states for proposers, taken by hooks.

Layer convention (`specflow.targets.base.Taps`): l is the residual stream after decoder layer l, counted from 0, and
-1 is what enters layer 0. In transformers' `output_hidden_states=True` tuple that is entry l + 1, except that the
tuple's last entry is normed while layer L-1 here is not.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specflow.errors import ConfigError
from specflow.targets import transformers_facts as facts
from specflow.targets.base import Taps


class TapHooks:
    """Hooks of one engine; after each forward pass they hold its hidden states.

    A packed pass has a batch axis of one, which is left out: [T, E]. With `batched` it stays: [B, T, E].
    """

    def __init__(self, model: PreTrainedModel, taps: Taps, batched: bool = False) -> None:
        """Install the hooks. Raises `ConfigError` for a layer the model does not have."""
        self._batched = batched
        layers = facts.decoder_layers(model)
        assert layers is not None
        self.hidden: dict[int, torch.Tensor] = {}  # layer -> [T, E]
        self.last_hidden: torch.Tensor | None = None  # [T, E]
        for layer in taps.layers:
            if not -1 <= layer < len(layers):
                raise ConfigError(
                    f"hidden-state tap on layer {layer}: the target has layers 0 to {len(layers) - 1} "
                    "(-1 is the embedding output)."
                )
        self._handles = [self._tap(layers, layer) for layer in dict.fromkeys(taps.layers)]
        if taps.last_hidden:
            self._handles.append(facts.decoder(model).register_forward_hook(self._keep_last))

    def _tap(self, layers: nn.ModuleList, layer: int) -> Any:
        if layer == -1:
            return layers[0].register_forward_pre_hook(self._keep_input, with_kwargs=True)

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self.hidden[layer] = self._rows(output if isinstance(output, torch.Tensor) else output[0])

        return layers[layer].register_forward_hook(keep)

    def _keep_input(self, _module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        states = inputs[0] if inputs else keywords["hidden_states"]
        self.hidden[-1] = self._rows(states)

    def _keep_last(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self.last_hidden = self._rows(output.last_hidden_state)

    def _rows(self, states: torch.Tensor) -> torch.Tensor:
        return states if self._batched else states[0]

    def remove(self) -> None:
        """Take the hooks out and drop the tensors; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.hidden, self.last_hidden = {}, None
