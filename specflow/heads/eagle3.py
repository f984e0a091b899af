"""EAGLE-3: a decoder layer that reads the next token beside what the target's middle layers thought of the last one.

Li et al. 2025 (arXiv 2503.01840). The head's row p holds the embedding of token p + 1 and a state that stands for
position p; it predicts token p + 2. The state is fused from the target's captured layers where those are known, and
the head's own output one step earlier beyond that. EAGLE-3.1's norms are switches.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from specflow.heads.layers import Attend, DecoderLayer, GatedMlp, LayerShape, RMSNorm, SelfAttention
from specflow.heads.tables import TableHead


@dataclass(frozen=True, kw_only=True)
class Eagle3Config:
    """What an EAGLE-3 head is, whatever format described it."""

    layer: LayerShape
    num_layers: int = 1  # the first reads embedding and state, the others are plain
    capture_layers: tuple[int, ...]  # of the target, as `specflow.targets.base.Taps` counts, ascending
    target_hidden_size: int  # Et
    vocab_size: int  # V, ids that may come in
    draft_vocab_size: int  # Vd, ids that may come out
    norm_before_residual: bool = False  # the residual stream starts from the normed state
    norm_before_fc: bool = False  # one norm over all captures together
    fc_norm: bool = False  # one norm per capture (EAGLE-3.1)
    norm_output: bool = False  # feed the normed output back instead of the raw one (EAGLE-3.1)
    own_embedding: bool = False  # else the target's
    own_head: bool = True  # else the target's rows
    logit_scale: float = 1.0
    windows: tuple[int | None, ...] = (None,)  # per layer the number of keys a row sees, None for all

    @property
    def reduced(self) -> bool:
        """Whether the head can say fewer ids than it reads."""
        return self.draft_vocab_size != self.vocab_size


class FusingLayer(nn.Module):
    """The first layer: queries, keys and values read embedding and state side by side."""

    def __init__(self, shape: LayerShape, norm_before_residual: bool) -> None:
        super().__init__()
        self.norm_before_residual = norm_before_residual
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.hidden_norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = SelfAttention(shape, 2 * shape.hidden_size)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = GatedMlp(shape)

    def inputs(self, embedded: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """What attention reads, [T, 2 E], and where the residual stream starts, [T, E]."""
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        return torch.cat([self.input_layernorm(embedded), normed], -1), residual

    def forward(self, embedded: Tensor, state: Tensor, rotary_rows: Tensor, layer: int, attend: Attend) -> Tensor:
        """Embeddings and states [T, E] -> residual stream [T, E]."""
        inputs, residual = self.inputs(embedded, state)
        hidden = residual + self.self_attn(inputs, rotary_rows, layer, attend)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Eagle3Head(TableHead):
    """Weights of a head under the names of the speculators format; vocabulary maps are buffers.

    Tables that the checkpoint does not ship are lent by `borrow` and are no part of the module's state.
    """

    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        shape = config.layer
        captures, width = len(config.capture_layers), config.target_hidden_size
        self.config = config
        if config.norm_before_fc:
            self.input_norm = RMSNorm(captures * width, shape.norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, shape.norm_eps) for _ in range(captures))
        self.fc = nn.Linear(captures * width, shape.hidden_size, bias=False)
        plain = [DecoderLayer(shape) for _ in range(config.num_layers - 1)]
        self.layers = nn.ModuleList([FusingLayer(shape, config.norm_before_residual), *plain])
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.add_tables(config, shape.hidden_size)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Embeddings of target ids [T] in the head's dtype, [T, E]."""
        return self.embedding_table.index_select(0, token_ids).to(self.fc.weight.dtype)

    def fuse(self, hidden: Tensor) -> Tensor:
        """Captured layers [T, A, Et], in the order of `capture_layers`, -> states [T, E]."""
        if self.config.norm_before_fc:
            hidden = self.input_norm(hidden.flatten(1)).view_as(hidden)
        if self.config.fc_norm:
            hidden = torch.stack([norm(part) for norm, part in zip(self.fc_norm, hidden.unbind(1), strict=True)], 1)
        return self.fc(hidden.flatten(1))

    def forward(self, embedded: Tensor, state: Tensor, rotary_rows: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """Embeddings of the next tokens and states, [T, E] each; rotary_rows [T, 2, 1, D] of the positions.

        Returns the residual stream at the end and its norm, [T, E] each.
        """
        raw = self.layers[0](embedded, state, rotary_rows, 0, attend)
        for index in range(1, self.config.num_layers):
            raw = self.layers[index](raw, rotary_rows, index, attend)
        return raw, self.norm(raw)

    def feedback(self, raw: Tensor, normed: Tensor) -> Tensor:
        """The state of the next step, [T, E], from what `forward` returned."""
        return normed if self.config.norm_output else raw

    def logits(self, normed: Tensor) -> Tensor:
        """[T, E] -> [T, Vd] over the ids that the head can say."""
        return self.finish_logits(nn.functional.linear(normed, self.head_table.to(normed.dtype)))

    def finish_logits(self, products: Tensor) -> Tensor:
        """Scale of products with the head's rows, [..., Vd]."""
        return products if self.config.logit_scale == 1.0 else products * self.config.logit_scale
