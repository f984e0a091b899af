"""Which calls of paged attention `paged_attention_gluon` serves."""

from functools import cache
from typing import Any

import torch

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.kernels.triton_choice import has_group_products

_SIZE, _PAGE = 128, 16


def can_stream(query: torch.Tensor, key_pages: torch.Tensor, value_pages: torch.Tensor, rules: dict[str, Any]) -> bool:
    """Whether there is a kernel for these sizes and rules, and the device runs it. Shapes as in `paged_attention`."""
    plain = not any(rules[name] is not None for name in ("window", "softcap", "sinks"))
    alike = key_pages.stride() == value_pages.stride() and key_pages.shape[3] == value_pages.shape[3] == _SIZE
    half = query.dtype in (torch.float16, torch.bfloat16)
    return plain and alike and half and has_group_products(query.device) and _runs(query.device, query.dtype)


@cache
def _runs(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel compiles: Gluon may change from one version of Triton to the next."""
    from specflow.kernels.paged_attention_triton import LaunchShape, paged_attention

    query = torch.zeros(_PAGE, 4, _SIZE, device=device, dtype=dtype)
    pages = torch.zeros(2, _PAGE, 1, _SIZE, device=device, dtype=dtype)
    positions = torch.arange(_PAGE, device=device)
    inputs = AttentionInputs(
        positions=positions,
        slot_mapping=positions + _PAGE,
        block_table=torch.ones(1, 1, device=device, dtype=torch.int64),
        seq_len=torch.full((1,), _PAGE, device=device),
        groups=[QueryGroup(0, 1, 0, _PAGE, _PAGE, None)],
    )
    try:
        paged_attention(query, pages, pages, inputs, scale=1.0, shape=LaunchShape(streamed=True))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a compiler refuses in many ways, and the other kernel runs everywhere
        return False
    return True
