"""Latency, throughput, speed-up, the verdict's sentences and the flat metrics."""

import json
import math
from dataclasses import replace

import pytest

from specflow.metrics.latency import Percentiles, TimeShares, arrival_gaps, decode_throughput, tpot_seconds
from specflow.metrics.summary import LosslessVerdict, cost_points, summarise, summarise_repeat, with_speedups
from tests.report import scenario


def test_percentiles() -> None:
    assert Percentiles.of(range(101)) == Percentiles(50.0, 90.0, 99.0)
    assert Percentiles.of([]) == Percentiles(None, None, None)


def test_tokens_that_arrive_together_are_one_arrival() -> None:
    row = replace(scenario.row("ngram", 1), inter_token_seconds=(0.0, 0.0, 0.006, 0.0, 0.003))
    assert arrival_gaps([row]) == [0.006, 0.003]
    assert tpot_seconds([row]) == [pytest.approx(0.009 / 5)]


def test_decode_throughput_leaves_prompts_out() -> None:
    steps = [
        scenario.step(0, (), (), 5.0, prompt=100),
        scenario.step(1, (4,), (3,), 0.5),
        scenario.step(2, (), (), 0.5),
    ]
    assert decode_throughput(steps) == pytest.approx(5.0)
    assert decode_throughput(steps[:1]) is None


def test_shares_add_up() -> None:
    shares = TimeShares.of(scenario.steps("ngram", 1))
    assert shares.target + shares.sample + shares.propose + shares.other == pytest.approx(1)
    assert shares.verify == pytest.approx(0.75)
    assert TimeShares.of([]) == TimeShares()


def _repeat(method: str, wall_seconds: float):
    rows = [scenario.row(method, 1, number) for number in range(4)]
    return summarise_repeat(scenario.series(method, 1), rows, scenario.steps(method, 1), wall_seconds, 1000)


def test_series_is_the_median_of_its_repeats() -> None:
    plain = summarise([_repeat("plain", seconds) for seconds in (1.0, 8.0, 2.0)])
    assert plain.wall_seconds == 2.0
    assert plain.tokens_per_second == 32.0
    assert plain.tokens_per_second_range == (8.0, 64.0)
    assert plain.num_requests == 4
    assert plain.output_tokens == 64
    ngram = summarise([_repeat("ngram", 1.0)])
    assert [one.speedup for one in with_speedups([plain, ngram])] == [None, 2.0]
    alone = replace(ngram, batch_size=4)
    assert with_speedups([plain, alone])[1].speedup is None  # never against another batch size


def test_acceptance_comes_from_the_steps() -> None:
    steps = [scenario.step(0, (4, 2), (1, 2), 0.1), scenario.step(1, (), (), 0.1)]
    found = summarise_repeat(scenario.series("ngram", 2), [], steps, 1.0)
    assert (found.acceptance.num_rounds, found.acceptance.num_draft_tokens) == (2, 6)
    assert found.acceptance.num_accepted_tokens == 3
    assert found.tokens_per_second == 0


def test_flat_metrics() -> None:
    metrics = scenario.summary().to_metrics()
    assert metrics["ngram/batch_8/speedup"] > 1
    assert metrics["plain/batch_1/tokens_per_second"] > 0
    assert 0 < metrics["ngram/batch_1/acceptance_rate"] < 1
    assert metrics["ngram/batch_1/acceptance_conditional/position_0"] > 0
    assert metrics["lossless"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    assert not any(name.startswith("plain") and "accept" in name for name in metrics)


def test_nothing_drafted_is_left_out_of_metrics() -> None:
    """C07."""
    rows = [replace(scenario.row("ngram", 1), rounds=0, drafted=0, accepted=0)]
    series = summarise([summarise_repeat(scenario.series("ngram", 1), rows, scenario.steps("plain", 1), 1.0)])
    metrics = series.to_metrics()
    assert metrics["ngram/batch_1/num_rounds"] == 0
    assert "ngram/batch_1/acceptance_rate" not in metrics
    assert "ngram/batch_1/peak_memory_bytes" not in metrics


def test_summary_is_plain_data() -> None:
    data = json.loads(json.dumps(scenario.summary().to_dict(), allow_nan=False))
    assert data["series"][1]["acceptance"]["mean_acceptance_length"] > 1
    assert data["verdict"].startswith("lossless: verified")


def test_cost_curve_is_relative_to_its_first_point() -> None:
    points = cost_points([(1, 0.01), (8, 0.02)])
    assert points is not None
    assert points[1].relative == 2.0
    assert cost_points([]) is None


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        (
            LosslessVerdict("verified", 24, 3072),
            "lossless: verified (24 requests, 3072 tokens equal to plain decoding)",
        ),
        (
            LosslessVerdict(
                "failed", 24, 3072, {"request": "a", "position": 3, "expected": 5, "actual": None, "gap": 1.5}
            ),
            "lossless: FAILED (24 requests, 3072 tokens; 1 request differs; first difference: request a, "
            "output token 3: plain 5, speculative ended, top-2 logit gap 1.5)",
        ),
        (
            LosslessVerdict("not_applicable", reason="sampling without a seed"),
            "lossless: not checked (sampling without a seed)",
        ),
    ],
)
def test_verdict_sentences(verdict: LosslessVerdict, sentence: str) -> None:
    assert verdict.sentence() == sentence
    assert verdict.passed == (verdict.status != "failed")


def test_ties_are_named() -> None:
    difference = {"request": "7", "position": 9, "expected": 1, "actual": 2, "gap": 0.0}
    text = LosslessVerdict("verified_up_to_ties", 8, 99, difference, differences=2).sentence()
    assert text.startswith("lossless: verified up to ties")
    assert "2 requests differ;" in text
