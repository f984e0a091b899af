"""The passes of one EAGLE-3 round: each request's newest row, then one row per further draft.

Row j of a round stands at position num_tokens - 2 + j: the target has processed that position at j = 0, and its state
is the head's own from j = 1 on. Positions and slots are made once for all rows.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch
from torch import Tensor

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.core.limits import EngineLimits
from specflow.heads.eagle3 import Eagle3Head, FusingLayer
from specflow.kernels.cpu_decoder import add_norm, rotate_store, rotate_store_attend
from specflow.kernels.cpu_pair_norm import pair_norm
from specflow.kernels.rotary import RotaryTable
from specflow.proposers.base import ProposeContext
from specflow.proposers.decoder import gated, linear
from specflow.proposers.gpu_head_layers import GpuHeadLayers
from specflow.proposers.head_pages import HeadPages
from specflow.proposers.joined_layers import join_weights
from specflow.targets.weight_layout import lay_out_weights

_BEHIND = 2  # committed tokens past the newest row: the one it embeds, and it predicts the next


class Eagle3Round(ABC):
    """The rows of R requests."""

    @abstractmethod
    def step(self, index: int, token_ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Row `index` (from 0) of each request: token_ids [R] int64, state [R, E].

        Returns the state of the next row [R, E] and logits [R, Vd].
        """


class TorchEagle3Round(Eagle3Round):
    """On any device, through the module."""

    def __init__(
        self, context: ProposeContext, head: Eagle3Head, pages: HeadPages, rotary: RotaryTable, num_drafts: int
    ) -> None:
        self._context, self._head, self._pages = context, head, pages
        offsets = torch.arange(-_BEHIND, num_drafts - _BEHIND, device=context.slots.device)
        # One row for each draft, so that a pass gets its own without a copy.
        self._positions = (context.num_tokens + offsets.unsqueeze(1)).clamp_(min=0)  # [K, R]
        size = pages.block_size
        blocks = context.block_table.gather(1, self._positions.t() // size).t()
        self._slots = (self._positions % size + blocks * size).contiguous()  # [K, R]
        self._rotary = rotary
        self._longest = int(context.host.num_tokens.max()) - _BEHIND + 1

    def step(self, index: int, token_ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Eagle3Round.step`."""
        positions = self._positions[index]
        longest = max(self._longest + index, 1)
        group = QueryGroup(0, len(positions), 0, 1, longest, None, is_bound=self._context.static)
        inputs = AttentionInputs(
            positions=positions,
            slot_mapping=self._slots[index],
            block_table=self._context.block_table,
            seq_len=positions + 1,
            groups=(group,),
        )
        raw, normed = self._run_layers(self._head.embed(token_ids), state, inputs)
        return self._head.feedback(raw, normed), self._logits(normed)

    def _logits(self, normed: Tensor) -> Tensor:
        return self._head.logits(normed)

    def _run_layers(self, embedded: Tensor, state: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """The residual stream at the end and its norm, [R, E] each."""
        return self._head(embedded, state, self._rotary.rows(inputs.positions), self._pages.attend(inputs))


class GpuEagle3Round(TorchEagle3Round):
    """On a GPU, the layers in few launches by Triton kernels."""

    def __init__(self, context: ProposeContext, steps: "GpuEagle3Steps", num_drafts: int) -> None:
        super().__init__(context, steps.head, steps.pages, steps.rotary, num_drafts)
        self._steps = steps

    def _logits(self, normed: Tensor) -> Tensor:
        return self._steps.logits(normed)

    def _run_layers(self, embedded: Tensor, state: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        return self._steps.run(embedded, state, inputs)


class GpuEagle3Steps:
    """The layers over the head's own weights and pages; the module's results up to rounding."""

    def __init__(self, head: Eagle3Head, pages: HeadPages, rotary: RotaryTable, most_rows: int) -> None:
        """The module's weights become views of joined ones. most_rows: of a decoding step."""
        self.head, self.pages, self.rotary = head, pages, rotary
        fusing = head.layers[0]
        assert isinstance(fusing, FusingLayer)
        self._layers = GpuHeadLayers(list(head.layers), head.norm, head.config.layer, pages, rotary)
        self._layers.choose_linears(head.head_table, range(1, most_rows + 1))
        self._weights = fusing.input_layernorm.weight.detach(), fusing.hidden_norm.weight.detach()

    @staticmethod
    def serves(head: Eagle3Head, limits: EngineLimits) -> bool:
        """Whether the head is one that the kernels are written for."""
        return GpuHeadLayers.serves(head.config.layer, limits)

    def run(self, embedded: Tensor, state: Tensor, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        """Embeddings and states [T, E]; the residual stream at the end and its norm, [T, E] each."""
        values = self._fused(embedded, state)
        stream = values[:, state.shape[1] :] if self.head.config.norm_before_residual else state
        return self._layers.run(stream, values, inputs)

    def logits(self, normed: Tensor) -> Tensor:
        """[T, E] -> [T, Vd]; see `Eagle3Head.logits`."""
        table = self.head.head_table.to(normed.dtype)
        return self.head.finish_logits(self._layers.linears.product("head", normed, table))

    def products(self) -> str:
        """Which products our kernel for few rows runs."""
        return str(self._layers.linears.choices)

    def store(self, embedded: Tensor, state: Tensor, inputs: AttentionInputs) -> None:
        """Keys and values of the first layer alone, from embeddings and states [T, E]."""
        self._layers.store_first(self._fused(embedded, state), inputs)

    def _fused(self, embedded: Tensor, state: Tensor) -> Tensor:
        """What the first product reads, [T, 2 E]."""
        return self._layers.ops.pair_norm(embedded, state, *self._weights, self.head.config.layer.norm_eps)


class CpuEagle3Round(Eagle3Round):
    """On a CPU in float32, through compiled kernels that find slots and rotary entries themselves."""

    def __init__(self, context: ProposeContext, steps: "CpuEagle3Steps") -> None:
        self._steps = steps
        self._block_table = context.host.block_table
        self._first = context.host.num_tokens - _BEHIND

    def step(self, index: int, token_ids: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """See `Eagle3Round.step`."""
        return self._steps.run(token_ids, state, self._first + index, self._block_table)


class CpuEagle3Steps:
    """Runs one row per request over the head's own weights and pages; same results as the module up to rounding.

    Lays the module's weights out in memory as the kernels read them; names, shapes and values stay.
    """

    def __init__(self, head: Eagle3Head, pages: HeadPages, rotary: RotaryTable, max_tokens: int) -> None:
        """max_tokens: most positions of a request. Compiles the kernels by running them once on block 0."""
        self._head, self._pages, shape = head, pages, head.config.layer
        self._eps, self._num_heads = np.float32(shape.norm_eps), shape.num_heads
        lay_out_weights(head, "auto")
        self._layers = [join_weights(layer) for layer in head.layers]
        fusing = head.layers[0]
        assert isinstance(fusing, FusingLayer)
        self._embed_norm, self._state_norm = fusing.input_layernorm.weight.numpy(), fusing.hidden_norm.weight.numpy()
        self._post_norms = [layer.post_norm.numpy() for layer in self._layers]
        # What follows each layer: the next one's input norm, or the output norm.
        self._next_norms = [*(layer.input_norm.numpy() for layer in self._layers[1:]), head.norm.weight.numpy()]
        self._qk_norms = [
            np.empty((0, shape.head_dim), dtype=np.float32) if layer.qk_norm is None else layer.qk_norm.numpy()
            for layer in self._layers
        ]
        self._rotary, self._scratch = rotary.values.numpy(), np.empty(max_tokens, dtype=np.float32)
        self._arrays = [part.numpy() for part in pages.layers]
        table = head.head_table
        self._output = table.t() if table.t().is_contiguous() else table.t().contiguous()  # [E, Vd]
        start = torch.zeros(1, dtype=torch.int64)
        self.run(start, self._output.new_zeros(1, shape.hidden_size), start.numpy(), start.view(1, 1).numpy())

    @staticmethod
    def serves(head: Eagle3Head) -> bool:
        """Whether the head is one that the kernels are written for."""
        weight = head.fc.weight
        return weight.device.type == "cpu" and weight.dtype == torch.float32

    def run(
        self, token_ids: Tensor, state: Tensor, first: np.ndarray, block_table: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """Row of each of R requests at positions `first` [R] int64; block_table [R, max_blocks] int64.

        token_ids [R] int64, state [R, E]; returns the state of the next row [R, E] and logits [R, Vd].
        """
        config = self._head.config
        inputs = pair_norm(self._head.embed(token_ids), state, self._embed_norm, self._state_norm, self._eps)
        hidden = inputs[:, state.shape[1] :] if config.norm_before_residual else state
        hidden = hidden.clone(memory_format=torch.contiguous_format)
        for index, layer in enumerate(self._layers):
            delta = self._attend(inputs, index, first, block_table)
            delta = gated(add_norm(hidden, delta, self._post_norms[index], self._eps), layer)
            normed = inputs = add_norm(hidden, delta, self._next_norms[index], self._eps)
        return self._head.feedback(hidden, normed), self._head.finish_logits(normed @ self._output)

    def store(self, token_ids: Tensor, states: Tensor, first: np.ndarray, block_table: np.ndarray) -> None:
        """Keys and values of the first layer alone: T = R * q rows, request after request from positions `first`.

        token_ids [T] int64, states [T, E].
        """
        layer, shape = self._layers[0], self._head.config.layer
        inputs = pair_norm(self._head.embed(token_ids), states, self._embed_norm, self._state_norm, self._eps)
        queries = shape.num_heads * shape.head_dim
        bias = None if layer.qkv_bias is None else layer.qkv_bias[queries:]
        rotate_store(
            linear(inputs, layer.qkv[:, queries:], bias),
            self._arrays[0],
            block_table,
            first,
            key_norm=self._qk_norms[0][shape.num_heads :],
            eps=self._eps,
            rotary=self._rotary,
        )

    def _attend(self, inputs: Tensor, index: int, first: np.ndarray, block_table: np.ndarray) -> Tensor:
        layer = self._layers[index]
        attended = rotate_store_attend(
            linear(inputs, layer.qkv, layer.qkv_bias),
            self._arrays[index],
            block_table,
            first,
            num_heads=self._num_heads,
            qk_norm=self._qk_norms[index],
            eps=self._eps,
            rotary=self._rotary,
            window=self._head.config.windows[index] or 0,
            scratch=self._scratch,
        )
        return linear(attended, layer.output, layer.output_bias)
