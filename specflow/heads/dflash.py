"""DFlash: one small bidirectional pass fills a block of masks, reading the target's hidden states as its context.

Chen et al. 2026 (arXiv 2602.06036). A block begins with the anchor, the newest committed token, and goes on with masks.
Its rows see the block and, through keys and values made of target features, every position before the anchor. The
features of a position are fused once; all layers project the same context with the weights that also serve the block.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specflow.heads.layers import Attend, DecoderLayer, LayerShape, RMSNorm
from specflow.heads.tables import TableHead
from specflow.kernels.rotary import rotate


@dataclass(frozen=True)
class BlockLayer:
    """What the rows of a block see in one layer; a row at p sees a key at k if all conditions hold."""

    window: int | None = None  # p - k < window, and k - p < window; None = any distance
    causal: bool = False  # k <= p; context always lies before the block


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """What a DFlash head is, whatever format described it."""

    shape: LayerShape
    block_layers: tuple[BlockLayer, ...]  # one per layer
    block_size: int  # rows of a block in training
    # How rows answer. False ("fill-in"): row j says the token at its own place, row 0 nothing. True ("next-token"):
    # row j says the token behind it. A head run the wrong way drafts without any error and is never accepted.
    sample_from_anchor: bool
    capture_layers: tuple[int, ...]  # of the target, as `specflow.targets.base.Taps` counts, ascending
    target_hidden_size: int  # Et
    num_target_layers: int | None  # None = the checkpoint does not say
    mask_token_id: int
    vocab_size: int  # V, ids that may come in
    draft_vocab_size: int  # Vd, ids that may come out
    own_embedding: bool = False  # else the target's
    own_head: bool = False  # else the target's
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # logits l are c * tanh(l / c)

    @property
    def max_drafts(self) -> int:
        """Drafts that training prepared for; with more, every row gets worse."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def reduced(self) -> bool:
        """Whether the head can say fewer ids than it reads."""
        return self.draft_vocab_size != self.vocab_size

    def num_rows(self, num_drafts: int) -> int:
        """Rows of a block that drafts so many tokens: the anchor and the masks."""
        return num_drafts if self.sample_from_anchor else num_drafts + 1

    def rows_to_run(self, num_drafts: int, whole: bool) -> int:
        """Rows of the block that is run for so many drafts; whole: as long as in training.

        Rows that see the whole block say something else in a shorter one; causal rows do not, and no more are run.
        """
        seen = any(not layer.causal for layer in self.block_layers)
        return self.num_rows(self.max_drafts if whole and seen else num_drafts)

    @property
    def answers(self) -> slice:
        """Rows of a block that say a draft."""
        return slice(0 if self.sample_from_anchor else 1, None)


class DFlashHead(TableHead):
    """Weights of a head under the names of published checkpoints; vocabulary maps are buffers.

    Tables that the checkpoint does not ship are lent by `borrow` and are no part of the module's state.
    """

    config: DFlashConfig

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        shape = config.shape
        self.config = config
        fused = len(config.capture_layers) * config.target_hidden_size
        self.fc = nn.Linear(fused, shape.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.layers = nn.ModuleList(DecoderLayer(shape) for _ in config.block_layers)
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.add_tables(config, shape.hidden_size)

    def borrow(self, embedding: Tensor | None, head: Tensor | None) -> None:
        """See `TableHead.borrow`; tables of another dtype are copied once."""
        dtype = self.fc.weight.dtype
        super().borrow(*(None if table is None else table.to(dtype) for table in (embedding, head)))

    @property
    def decoder_layers(self) -> list[DecoderLayer]:
        """`layers` with their type."""
        return [layer for layer in self.layers if isinstance(layer, DecoderLayer)]

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of target ids [T] as a block starts with them, [T, E]."""
        rows = self.embedding_table.index_select(0, token_ids)
        return rows if self.config.embedding_scale == 1.0 else rows * self.config.embedding_scale

    def context(self, hidden: Tensor) -> Tensor:
        """Captured layers [T, A, Et], in the order of `capture_layers`, -> context [T, E] of those positions."""
        return self.hidden_norm(self.fc(hidden.flatten(1)))

    def context_keys_values(self, context: Tensor, rotary_rows: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Rotated keys and values of context [T, E] for every layer, [T, Hkv, D] each; see `ContextProjection`."""
        return [layer.self_attn.keys_values(context, rotary_rows) for layer in self.decoder_layers]

    def forward(self, embedded: Tensor, rotary_rows: Tensor, attend: Attend) -> Tensor:
        """Rows of blocks [T, E], embedded, -> states [T, E] after the final norm; rotary_rows [T, 2, 1, D].

        `attend` gets keys and values of the block's own rows and adds those of the context.
        """
        for index, layer in enumerate(self.decoder_layers):
            embedded = layer(embedded, rotary_rows, index, attend)
        return self.norm(embedded)

    def logits(self, states: Tensor) -> Tensor:
        """States [..., E] -> [..., Vd] over the ids that the head can say."""
        return self.finish_logits(F.linear(states, self.head_table))

    def finish_logits(self, products: Tensor) -> Tensor:
        """Scale and soft cap of products with the head's rows, [..., Vd]."""
        if self.config.logit_scale != 1.0:
            products = products * self.config.logit_scale
        cap = self.config.logit_softcap
        return products if cap is None else cap * torch.tanh(products / cap)


class ContextProjection:
    """Keys and values of the context for all layers by one product, from weights as they are now."""

    def __init__(self, head: DFlashHead) -> None:
        """Stack the weights of all layers: keys, then values, layer after layer. In float32 on a CPU the matrix lies
        [in, out], which makes products of a few rows faster."""
        self.shape, self.num_layers = head.config.shape, len(head.layers)
        attentions = [layer.self_attn for layer in head.decoder_layers]
        parts = [part for attention in attentions for part in (attention.k_proj, attention.v_proj)]
        stacked = torch.cat([part.weight.detach() for part in parts])
        self.weight = stacked.t()  # [E, L * 2 Hkv D]
        if stacked.device.type == "cpu":
            self.weight = self.weight.contiguous()
        self.bias = torch.cat([part.bias.detach() for part in parts]) if self.shape.qkv_bias else None
        self.key_norm: Tensor | None = None  # [L, 1, D]
        if self.shape.qk_norm:
            self.key_norm = torch.stack([attention.k_norm.weight.detach() for attention in attentions]).unsqueeze(1)

    def raw(self, context: Tensor) -> Tensor:
        """Context [T, E] -> [T, L * 2 Hkv, D], keys neither normed nor rotated."""
        products = context @ self.weight if self.bias is None else torch.addmm(self.bias, context, self.weight)
        return products.view(len(context), -1, self.shape.head_dim)

    def __call__(self, context: Tensor, rotary_rows: Tensor) -> Tensor:
        """Context [T, E] -> [L, T, 2 Hkv, D]: rotated keys, then values, of every layer."""
        both = self.raw(context).unflatten(1, (self.num_layers, -1))
        keys, values = both.chunk(2, 2)
        if self.key_norm is not None:
            keys = F.rms_norm(keys, keys.shape[-1:], None, self.shape.norm_eps) * self.key_norm
        keys = rotate(keys.flatten(1, 2), rotary_rows).view_as(keys)
        return torch.cat([keys, values], 2).transpose(0, 1)
