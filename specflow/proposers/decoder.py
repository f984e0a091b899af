"""A decoder-only transformer as one plain loop, for drafters that run several times per round.

Llama- and Qwen-style layers over paged keys and values of the drafter's own, addressed by the target's block numbers.
This is the reference and the path for prompts; `proposers.draft_round` has a faster one for drafting on a CPU.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from specflow.checkpoints.decoder import DecoderWeights, LayerWeights
from specflow.checkpoints.decoder_config import DecoderConfig
from specflow.core.attention import AttentionInputs
from specflow.core.limits import PagedKernelsName
from specflow.kernels.paged_kernels import PagedKernels, paged_kernels
from specflow.kernels.rotary import RotaryTable, rotary_table


@dataclass(frozen=True)
class DecoderInputs:
    """Where the T packed tokens of one pass stand."""

    attention: AttentionInputs
    rotary_rows: torch.Tensor  # [T, 2, 1, D]: `RotaryTable.rows` of their positions


class Decoder:
    """Weights, their pages and their rotary table."""

    def __init__(
        self,
        weights: DecoderWeights,
        *,
        num_blocks: int,
        block_size: int,
        num_positions: int,
        kernels: PagedKernelsName = "torch",
    ) -> None:
        """Allocate pages for num_blocks blocks and rotary entries for positions 0 … num_positions-1."""
        config = weights.config
        device, dtype = weights.embedding.device, weights.embedding.dtype
        self.weights = weights
        self.kernels = paged_kernels(kernels)
        self.block_size = block_size
        self.rotary: RotaryTable = rotary_table(config.rope, num_positions, device, dtype)
        # Keys and values of a token lie side by side.
        shape = (num_blocks, block_size, 2 * config.num_kv_heads, config.head_dim)
        self.pages = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.num_layers)]

    def forward(self, token_ids: torch.Tensor, inputs: DecoderInputs) -> torch.Tensor:
        """Run packed tokens [T] int64, writing their keys and values; returns the residual stream [T, E]."""
        hidden = self.weights.embedding.index_select(0, token_ids)
        for layer, pages, window in zip(self.weights.layers, self.pages, self.weights.config.windows, strict=True):
            hidden = _attend(hidden, layer, pages, inputs, self.weights.config, window, self.kernels)
            hidden = _feed_forward(hidden, layer, self.weights.config.norm_eps)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Output head over rows of the residual stream: [N, E] -> [N, V] in the weights' dtype."""
        return rms_norm(hidden, self.weights.final_norm, self.weights.config.norm_eps) @ self.weights.head


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last dimension with weight [..., last]; statistics in float32."""
    return F.rms_norm(values, values.shape[-1:], None, eps) * weight


def linear(values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """values [T, in] times weight [in, out], plus bias."""
    return values @ weight if bias is None else torch.addmm(bias, values, weight)


def _attend(
    hidden: torch.Tensor,
    layer: LayerWeights,
    pages: torch.Tensor,
    inputs: DecoderInputs,
    config: DecoderConfig,
    window: int | None,
    kernels: PagedKernels,
) -> torch.Tensor:
    """Residual stream [T, E] plus attention."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    normed = rms_norm(hidden, layer.input_norm, config.norm_eps)
    qkv = linear(normed, layer.qkv, layer.qkv_bias).view(-1, heads + 2 * kv_heads, config.head_dim)
    turned = qkv[:, : heads + kv_heads]
    if layer.qk_norm is not None:
        turned = rms_norm(turned, layer.qk_norm, config.norm_eps)
    both = pages[:, :, :kv_heads], pages[:, :, kv_heads:]
    slots, values = inputs.attention.slot_mapping, qkv[:, heads + kv_heads :]
    query = kernels.rotate_and_write(*both, slots, turned, values, inputs.rotary_rows)
    output = kernels.attend(
        query,
        *both,
        inputs.attention,
        scale=config.head_dim**-0.5,
        window=window,
    )
    return hidden + linear(output.flatten(1), layer.output, layer.output_bias)


def _feed_forward(hidden: torch.Tensor, layer: LayerWeights, eps: float) -> torch.Tensor:
    """Residual stream [T, E] plus the gated feed-forward."""
    return hidden + gated(rms_norm(hidden, layer.post_norm, eps), layer)


def gated(normed: torch.Tensor, layer: LayerWeights) -> torch.Tensor:
    """Feed-forward of a layer: down(silu(gate) * up), [T, E] -> [T, E]."""
    gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
    return linear(F.silu(gate).mul_(up), layer.down, layer.down_bias)
