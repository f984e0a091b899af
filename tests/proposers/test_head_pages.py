"""Pages of a trained head: the same keys, values and attention whatever serves them."""

from dataclasses import replace

import pytest
import torch

from specflow.heads.layers import LayerShape
from specflow.kernels.rotary import RopeConfig
from specflow.proposers.head_pages import HeadPages
from tests.kernels.paged_cases import Paged
from tests.proposers.helpers import make_limits

SHAPE = LayerShape(
    hidden_size=32, intermediate_size=32, num_heads=4, num_kv_heads=2, head_dim=16, norm_eps=1e-6,
    rope=RopeConfig(head_dim=16, theta=100.0), qk_norm=False,
)  # fmt: skip


def test_triton_kernels() -> None:
    """A causal layer, and one that sees both ways in a window; a state that overflowed is stored as a number."""
    pytest.importorskip("triton")
    step = Paged([(3, 9), (3, 5)], (4, 2), (16, 16), "scattered")
    inputs = replace(step.inputs(), slot_mapping=torch.tensor([6, 7, 8, 12, 13, 14]))
    query, key, value = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    key[1, 0, 3], value[2, 1, 0] = float("nan"), float("inf")
    results, stored = [], []
    for kernels in ("torch", "triton"):
        limits = replace(make_limits(2, 50), paged_kernels=kernels)
        pages = HeadPages(SHAPE, (None, 4), limits, torch.float32, (True, False))
        pages.stacked.copy_(torch.randn(pages.stacked.shape, generator=torch.Generator().manual_seed(0)))
        attend = pages.attend(inputs)
        results.append(torch.stack([attend(layer, query, key, value) for layer in range(2)]))
        stored.append(pages.stacked)
    assert pages.kernels.name == "Triton"
    assert stored[0].equal(stored[1])
    assert torch.isfinite(stored[0]).all()
    torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)
