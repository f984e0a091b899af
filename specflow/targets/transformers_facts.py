"""Everything specflow assumes about transformers beyond its documented interface, in one place.

Each function is one assumption; `tests/targets/test_transformers_facts.py` checks them one by one against the
installed version, so that an upgrade which breaks one is found by name.
"""

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, PreTrainedModel

# Parts of a name that make transformers look for a kernel package or a hub repository instead of our function.
RESERVED_IN_NAMES = ("flash", "sdpa", "flex_attention", "eager", "paged|", "/")

# Entries of `config.layer_types` whose rule we receive as arguments of the attention call.
KNOWN_LAYER_TYPES = ("full_attention", "sliding_attention")

# Rotary embeddings whose frequencies depend on the longest position of the whole batch.
LENGTH_DEPENDENT_ROPE = ("longrope", "dynamic")

# Decoder layers that are exactly: norm, grouped attention with half-split rotary embedding, norm, gated SiLU; and that
# take `position_embeddings` by keyword and return the hidden states alone.
PLAIN_DECODER_LAYERS = ("LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer")

# Norms of those models: RMSNorm in float32, rounded, then times the weight.
PLAIN_NORMS = ("LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm", "Qwen3RMSNorm")

# Words in class names of mixers that carry a state from token to token.
_RECURRENT_WORDS = ("mamba", "deltanet", "conv", "rwkv", "lstm", "recurrent", "linearattention", "lightning", "ssm")

_serial = itertools.count()


def unique_attention_name() -> str:
    """A name no other engine of this process uses."""
    return f"specflow_paged_{next(_serial)}"


def register_attention(name: str, function: Callable[..., tuple[torch.Tensor, None]]) -> None:
    """Make `function` selectable as attention `name`, and no mask function with it, so that no mask is ever built.

    Registration is on the class: item assignment on the shared instance would be seen by one module only.
    """
    if any(part in name for part in RESERVED_IN_NAMES):
        raise ValueError(f"attention name {name!r} contains one of {RESERVED_IN_NAMES}, which transformers interprets")
    AttentionInterface.register(name, function)


def unregister_attention(name: str) -> None:
    """Forget a registered attention; unknown names are ignored. There is no public way to do it."""
    AttentionInterface._global_mapping.pop(name, None)


def registered_attention() -> Iterable[str]:
    """Names of all selectable attention functions."""
    return tuple(AttentionInterface._global_mapping)


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Switch every attention layer of the model to `name` ("eager" is the model's own plain code).

    Models that do not go through the attention interface only log a warning: whether our function is called is
    found out by probing, never by asking.
    """
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        model.set_attn_implementation(name)
    finally:
        transformers.logging.set_verbosity(verbosity)


def current_attention(model: PreTrainedModel) -> str:
    """Name of the attention the decoder's layers use."""
    return str(text_config(model)._attn_implementation)


def text_config(model: PreTrainedModel) -> Any:
    """Config of the language model, also inside a model of several towers."""
    return model.config.get_text_config(decoder=True)


def decoder(model: PreTrainedModel) -> nn.Module:
    """The language model without its output head; its output carries `last_hidden_state` after the final norm."""
    return model.get_decoder()


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The decoder layers in order of execution, None if there is no list of `num_hidden_layers` modules."""
    count = text_config(model).num_hidden_layers
    for module in decoder(model).modules():
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module
    return None


def final_norm(model: PreTrainedModel) -> nn.Module:
    """The norm behind the last decoder layer, of models with `has_plain_ends`."""
    return decoder(model).norm  # type: ignore[return-value]


def rotary_embedding(model: PreTrainedModel) -> nn.Module:
    """Makes cos and sin of all positions of a pass, of models with `has_plain_ends`."""
    return decoder(model).rotary_emb  # type: ignore[return-value]


def has_plain_ends(model: PreTrainedModel) -> bool:
    """Whether a rotary table made once, RMSNorm at the end and a linear head are all there is around the layers."""
    whole = decoder(model)
    return (
        hasattr(whole, "rotary_emb")
        and type(getattr(whole, "norm", None)).__name__ in PLAIN_NORMS
        and length_dependent_rope(text_config(model)) is None
        and not isinstance(token_tables(model), str)
    )


def rotary_rows(rotary: nn.Module, num_positions: int, like: torch.Tensor) -> torch.Tensor:
    """What a rotary embedding gives for positions 0 …, [P, 2, 1, D]: cos, and sin with its first half negated."""
    with torch.inference_mode():
        cos, sin = rotary(like[:1], torch.arange(num_positions, device=like.device).unsqueeze(0))
        half = sin.shape[-1] // 2
        signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
        return torch.stack([cos[0], signed[0]], 1).unsqueeze(2).to(like.dtype)


def mixer(layer: nn.Module) -> nn.Module:
    """The part of a decoder layer that mixes tokens: its first child that is neither a norm nor a feed-forward."""
    for name, child in layer.named_children():
        if not any(word in name.lower() for word in ("norm", "ln", "mlp", "feed_forward", "dropout")):
            return child
    return layer


def is_recurrent(module: nn.Module) -> bool:
    """Whether a mixer keeps a running state, judged by its class name."""
    name = type(module).__name__.lower()
    return any(word in name for word in _RECURRENT_WORDS)


def unknown_layer_type(config: Any) -> tuple[int, str] | None:
    """First decoder layer whose attention rule would be lost, with the name of the rule."""
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in KNOWN_LAYER_TYPES:
            return index, kind
    return None


def indexer(model: PreTrainedModel) -> str | None:
    """Class name of a module that selects which keys attention may see, which no attention argument tells."""
    return next((type(m).__name__ for m in model.modules() if "indexer" in type(m).__name__.lower()), None)


def length_dependent_rope(config: Any) -> tuple[str, int] | None:
    """(rope type, positions up to which its frequencies stay constant), or None for an ordinary rotary embedding."""
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type", parameters.get("type"))
        if kind in LENGTH_DEPENDENT_ROPE:
            original = parameters.get("original_max_position_embeddings")
            original = original or getattr(config, "original_max_position_embeddings", None)
            return kind, int(original or config.max_position_embeddings)
    return None


def _rope_parameters(config: Any) -> Iterator[dict[str, Any]]:
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    yield parameters
    # Models with several kinds of layers have one set of parameters for each.
    yield from (value for value in parameters.values() if isinstance(value, dict))


def max_positions(config: Any) -> int:
    """Longest sequence the checkpoint was made for; 2048 when it does not say."""
    for name in ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return 2048


def selects_rows(model: PreTrainedModel) -> bool:
    """Whether forward takes `logits_to_keep`, here an index tensor of the packed rows that need logits."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def eos_token_ids(model: PreTrainedModel, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end a text: from the generation config and the config, else the tokenizer's."""
    found: set[int] = set()
    for source in (getattr(model, "generation_config", None), model.config, text_config(model)):
        value = getattr(source, "eos_token_id", None)
        found.update(value if isinstance(value, (list, tuple)) else [] if value is None else [value])
    if not found and tokenizer.eos_token_id is not None:
        found.add(tokenizer.eos_token_id)
    return tuple(sorted(found))


def token_tables(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor] | str:
    """Embedding and output weights, [V, E] each, or why they cannot be read as plain tables.

    Models that scale their embeddings or logits do so in their own code, which a table does not show.
    """
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding:
        return f"its embedding is a {type(embedding).__name__}, not a plain table"
    if type(head) is not nn.Linear or head.bias is not None:
        return "its output head is not a plain matrix"
    config = text_config(model)
    for name in ("embedding_multiplier", "logits_scaling", "logit_scale", "scale_emb", "embedding_scale"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            return f"it scales its embeddings or logits ({name}={getattr(config, name)})"
    if "gemma" in str(config.model_type):
        return "it scales its embeddings"
    return embedding.weight, head.weight


def is_silu(activation: nn.Module) -> bool:
    """Whether an activation module of a feed-forward is SiLU, also called swish."""
    return type(activation).__name__ in ("SiLU", "SiLUActivation")


def has_experts(model: PreTrainedModel) -> bool:
    """Whether the model is a mixture of experts."""
    return any("experts" in type(module).__name__.lower() for module in model.modules())


def can_choose_experts(model: PreTrainedModel) -> bool:
    """Whether `set_experts_implementation` works for this model; some mixtures have one fixed way."""
    return bool(model._can_set_experts_implementation())


def experts_implementation(model: PreTrainedModel) -> str | None:
    """How the experts of a mixture model are computed, None for a dense model."""
    if not has_experts(model):
        return None
    if not can_choose_experts(model):
        return "the model's own"
    return str(text_config(model)._experts_implementation)


def quantisation(model: PreTrainedModel) -> str | None:
    """Quantisation method of the loaded weights, None when there is none (also when they were dequantised)."""
    if not getattr(model, "is_quantized", False):
        return None
    config = getattr(model.config, "quantization_config", None)
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return str(getattr(method, "value", method) or "unknown method")
