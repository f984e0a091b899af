"""What stands between the matrix products of a Llama-style decoder layer: plain torch reference.

Every function rounds where the layers of transformers round, so that results differ by the last bit at most.
"""

import torch
import torch.nn.functional as F

from specflow.kernels.paged_attention import write_keys_values
from specflow.kernels.rotary import rotate


def rms_norm(values: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm over the last axis in float32, rounded, then times the weight [size]; the same shape and dtype."""
    wide = values.float()
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(values.dtype) * weight


def add_rms_norm(
    delta: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """residual + delta and its norm, [T, E] each; delta None: the residual itself and its norm."""
    total = residual if delta is None else residual + delta
    return total, rms_norm(total, weight, eps)


def embed_norm(
    token_ids: torch.Tensor, table: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows token_ids [T] int64 of a table [V, E] and their norm, [T, E] each."""
    return add_rms_norm(None, table.index_select(0, token_ids), weight, eps)


def pair_norm(
    first: torch.Tensor, second: torch.Tensor, first_weight: torch.Tensor, second_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Norms of two [T, E] side by side, [T, 2 E]."""
    return torch.cat([rms_norm(first, first_weight, eps), rms_norm(second, second_weight, eps)], -1)


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of [T, 2 I], gates first; [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def norm_rotate_write(
    qkv: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    rotary: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
    *,
    clean: bool = False,
) -> torch.Tensor:
    """Norm and rotate queries and keys, store keys and values in their pages; returns the queries [T, Hq, D].

    qkv [T, (Hq + 2 Hkv) * D]: queries, keys, values; rows may lie apart, and Hq may be 0. positions [T] int64 choose
    rows of rotary [P, 2, 1, D] (see `rotary.RotaryTable`), the last row for any behind it. norms: weights [D] of
    queries and of keys, None: not normed.
    clean: no NaN and no infinity enters the pages.
    """
    heads = qkv.unflatten(1, (-1, key_pages.shape[3]))
    kv_heads = key_pages.shape[2]
    query, key, value = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], 1)
    if norms is not None:
        query, key = rms_norm(query, norms[0], eps), rms_norm(key, norms[1], eps)
    rows = rotary.index_select(0, positions.clamp(max=len(rotary) - 1))
    write_keys_values(key_pages, value_pages, slot_mapping, rotate(key, rows), value, clean=clean)
    return rotate(query, rows)


def norm_rotate_write_layers(
    keys_values: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    slot_mapping: torch.Tensor,
    positions: torch.Tensor,
    rotary: torch.Tensor,
    key_norms: torch.Tensor | None,
    eps: float,
    *,
    clean: bool = False,
) -> None:
    """`norm_rotate_write` of keys and values alone, for L layers: keys_values [T, L * 2 Hkv * D], pages
    [L, blocks, page, Hkv, D], key_norms [L, D]."""
    for layer, part in enumerate(keys_values.chunk(len(key_pages), 1)):
        norms = None if key_norms is None else (key_norms[layer], key_norms[layer])
        norm_rotate_write(
            part, key_pages[layer], value_pages[layer], slot_mapping, positions, rotary, norms, eps, clean=clean
        )
