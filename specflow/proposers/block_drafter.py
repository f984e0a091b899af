"""Running a block head: keys and values of the context kept in pages, and one pass over a block behind them.

Position p of the pages holds what the head makes of the target's features at p, written as soon as p is committed. A
block stands at its request's anchor and behind, where no context can be yet; what it leaves there is overwritten by the
context of the tokens that were accepted, or hidden by the length of the next block.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.core.limits import EngineLimits
from specflow.heads.dflash import ContextProjection, DFlashHead
from specflow.kernels.cpu_decoder import add_norm, rotate_store_attend, store_keys_values
from specflow.kernels.draft_rows import block_rows, masked_tokens
from specflow.kernels.paged_attention import plan_groups
from specflow.kernels.rotary import rotary_table
from specflow.proposers.base import ProposeContext
from specflow.proposers.decoder import gated, linear
from specflow.proposers.feature_rows import captured, feature_rows, features_of
from specflow.proposers.gpu_head_layers import GpuHeadLayers
from specflow.proposers.head_pages import HeadPages
from specflow.proposers.joined_layers import join_weights
from specflow.targets.gpu_layers import norm_of
from specflow.targets.weight_layout import lay_out_weights


@dataclass(frozen=True)
class BlockRows:
    """What a block says of the K drafts of R requests, before any is chosen."""

    anchors: Tensor  # [R] int64
    states: Tensor  # [R, K, E] after the final norm
    logits: Tensor  # [R, K, Vd]


class BlockDrafter(ABC):
    """A head with its pages. The same positions, layouts and lengths whichever way it is run."""

    def __init__(self, head: DFlashHead, limits: EngineLimits, num_drafts: int, name: str, whole: bool) -> None:
        """Allocate pages and tables. name: the proposer's, for messages. whole: see `DFlashConfig.rows_to_run`."""
        config, dtype = head.config, head.fc.weight.dtype
        self.head, self.num_drafts, self.name = head, num_drafts, name
        self.num_rows = config.rows_to_run(num_drafts, whole)
        self.pages = HeadPages(
            config.shape,
            tuple(layer.window for layer in config.block_layers),
            limits,
            dtype,
            tuple(layer.causal for layer in config.block_layers),
        )
        self.rotary = rotary_table(config.shape.rope, limits.table_width, limits.device, dtype)
        self.projection = ContextProjection(head)

    @abstractmethod
    def follow(self, context: ProposeContext) -> None:
        """Write the context of all positions that the target has just confirmed, for all requests of the step."""

    @abstractmethod
    def states(self, context: ProposeContext) -> tuple[Tensor, Tensor]:
        """One pass over the blocks of R requests: anchors [R], and states [R * rows, E] after the final norm."""

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """States [N, E] -> [N, Vd]."""

    def draft(self, context: ProposeContext) -> BlockRows:
        """The blocks of all requests of a context. No branch on values and no read by the host."""
        anchors, states = self.states(context)
        states = states.unflatten(0, (-1, self.num_rows))
        states = states[:, self.head.config.answers][:, : self.num_drafts]
        return BlockRows(anchors, states, self.logits(states.flatten(0, 1)).unflatten(0, (-1, self.num_drafts)))


class TorchBlockDrafter(BlockDrafter):
    """On any device, through the module."""

    def follow(self, context: ProposeContext) -> None:
        """See `BlockDrafter.follow`."""
        rows = feature_rows(context, self.pages.block_size, self.num_drafts + 1, self.name)
        hidden = captured(context, rows, self.head.config.capture_layers, self.head.fc.weight.dtype)
        self._store_context(self._context(hidden), rows.attention)

    def _context(self, hidden: Tensor) -> Tensor:
        """See `DFlashHead.context`."""
        return self.head.context(hidden)

    def _store_context(self, fused: Tensor, inputs: AttentionInputs) -> None:
        """Keys and values of all layers from the fused context [T, E] of positions."""
        self.pages.write_all(inputs.slot_mapping, self.projection(fused, self.rotary.rows(inputs.positions)))

    def states(self, context: ProposeContext) -> tuple[Tensor, Tensor]:
        """See `BlockDrafter.states`."""
        rows = self.num_rows
        block = block_rows(
            context.slots, context.num_tokens, context.token_table, context.block_table, self.pages.block_size, rows,
            self.head.config.mask_token_id,
        )  # fmt: skip
        ends = context.host.num_tokens - 1 + rows
        if context.static:
            groups: tuple[QueryGroup, ...] = (QueryGroup(0, len(ends), 0, rows, int(ends.max()), None, is_bound=True),)
        else:
            groups = plan_groups(np.full(len(ends), rows), ends, context.host.block_table, self.pages.block_size)
        inputs = AttentionInputs(
            positions=block.positions,
            slot_mapping=block.slots,
            block_table=context.block_table,
            seq_len=block.seq_len,
            groups=groups,
        )
        return block.anchors, self._run_layers(block.token_ids, inputs)

    def _run_layers(self, token_ids: Tensor, inputs: AttentionInputs) -> Tensor:
        """The rows of all blocks, token_ids [T] int64, through the layers and the final norm; [T, E]."""
        embedded = self.head.embed(token_ids)
        return self.head(embedded, self.rotary.rows(inputs.positions), self.pages.attend(inputs))

    def logits(self, states: Tensor) -> Tensor:
        """See `BlockDrafter.logits`."""
        return self.head.logits(states)


class GpuBlockDrafter(TorchBlockDrafter):
    """On a GPU, the layers in few launches by Triton kernels."""

    def __init__(self, head: DFlashHead, limits: EngineLimits, num_drafts: int, name: str, whole: bool) -> None:
        super().__init__(head, limits, num_drafts, name, whole)
        self._layers = GpuHeadLayers(head.decoder_layers, head.norm, head.config.shape, self.pages, self.rotary)
        self._hidden_norm = norm_of(head.hidden_norm)
        self._embeds_plainly = head.config.embedding_scale == 1.0 and head.embedding_table.is_contiguous()
        self._layers.choose_linears(
            head.head_table, [self.num_rows * batch for batch in range(1, limits.max_num_seqs + 1)]
        )

    @staticmethod
    def serves(head: DFlashHead, limits: EngineLimits) -> bool:
        """Whether the head is one that the kernels are written for."""
        return GpuHeadLayers.serves(head.config.shape, limits)

    def _context(self, hidden: Tensor) -> Tensor:
        norm = self._hidden_norm
        return self._layers.ops.add_rms_norm(None, self.head.fc(hidden.flatten(1)), norm.weight, norm.eps)[1]

    def _store_context(self, fused: Tensor, inputs: AttentionInputs) -> None:
        norm = self.projection.key_norm
        norms = None if norm is None else norm.squeeze(1)
        self._layers.store_all(self.projection.raw(fused).flatten(1), norms, inputs)

    def _run_layers(self, token_ids: Tensor, inputs: AttentionInputs) -> Tensor:
        layers, norm = self._layers, self._layers.first_norm
        if self._embeds_plainly:
            stream, normed = layers.ops.embed_norm(token_ids, self.head.embedding_table, norm.weight, norm.eps)
        else:
            stream, normed = layers.ops.add_rms_norm(None, self.head.embed(token_ids), norm.weight, norm.eps)
        return layers.run(stream, normed, inputs)[1]

    def logits(self, states: Tensor) -> Tensor:
        """See `BlockDrafter.logits`."""
        return self.head.finish_logits(self._layers.linears.product("head", states, self.head.head_table))

    def products(self) -> str:
        """Which products our kernel for few rows runs."""
        return str(self._layers.linears.choices)


class CpuBlockDrafter(TorchBlockDrafter):
    """On a CPU in float32, through compiled kernels that find slots and rotary entries themselves.

    Lays the module's weights out in memory as the kernels read them; names, shapes and values stay. A static context
    goes through the module, since the kernels take lengths from the host.
    """

    def __init__(self, head: DFlashHead, limits: EngineLimits, num_drafts: int, name: str, whole: bool) -> None:
        """Compiles the kernels by running them once on block 0."""
        super().__init__(head, limits, num_drafts, name, whole)
        shape = head.config.shape
        self._eps = np.float32(shape.norm_eps)
        lay_out_weights(head, "auto")
        self._layers = [join_weights(layer) for layer in head.decoder_layers]
        without = np.empty((0, shape.head_dim), dtype=np.float32)
        self._qk_norms = [without if layer.qk_norm is None else layer.qk_norm.numpy() for layer in self._layers]
        norm = self.projection.key_norm
        self._key_norm = without if norm is None else norm.squeeze(1).numpy()
        self._norms = [(layer.input_norm.numpy(), layer.post_norm.numpy()) for layer in self._layers]
        self._final_norm = head.norm.weight.numpy()
        self._rotary, self._pages = self.rotary.values.numpy(), self.pages.stacked.numpy()
        self._scratch = np.empty(limits.table_width + self.num_rows, dtype=np.float32)
        table = head.head_table.t()
        # A target lays its own tables out in the same way; another one is copied once.
        self._output = table if table.stride(1) == 1 else table.contiguous()  # [E, Vd]
        nobody = np.zeros(1, dtype=np.int64)
        self._store(torch.zeros(1, shape.hidden_size), nobody.reshape(1, 1), nobody, nobody)
        self._run(torch.zeros(self.num_rows, dtype=torch.int64), nobody, nobody.reshape(1, 1))

    @staticmethod
    def serves(head: DFlashHead) -> bool:
        """Whether the head is one that the kernels are written for."""
        return head.fc.weight.device.type == "cpu" and head.fc.weight.dtype == torch.float32

    def follow(self, context: ProposeContext) -> None:
        """See `BlockDrafter.follow`. Host and device are one memory here, so rows are found without torch."""
        if context.static:
            return super().follow(context)
        features, host = features_of(context, self.name), context.host
        starts = np.cumsum(host.chunk_len) - host.chunk_len
        owners = np.repeat(np.arange(len(starts)), host.chunk_len)
        steps = np.arange(len(owners)) - starts[owners]
        first, positions = features.start.numpy(), host.chunk_start[owners] + steps
        layers = [features.hidden[layer] for layer in self.head.config.capture_layers]
        if len(first) == 1:
            begin = int(first[0])
            parts = [layer[begin : begin + len(owners)] for layer in layers]
        else:
            rows = torch.from_numpy(first[owners] + steps)
            parts = [layer.index_select(0, rows) for layer in layers]
        fused = self.head.context(torch.stack(parts, 1).to(torch.float32))
        self._store(fused, host.block_table, owners, positions)

    def _store(self, fused: Tensor, block_table: np.ndarray, owners: np.ndarray, positions: np.ndarray) -> None:
        store_keys_values(
            self.projection.raw(fused),
            self._pages,
            block_table,
            owners,
            positions,
            key_norm=self._key_norm,
            eps=self._eps,
            rotary=self._rotary,
        )

    def states(self, context: ProposeContext) -> tuple[Tensor, Tensor]:
        """See `BlockDrafter.states`."""
        if context.static:
            return super().states(context)
        anchors, token_ids = masked_tokens(
            context.slots, context.num_tokens, context.token_table, self.num_rows, self.head.config.mask_token_id
        )
        return anchors, self._run(token_ids, context.host.num_tokens - 1, context.host.block_table)

    def _run(self, token_ids: Tensor, first: np.ndarray, block_table: np.ndarray) -> Tensor:
        delta = self.head.embed(token_ids)
        hidden = torch.zeros_like(delta)
        for index, layer in enumerate(self._layers):
            input_norm, post_norm = self._norms[index]
            normed = add_norm(hidden, delta, input_norm, self._eps)
            rule = self.head.config.block_layers[index]
            attended = rotate_store_attend(
                linear(normed, layer.qkv, layer.qkv_bias),
                self._pages[index],
                block_table,
                first,
                num_heads=self.head.config.shape.num_heads,
                qk_norm=self._qk_norms[index],
                eps=self._eps,
                rotary=self._rotary,
                window=rule.window or 0,
                scratch=self._scratch,
                causal=rule.causal,
            )
            normed = add_norm(hidden, linear(attended, layer.output, layer.output_bias), post_norm, self._eps)
            delta = gated(normed, layer)
        return add_norm(hidden, delta, self._final_norm, self._eps)

    def logits(self, states: Tensor) -> Tensor:
        """See `BlockDrafter.logits`."""
        return self.head.finish_logits(states @ self._output)


def block_drafter(head: DFlashHead, limits: EngineLimits, num_drafts: int, name: str, whole: bool) -> BlockDrafter:
    """The fastest way to run a head where it is."""
    kind = TorchBlockDrafter
    if CpuBlockDrafter.serves(head):
        kind = CpuBlockDrafter
    elif GpuBlockDrafter.serves(head, limits):
        kind = GpuBlockDrafter
    return kind(head, limits, num_drafts, name, whole)
