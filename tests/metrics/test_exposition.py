"""metrics.prom: the format, vLLM's names, and the counts of the run."""

import re

from specflow.metrics.exposition import COUNTERS, HISTOGRAMS, ServedRequests, exposition
from tests.report import scenario

LINE = re.compile(r'([a-z0-9_:]+)\{((?:[a-z_]+="(?:[^"\\]|\\.)*",?)*)\} (\S+)')


def scraped(text: str) -> dict[tuple[str, str], float]:
    """(name, labels) -> value; every line is a comment or a sample."""
    samples = {}
    for line in text.splitlines():
        if not line.startswith("# "):
            found = LINE.fullmatch(line)
            assert found, line
            samples[found[1], found[2]] = float(found[3])
    return samples


def played(model: str = "bundled") -> str:
    served = ServedRequests()
    for method in ("plain", "ngram"):
        for number in range(4):
            served.add(scenario.row(method, 1, number))
    return exposition(scenario.summary(("ngram",), (1,)), served, model)


def test_every_metric_has_vllms_name_help_and_type() -> None:
    text = played()
    for name in COUNTERS:
        assert f"# TYPE {name}_total counter\n" in text
    for name in HISTOGRAMS:
        assert f"# TYPE {name} histogram\n" in text
    assert text.count("# HELP") == len(COUNTERS) + len(HISTOGRAMS)
    assert text.endswith("\n")


def test_counts_are_those_of_the_run() -> None:
    samples = scraped(played())
    labels = 'model_name="bundled",engine="0",method="ngram",batch_size="1"'
    counts = scenario.summary(("ngram",), (1,)).series[1].acceptance
    prefix = "vllm:spec_decode_num_"
    assert samples[f"{prefix}drafts_total", labels] == counts.num_rounds > 0
    assert samples[f"{prefix}draft_tokens_total", labels] == counts.num_draft_tokens
    assert samples[f"{prefix}accepted_tokens_total", labels] == counts.num_accepted_tokens
    by_position = [samples[f"{prefix}accepted_tokens_per_pos_total", f'{labels},position="{i}"'] for i in range(4)]
    assert by_position == counts.accepted_at
    assert samples["vllm:generation_tokens_total", labels] == 4 * 16
    assert samples["vllm:prompt_tokens_total", labels] == 4 * 32
    assert samples["vllm:request_success_total", f'{labels},finished_reason="length"'] == 4
    assert not any("spec_decode" in name and 'method="plain"' in where for name, where in samples)


def test_histograms_add_up() -> None:
    samples = scraped(played())
    labels = 'model_name="bundled",engine="0",method="ngram",batch_size="1"'
    name = "vllm:time_to_first_token_seconds"
    assert samples[f"{name}_count", labels] == samples[f"{name}_bucket", f'{labels},le="+Inf"'] == 4
    assert abs(samples[f"{name}_sum", labels] - (0.012 + 0.015 + 0.018 + 0.021)) < 1e-9
    assert samples[f"{name}_bucket", f'{labels},le="0.02"'] == 3
    assert samples[f"{name}_bucket", f'{labels},le="0.01"'] == 0
    # Tokens of one step arrive together: five arrivals of a request of 16 tokens, not fifteen.
    assert samples["vllm:inter_token_latency_seconds_count", labels] == 4 * 5


def test_labels_are_escaped() -> None:
    assert 'model_name="a\\"b\\\\c\\nd"' in played('a"b\\c\nd')
