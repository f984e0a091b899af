"""Rows that stay of a target pass: those that exist, and the static form for GPUs, which says the same."""

from pathlib import Path

import torch

from specflow.proposers.feature_rows import FeatureRows, _exact_rows, _static_rows, features_of
from tests.heads.eagle3_helpers import make_head
from tests.proposers.eagle3_helpers import Eagle3Bench
from tests.proposers.helpers import BLOCK, Row

WIDTH = 5


def both(tmp_path: Path) -> tuple[FeatureRows, FeatureRows, Eagle3Bench]:
    bench = Eagle3Bench(tmp_path, make_head(), WIDTH - 1)
    rows = (Row(2, list(range(20)), (14, 19), 4), Row(0, [1, 2], (0, 1), 4), Row(1, list(range(9)), (5, 8), 4))
    context = bench.context(rows, rejected=2)
    features = features_of(context, "x")
    return _exact_rows(context, features, BLOCK), _static_rows(context, features, BLOCK, WIDTH), bench


def test_rows_that_exist(tmp_path: Path) -> None:
    exact, _, bench = both(tmp_path)
    assert exact.rows.tolist() == [0, 1, 2, 3, 4, 7, 10, 11, 12]
    assert exact.owners.tolist() == [0] * 5 + [1] + [2] * 3
    assert exact.last.tolist() == [4, 5, 8]
    positions = [14, 15, 16, 17, 18, 0, 5, 6, 7]
    assert exact.attention.positions.tolist() == positions
    slots = [
        int(bench.blocks[slot, position // BLOCK]) * BLOCK + position % BLOCK
        for slot, position in zip([2] * 5 + [0] + [1] * 3, positions, strict=True)
    ]
    assert exact.attention.slot_mapping.tolist() == slots
    assert exact.attention.seq_len.tolist() == [19, 1, 8]
    assert [group.query_len for group in exact.attention.groups] == [5, 1, 3]


def test_the_static_form_holds_the_same_rows(tmp_path: Path) -> None:
    exact, static, _ = both(tmp_path)
    assert len(static.rows) == 3 * WIDTH
    real = torch.cat([torch.arange(WIDTH) < count for count in (5, 1, 3)])
    for ours, theirs in (
        (static.rows, exact.rows),
        (static.owners, exact.owners),
        (static.attention.positions, exact.attention.positions),
        (static.attention.slot_mapping, exact.attention.slot_mapping),
    ):
        assert torch.equal(ours[real], theirs)
    assert torch.equal(static.rows[static.last], exact.rows[exact.last])
    assert (static.attention.slot_mapping[~real] < BLOCK).all()
    assert [group.num_requests for group in static.attention.groups] == [3]
