"""One rule for ties, on every dtype."""

import pytest
import torch

from specflow.kernels.argmax import lowest_argmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_lowest_index_among_equals(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [2.0, 2.0, 2.0, 2.0], [-1.0, float("-inf"), 5.0, 5.0]], dtype=dtype)
    assert lowest_argmax(logits).tolist() == [1, 0, 2]


def test_shapes_and_nan() -> None:
    logits = torch.randn(2, 3, 50)
    assert torch.equal(lowest_argmax(logits), logits.argmax(-1))
    assert lowest_argmax(torch.randn(7)).shape == ()
    logits[1, 2, 40] = float("nan")
    assert lowest_argmax(logits)[1, 2] == 40
    assert lowest_argmax(torch.randn(0, 5)).shape == (0,)
