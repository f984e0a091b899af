"""What each decoder layer stores, found out by running one token; and the models whose layers cannot be served.

transformers accepts an attention name for models that never call it, and runs recurrent layers on packed requests
without a complaint: both give wrong numbers silently. So every layer must be seen calling attention exactly once.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specflow.errors import UnsupportedModelError
from specflow.targets import transformers_facts as facts


@dataclass(frozen=True)
class LayerShape:
    """What one token told about one decoder layer; the config is not asked, because it does not know for all models."""

    module: nn.Module  # calls the attention function
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    donor: int | None  # earlier layer whose keys and values this one reads, None for its own
    scale: float  # of the scores
    window: int | None
    plain: bool  # neither soft-cap nor sinks

    @property
    def kv_size(self) -> int:
        """Values stored per token."""
        return 0 if self.donor is not None else self.num_kv_heads * (self.key_size + self.value_size)


def probe_layers(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Run one token with a recording attention function; returns one shape per decoder layer.

    Raises `UnsupportedModelError` naming the first layer that does not call attention exactly once, or whose rule
    cannot be told from its arguments.
    """
    layers = facts.decoder_layers(model)
    if layers is None:
        raise UnsupportedModelError(f"{type(model).__name__}: found no list of decoder layers, so it cannot be probed.")
    _refuse_known(model, layers)
    owners = {module: index for index, layer in enumerate(layers) for module in layer.modules()}
    shapes: dict[int, LayerShape] = {}
    donors: dict[int, int] = {}
    for call in _record_calls(model):
        index = owners.get(call.module)
        if index is None or index in shapes:
            where = "outside the decoder layers" if index is None else f"twice in layer {index}"
            raise UnsupportedModelError(
                f"{type(model).__name__} calls attention {where} ({type(call.module).__name__}); it takes exactly "
                "one call in each decoder layer."
            )
        # A layer that shares keys passes the very tensor of its donor.
        donor = donors.get(call.key.data_ptr())
        donors.setdefault(call.key.data_ptr(), index)
        shapes[index] = call.shape(donor)
    for index, layer in enumerate(layers):
        if index not in shapes:
            _refuse_silent_layer(model, index, layer)
    return tuple(shapes[index] for index in range(len(layers)))


@dataclass(frozen=True)
class _Call:
    """One call of the attention function; the tensors are kept, so that their addresses stay distinct."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rules: dict[str, Any]

    def shape(self, donor: int | None) -> LayerShape:
        size = self.query.shape[3]
        return LayerShape(
            module=self.module,
            num_heads=self.query.shape[1],
            num_kv_heads=self.key.shape[1],
            key_size=size,
            value_size=self.value.shape[3],
            donor=donor,
            scale=self.rules.get("scaling") or size**-0.5,
            window=self.rules.get("sliding_window"),
            plain=self.rules.get("softcap") is None and self.rules.get("s_aux") is None,
        )


def _record_calls(model: PreTrainedModel) -> list[_Call]:
    """Every attention call of a forward pass of one token."""
    calls = []

    def record(
        module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **rules: Any
    ) -> Any:
        calls.append(_Call(module, query, key, value, rules))
        return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None

    name, before = facts.unique_attention_name(), facts.current_attention(model)
    facts.register_attention(name, record)
    try:
        facts.use_attention(model, name)
        token = torch.zeros(1, 1, dtype=torch.int64, device=next(model.parameters()).device)
        with torch.inference_mode():
            model(input_ids=token, position_ids=token.clone(), use_cache=False)
    except Exception as error:  # whatever foreign model code raises
        raise UnsupportedModelError(
            f"{type(model).__name__} failed on one token with specflow's attention: {type(error).__name__}: {error}\n"
            "Its layers need something other than keys and values per token, so it cannot be a target."
        ) from error
    finally:
        facts.use_attention(model, before)
        facts.unregister_attention(name)
    return calls


def _refuse_known(model: PreTrainedModel, layers: nn.ModuleList) -> None:
    name = type(model).__name__
    for index, layer in enumerate(layers):
        if facts.is_recurrent(facts.mixer(layer)):
            _refuse_silent_layer(model, index, layer)
    if (unknown := facts.unknown_layer_type(facts.text_config(model))) is not None:
        raise UnsupportedModelError(
            f"{name}: layer {unknown[0]} is of type {unknown[1]!r}, whose rule is not told to the attention function "
            f"and would be lost silently. Supported are {', '.join(facts.KNOWN_LAYER_TYPES)}."
        )
    if (indexer := facts.indexer(model)) is not None:
        raise UnsupportedModelError(
            f"{name}: {indexer} selects the keys each token may see, and that choice does not reach the attention "
            "function. Models with an attention indexer are not supported."
        )


def _refuse_silent_layer(model: PreTrainedModel, index: int, layer: nn.Module) -> None:
    part = facts.mixer(layer)
    where = f"{type(model).__name__}: layer {index} ({type(part).__name__} in {type(layer).__name__})"
    if facts.is_recurrent(part):
        raise UnsupportedModelError(
            f"{where} keeps a recurrent state, which cannot be rolled back when drafts are rejected and which mixes "
            "the requests of a packed batch. Recurrent targets are not supported yet."
        )
    raise UnsupportedModelError(
        f"{where} runs its own attention code and never calls the attention interface, so it would read no cached "
        "tokens. This architecture cannot be a target."
    )
