"""The plain decoder's drafting steps on a CPU in float32: torch multiplies matrices, compiled loops do the rest."""

from dataclasses import dataclass

import numpy as np
import torch

from specflow.checkpoints.decoder import LayerWeights
from specflow.kernels.cpu_decoder import add_norm, rotate_store_attend
from specflow.proposers.decoder import Decoder, gated, linear


@dataclass(frozen=True)
class _Layer:
    """Host views of one layer's small tensors, so that none is made per step."""

    weights: LayerWeights
    input_norm: np.ndarray  # [E]
    post_norm: np.ndarray  # [E]
    qk_norm: np.ndarray  # [Hq + Hkv, D], or [0, D] without norms
    pages: np.ndarray  # [num_blocks, block_size, 2 Hkv, D], shared with the decoder
    window: int  # 0 = none


class CpuDecoderSteps:
    """Runs a few tokens of each request over the decoder's own weights and pages; same results up to rounding."""

    def __init__(self, decoder: Decoder, max_tokens: int) -> None:
        """max_tokens: most positions of a request. Compiles the kernels by running them once on block 0."""
        config = decoder.weights.config
        self._config, self._weights = config, decoder.weights
        self._eps = np.float32(config.norm_eps)
        self._rotary = decoder.rotary.values.numpy()
        self._scratch = np.empty(max_tokens, dtype=np.float32)
        self._final_norm = decoder.weights.final_norm.numpy()
        without = np.empty((0, config.head_dim), dtype=np.float32)
        self._layers = [
            _Layer(
                weights=layer,
                input_norm=layer.input_norm.numpy(),
                post_norm=layer.post_norm.numpy(),
                qk_norm=without if layer.qk_norm is None else layer.qk_norm.numpy(),
                pages=pages.numpy(),
                window=window or 0,
            )
            for layer, pages, window in zip(decoder.weights.layers, decoder.pages, config.windows, strict=True)
        ]
        self.run(torch.zeros(2, dtype=torch.int64), np.zeros(1, dtype=np.int64), np.zeros((1, 1), dtype=np.int64))

    @staticmethod
    def serves(decoder: Decoder) -> bool:
        """Whether the decoder is one that the kernels are written for."""
        embedding = decoder.weights.embedding
        return embedding.device.type == "cpu" and embedding.dtype == torch.float32

    def run(self, token_ids: torch.Tensor, first: np.ndarray, block_table: np.ndarray, wanted: int = 1) -> torch.Tensor:
        """Run T = R * q tokens [T] int64, request after request; logits of the last `wanted` of each, [R * wanted, V].

        first [R] int64: position of the first token of each request; negative ones count as 0.
        block_table [R, max_blocks] int64.
        """
        delta = self._weights.embedding.index_select(0, token_ids)
        hidden = torch.zeros_like(delta)
        for layer in self._layers:
            normed = add_norm(hidden, delta, layer.input_norm, self._eps)
            delta = self._attend(normed, layer, first, block_table)
            normed = add_norm(hidden, delta, layer.post_norm, self._eps)
            delta = gated(normed, layer.weights)
        per_request = len(token_ids) // len(first)
        normed = add_norm(hidden, delta, self._final_norm, self._eps)
        return normed.unflatten(0, (-1, per_request))[:, per_request - wanted :].flatten(0, 1) @ self._weights.head

    def _attend(self, normed: torch.Tensor, layer: _Layer, first: np.ndarray, block_table: np.ndarray) -> torch.Tensor:
        weights = layer.weights
        attended = rotate_store_attend(
            linear(normed, weights.qkv, weights.qkv_bias),
            layer.pages,
            block_table,
            first,
            num_heads=self._config.num_heads,
            qk_norm=layer.qk_norm,
            eps=self._eps,
            rotary=self._rotary,
            window=layer.window,
            scratch=self._scratch,
        )
        return linear(attended, weights.output, weights.output_bias)
