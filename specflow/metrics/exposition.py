"""A run's counters in Prometheus' text format, under the names that vLLM's server uses for the same things.

A file for those who scrape: node_exporter's textfile collector, or any reader of the format. A dashboard made for
vLLM's `/metrics` shows it unchanged; the labels `method` and `batch_size`, which vLLM has not, tell the series apart.
Names: https://docs.vllm.ai/en/stable/usage/metrics/ (v0.21). Counters end in `_total` there as here.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from specflow.metrics.acceptance import AcceptanceCounts
from specflow.metrics.summary import BenchSummary
from specflow.tracking.events import RequestRow

__all__ = ["COUNTERS", "HISTOGRAMS", "ServedRequests", "exposition"]

COUNTERS = {
    "vllm:prompt_tokens": "Prompt tokens processed.",
    "vllm:generation_tokens": "Output tokens committed.",
    "vllm:request_success": "Requests that ended, by reason.",
    "vllm:spec_decode_num_drafts": "Verification rounds: verifications of one request that had drafts.",
    "vllm:spec_decode_num_draft_tokens": "Drafted tokens that were verified.",
    "vllm:spec_decode_num_accepted_tokens": "Drafted tokens that were accepted, the bonus token not counted.",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "Rounds that accepted the draft at this position.",
}
HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": "Arrival to first output token.",
    "vllm:inter_token_latency_seconds": "Time between arrivals of output tokens; tokens of one step arrive together.",
    "vllm:request_time_per_output_token_seconds": "Time per output token of a request, the first left out.",
    "vllm:e2e_request_latency_seconds": "Arrival to last output token.",
}
# Bounds are ours: those of vLLM begin where a small model on this machine is already done.
_BOUNDS = tuple(base * 10.0**power for power in range(-4, 3) for base in (1, 2, 5))
_Key = tuple[str, int]  # method and batch size


@dataclass
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(_BOUNDS) + 1))
    total: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(_BOUNDS, seconds)] += 1
        self.total += seconds


@dataclass
class _Served:
    """What one series has served, all its repeats together."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    times: Mapping[str, _Histogram] = field(default_factory=lambda: {name: _Histogram() for name in HISTOGRAMS})


class ServedRequests:
    """Counts finished requests as they come, so that nothing has to be read again."""

    def __init__(self) -> None:
        self._series: dict[_Key, _Served] = {}

    def add(self, row: RequestRow) -> None:
        """Count one request; cheap, because it runs within the measurement."""
        served = self._series.setdefault((row.method, row.batch_size), _Served())
        served.prompt_tokens += row.prompt_tokens
        served.output_tokens += row.output_tokens
        served.reasons[row.finish_reason] += 1
        first, between, per_token, whole = served.times.values()
        if row.ttft_seconds is not None:
            first.add(row.ttft_seconds)
        for gap in row.inter_token_seconds:
            if gap > 0:
                between.add(gap)
        if row.inter_token_seconds:
            per_token.add(sum(row.inter_token_seconds) / len(row.inter_token_seconds))
        whole.add(row.latency_seconds)

    def items(self) -> Iterator[tuple[_Key, _Served]]:
        """Method and batch size with what was served."""
        yield from self._series.items()


def exposition(summary: BenchSummary, served: ServedRequests, model: str) -> str:
    """The text of a scrape after the run. model: value of the label `model_name`."""
    samples: dict[str, list[str]] = {name: [] for name in (*COUNTERS, *HISTOGRAMS)}
    for (method, batch), one in served.items():
        labels = _labels(model, method, batch)
        samples["vllm:prompt_tokens"].append(_sample("vllm:prompt_tokens_total", labels, one.prompt_tokens))
        samples["vllm:generation_tokens"].append(_sample("vllm:generation_tokens_total", labels, one.output_tokens))
        for reason, count in sorted(one.reasons.items()):
            marked = labels | {"finished_reason": reason}
            samples["vllm:request_success"].append(_sample("vllm:request_success_total", marked, count))
        for name, histogram in one.times.items():
            samples[name] += _histogram_samples(name, labels, histogram)
    for series in summary.series:
        if not series.is_plain:
            for name, line in _acceptance(series.acceptance, _labels(model, series.method, series.batch_size)):
                samples[name].append(line)
    return "".join(f"{line}\n" for line in _blocks(samples))


def _acceptance(counts: AcceptanceCounts, labels: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    prefix = "vllm:spec_decode_num_"
    values = {
        "drafts": counts.num_rounds,
        "draft_tokens": counts.num_draft_tokens,
        "accepted_tokens": counts.num_accepted_tokens,
    }
    for name, value in values.items():
        yield prefix + name, _sample(f"{prefix}{name}_total", labels, value)
    for position, value in enumerate(counts.accepted_at):
        name = f"{prefix}accepted_tokens_per_pos"
        yield name, _sample(f"{name}_total", {**labels, "position": str(position)}, value)


def _histogram_samples(name: str, labels: Mapping[str, str], histogram: _Histogram) -> Iterator[str]:
    below = 0
    for bound, count in zip((*_BOUNDS, None), histogram.counts, strict=True):
        below += count
        text = "+Inf" if bound is None else f"{bound:g}"
        yield _sample(f"{name}_bucket", {**labels, "le": text}, below)
    yield _sample(f"{name}_sum", labels, histogram.total)
    yield _sample(f"{name}_count", labels, below)


def _labels(model: str, method: str, batch_size: int) -> dict[str, str]:
    return {"model_name": model, "engine": "0", "method": method, "batch_size": str(batch_size)}


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {value!r}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _blocks(samples: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Help, type and samples of every metric that has any."""
    for name, lines in samples.items():
        if lines:
            shown = f"{name}_total" if name in COUNTERS else name
            yield f"# HELP {shown} {COUNTERS.get(name) or HISTOGRAMS[name]}"
            yield f"# TYPE {shown} {'counter' if name in COUNTERS else 'histogram'}"
            yield from lines
