"""The drafters' filters are the target's."""

import pytest
import torch

from specflow.core.request import Request
from specflow.core.sampling_params import SamplingParams
from specflow.samplers.filters import RowFilters, filter_rows
from specflow.samplers.processors import RequestRows, process_logits

CASES = [
    {}, {"top_k": 3}, {"top_k": 1}, {"top_k": -1}, {"top_p": 0.7}, {"min_p": 0.2}, {"top_k": 5, "top_p": 0.6},
    {"top_k": 4, "top_p": 0.9, "min_p": 0.05}, {"top_p": 1e-6}, {"top_k": 1000},
]  # fmt: skip


@pytest.mark.parametrize("ties", [False, True])
def test_filters_are_those_of_the_target(ties: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(len(CASES), 40, generator=generator) * 2
    if ties:
        logits = logits.round()
    sampling = [SamplingParams(temperature=1.0, **case) for case in CASES]
    expected = logits.clone()
    for row, options in zip(expected, sampling, strict=True):
        rows = [RequestRows(Request("a", [1], options, seed=0, slot=0), 0, 1)]
        process_logits(row.unsqueeze(0), rows, torch.zeros(1, 4, dtype=torch.int64))
    filters = RowFilters(
        torch.tensor([one.top_k for one in sampling]),
        torch.tensor([one.top_p for one in sampling]),
        torch.tensor([one.min_p for one in sampling]),
    )
    assert torch.equal(filter_rows(logits, filters), expected)
    some = torch.tensor([2, 7])
    assert torch.equal(filter_rows(logits[some], filters.of(some)), expected[some])
