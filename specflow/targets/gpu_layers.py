"""A target of the plain Llama kind in as few launches as its arithmetic allows, by Triton kernels.

A decoder layer of transformers is some thirty launches on a GPU, and at a few rows their pauses cost more than the
bytes that they move. Here it is about ten: query, key and value in one product, gate and up in another, and between the
products one launch each, which starts while the one before still runs where the device can. With up to
128 rows kernels of ours run those products for which they measured faster than torch's (`linears`), the gate included.

Weights are not copied: the model's own parameters become views of the joined ones. The model's `forward` stays
transformers' own; embedding, layers, rotary embedding, final norm and output head get another `forward` while an
engine is attached. Nothing is used unproven: see `specflow.targets.proof`. Safe to capture in a CUDA graph: no shape
and no branch depends on a value.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.kernels.paged_kernels import PagedKernels, paged_kernels
from specflow.targets import transformers_facts as facts
from specflow.targets.linear_choice import Mix, choose_shapes
from specflow.targets.linears import Linears
from specflow.targets.probe import LayerShape

Pages = tuple[torch.Tensor, torch.Tensor]


class LayerOps(Protocol):
    """The functions of `specflow.kernels.layer_ops`, or the same by Triton."""

    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    embed_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    gated_silu: Callable[..., torch.Tensor]
    pair_norm: Callable[..., torch.Tensor]
    norm_rotate_write: Callable[..., torch.Tensor]
    norm_rotate_write_layers: Callable[..., None]


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm over the last axis."""

    weight: torch.Tensor  # [E]
    eps: float


@dataclass(frozen=True, slots=True)
class GpuLayer:
    """Weights of one layer as torch stores them, [out, in]."""

    module: nn.Module
    input_norm: Norm
    qkv: torch.Tensor  # [(Hq + 2 Hkv) * D, E]
    qkv_bias: torch.Tensor | None
    qk_norm: tuple[torch.Tensor, torch.Tensor] | None  # [D] each
    qk_eps: float
    output: torch.Tensor  # [E, Hq * D]
    post_norm: Norm
    gate_up: torch.Tensor  # [2 I, E]
    down: torch.Tensor  # [E, I]


class GpuLayers:
    """All layers of a model, joined. One engine at a time."""

    def __init__(self, model: PreTrainedModel, layers: tuple[GpuLayer, ...], head_dim: int, ops: LayerOps) -> None:
        self.layers, self.ops, self._head_dim = layers, ops, head_dim
        self._rotary, self._last = facts.rotary_embedding(model), facts.final_norm(model)
        self._embedding: Any = model.get_input_embeddings()
        self._head: Any = model.get_output_embeddings()
        self._final = norm_of(self._last)
        self._replaced: list[nn.Module] = []
        self.linears = Linears(ops.gated_silu)
        # By the embedding or the last layer: its output and the next norm.
        self._left: tuple[torch.Tensor, torch.Tensor] | None = None

    def __len__(self) -> int:
        """Number of layers."""
        return len(self.layers)

    def choose_linears(self) -> None:
        """Measure which products are faster by a kernel of ours than by torch; see `choose_shapes`."""
        head = self._head.weight.detach() if type(self._head) is nn.Linear and self._head.bias is None else None
        choose_shapes(self.linears, self.layers, head, self.ops, partial(trial_mixes, self._head_dim, self.ops))

    def enter(
        self,
        shapes: tuple[LayerShape, ...],
        pages: Callable[[nn.Module], Pages],
        current: Callable[[], AttentionInputs | None],
        kernels: PagedKernels,
        num_positions: int,
    ) -> None:
        """Give the model's parts their other `forward`. num_positions: how many the rotary table covers."""
        table = facts.rotary_rows(self._rotary, num_positions, self.layers[0].qkv)
        nothing = (torch.empty(0), torch.empty(0))
        self._replace(self._rotary, lambda *_, **__: nothing)
        self._replace(self._last, self._norm_at_end)
        if self._embeds_plainly():
            self._replace(self._embedding, self._embed)
        if self.linears.choices.any("head"):
            product, weight = self.linears.product, self._head.weight
            self._replace(self._head, lambda values: product("head", values[0], weight).unsqueeze(0))
        following = [layer.input_norm for layer in self.layers[1:]] + [self._final]
        for layer, shape, norm in zip(self.layers, shapes, following, strict=True):
            mix = LayerAttention(
                layer, pages(shape.module), kernels, table, self.ops, scale=shape.scale, window=shape.window
            )
            self._replace(layer.module, self._forward(mix, current, norm))

    def leave(self) -> None:
        """Let the classes' own `forward` show again; safe to call twice."""
        for module in self._replaced:
            vars(module).pop("forward", None)
        self._replaced = []
        self._left = None

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.forward = forward
        self._replaced.append(module)

    def _embeds_plainly(self) -> bool:
        module = self._embedding
        return type(module) is nn.Embedding and module.max_norm is None and module.weight.is_contiguous()

    def _embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """A replacement for the embedding's `forward`, [1, T] int64 -> [1, T, E]."""
        norm = self.layers[0].input_norm
        self._left = self.ops.embed_norm(token_ids.flatten(), self._embedding.weight, norm.weight, norm.eps)
        return self._left[0].view(*token_ids.shape, -1)

    def _forward(
        self, mix: "LayerAttention", current: Callable[[], AttentionInputs | None], following: Norm
    ) -> Callable[..., torch.Tensor]:
        """A replacement for the decoder layer's `forward`: hidden states [1, T, E] to the same."""

        def forward(hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
            inputs = current()
            assert inputs is not None
            stream, normed = self._normed(hidden_states[0], mix.layer.input_norm)
            self._left = run_layer(mix, self.linears, inputs, stream, normed, following)
            return self._left[0].unsqueeze(0)

        return forward

    def _normed(self, values: torch.Tensor, norm: Norm) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [T, E] and their norm: as the layer before left it, if these are its very values; anybody may put
        others in between."""
        known = self._left
        if known is not None and known[0].data_ptr() == values.data_ptr() and known[0].shape == values.shape:
            return known
        return self.ops.add_rms_norm(None, values, norm.weight, norm.eps)

    def _norm_at_end(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = self._normed(hidden_states[0], self._final)[1]
        self._left = None  # the pass is over
        return normed.unsqueeze(0)


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """Everything between the first two products of a layer."""

    layer: GpuLayer
    pages: Pages
    kernels: PagedKernels
    rotary: torch.Tensor  # [P, 2, 1, D]
    ops: LayerOps
    scale: float  # of the scores
    window: int | None
    causal: bool = True
    clean: bool = False  # no NaN and no infinity enters the pages

    def __call__(self, qkv: torch.Tensor, inputs: AttentionInputs) -> torch.Tensor:
        """[T, (Hq + 2 Hkv) * D] -> [T, Hq * D]."""
        layer = self.layer
        query = self.ops.norm_rotate_write(
            qkv, *self.pages, inputs.slot_mapping, inputs.positions, self.rotary, layer.qk_norm, layer.qk_eps,
            clean=self.clean,
        )  # fmt: skip
        mixed = self.kernels.attend(
            query, *self.pages, inputs, scale=self.scale, window=self.window, causal=self.causal
        )
        return mixed.flatten(1)


def trial_mixes(head_dim: int, ops: LayerOps, layers: Sequence[GpuLayer], rows: int) -> list[Mix]:
    """Attention of each layer as a pass of `rows` tokens has it, for measurements: requests of up to 16 tokens, 256
    keys each, in pages that all layers share."""
    page, keys, like = 16, 256, layers[0].qkv
    queries, device = min(rows, 16), like.device
    requests, each = rows // queries, keys // page
    kv_heads = (len(like) - layers[0].output.shape[1]) // (2 * head_dim)
    pages = [like.new_zeros(1 + requests * each, page, kv_heads, head_dim) for _ in range(2)]
    table = 1 + torch.arange(requests * each, device=device).view(requests, each)
    positions = torch.arange(keys - queries, keys, device=device).repeat(requests)
    owners = torch.arange(requests, device=device).repeat_interleave(queries)
    inputs = AttentionInputs(
        positions=positions,
        slot_mapping=table[owners, positions // page] * page + positions % page,
        block_table=table,
        seq_len=torch.full((requests,), keys, device=device),
        groups=(QueryGroup(0, requests, 0, queries, keys, None, is_bound=True),),
    )
    kernels, rotary = paged_kernels("triton"), like.new_ones(keys, 2, 1, head_dim)
    return [
        partial(
            LayerAttention(layer, (pages[0], pages[1]), kernels, rotary, ops, scale=head_dim**-0.5, window=None),
            inputs=inputs,
        )
        for layer in layers
    ]


def run_layer(
    mix: LayerAttention,
    linears: Linears,
    inputs: AttentionInputs,
    stream: torch.Tensor,
    values: torch.Tensor,
    following: Norm,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer over the residual stream [T, E]; values [T, E']: what its first product reads.

    Returns the stream behind the layer and its norm by `following`, [T, E] each.
    """
    layer, add_norm = mix.layer, mix.ops.add_rms_norm
    mixed = mix(linears.product("qkv", values, layer.qkv, layer.qkv_bias), inputs)
    delta = linears.product("output", mixed, layer.output)
    stream, normed = add_norm(delta, stream, layer.post_norm.weight, layer.post_norm.eps)
    delta = linears.product("down", linears.gated(normed, layer.gate_up), layer.down)
    return add_norm(delta, stream, following.weight, following.eps)


def gpu_layers(model: PreTrainedModel, shapes: tuple[LayerShape, ...], ops: LayerOps | None = None) -> GpuLayers | None:
    """Join the weights of every layer, in place; None when any part of the model is not of the plain kind.

    ops: what runs between the products; None = Triton kernels.
    """
    layers = facts.decoder_layers(model)
    assert layers is not None
    plain = all(_is_plain(layer, shape) for layer, shape in zip(layers, shapes, strict=True))
    if not plain or not facts.has_plain_ends(model):
        return None
    if ops is None:
        from specflow.kernels import layer_ops_triton as kernels

        if facts.text_config(model).hidden_size > kernels.MOST_COLUMNS:
            return None
        ops = kernels
    joined = tuple(join_layer(layer) for layer in layers)
    return GpuLayers(model, joined, shapes[0].key_size, ops)


def _is_plain(layer: Any, shape: LayerShape) -> bool:
    """Known layer class of unquantised linears of one dtype, and no bias where none is handled."""
    if type(layer).__name__ not in facts.PLAIN_DECODER_LAYERS or not shape.plain or shape.donor is not None:
        return False
    attention, mlp = layer.self_attn, layer.mlp
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    others = [attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]
    dtypes = {module.weight.dtype for module in inputs + others + [layer.input_layernorm]}
    return (
        all(type(linear) is nn.Linear and linear.weight.is_contiguous() for linear in inputs + others)
        and dtypes <= {torch.float32, torch.float16, torch.bfloat16}
        and len(dtypes) == 1
        and all(linear.bias is None for linear in others)
        and len({linear.bias is None for linear in inputs}) == 1
        and shape.key_size == shape.value_size
        and facts.is_silu(mlp.act_fn)
    )


def join_layer(layer: Any) -> GpuLayer:
    """Weights of a layer with the module names of Llama and Qwen, whose parameters become views of them.

    Biases other than of query, key and value are left out.
    """
    attention, mlp = layer.self_attn, layer.mlp
    inputs = [attention.q_proj, attention.k_proj, attention.v_proj]
    normed = hasattr(attention, "q_norm")
    return GpuLayer(
        module=layer,
        input_norm=norm_of(layer.input_layernorm),
        qkv=_join(inputs),
        qkv_bias=None if inputs[0].bias is None else torch.cat([linear.bias.detach() for linear in inputs]),
        qk_norm=(attention.q_norm.weight.detach(), attention.k_norm.weight.detach()) if normed else None,
        qk_eps=attention.q_norm.variance_epsilon if normed else 0.0,
        output=attention.o_proj.weight.detach(),
        post_norm=norm_of(layer.post_attention_layernorm),
        gate_up=_join([mlp.gate_proj, mlp.up_proj]),
        down=mlp.down_proj.weight.detach(),
    )


def norm_of(module: Any) -> Norm:
    """Weight and epsilon of a norm's module."""
    return Norm(module.weight.detach(), module.variance_epsilon)


def _join(linears: list[nn.Linear]) -> torch.Tensor:
    """Weights [out, in] one under the other; the modules keep working, on views of it."""
    joined = torch.cat([linear.weight.data for linear in linears])
    for linear, part in zip(linears, joined.split([linear.out_features for linear in linears]), strict=True):
        linear.weight.data = part
    return joined
