"""What `model_free.py` writes: a Markdown page, its picture, and all numbers as JSON."""

import dataclasses
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from specflow.metrics.acceptance import AcceptanceCounts
from specflow.metrics.latency import throughput
from specflow.metrics.summary import PLAIN, summarise_repeat
from specflow.metrics.verdict import LosslessVerdict
from specflow.report import wording
from specflow.report.figure import METHOD_COLOURS
from specflow.tasks.measure import Measurement
from specflow.workloads.base import Prompt

SPEC_BENCH = ("translation", "summarization", "qa", "math_reasoning", "rag", "mt_bench")
COLD, AGAIN = "cold", "second pass"  # what a method has learnt when a pass begins
_VERDICTS = ("not_applicable", "verified", "verified_up_to_ties", "failed")
_GREY, _INK, _FAINT = "#8b949e", "#1f2328", "#d8dee4"
_READING = """\
A round is one check of at least one draft; the mean acceptance length is the number of tokens that a round emits,
the target's own included. Steps without a draft are no rounds; tokens per step counts them too, so it is what a
method gains per pass of the target. Tokens/s includes the time of the prompts. Drafting is all that an engine step
does for the proposer, its own work and the preparation of its inputs, divided by the requests in the step, whether a
draft was found or not. Lossless compares every output token with plain decoding's; a tie is a difference where the
target's two best logits agree within rounding. Definitions: [metrics](metrics.md)."""


@dataclass(frozen=True)
class Group:
    """Prompts of one kind."""

    name: str
    prompts: list[Prompt]
    skipped: int  # prompts before the last one taken that do not fit into the context
    note: str | None = None

    @property
    def label(self) -> str:
        """The name with the benchmark it belongs to."""
        return f"spec_bench: {self.name}" if self.name in SPEC_BENCH else self.name


@dataclass
class Row:
    """One method on one group at one batch size: sums over the repeats, and the median of their speeds."""

    group: str
    method: str
    batch_size: int
    memory: str = COLD  # or AGAIN
    speedup: float | None = None  # over plain decoding of the same group at the same batch size
    tokens_per_second: list[float] = field(default_factory=list)  # of each repeat
    acceptance: AcceptanceCounts = field(default_factory=AcceptanceCounts)
    output_tokens: int = 0
    wall_seconds: float = 0.0
    propose_seconds: float = 0.0
    row_steps: int = 0  # requests, summed over all steps
    decode_tokens: int = 0  # emitted by steps without prompt tokens
    decode_row_steps: int = 0  # requests, summed over those steps
    verdict: LosslessVerdict = field(default_factory=lambda: LosslessVerdict("not_applicable"))

    def add(self, one: Measurement) -> None:
        """Count a pass."""
        summary = summarise_repeat(one.series, one.rows, one.steps, one.wall_seconds)
        self.tokens_per_second.append(summary.tokens_per_second or 0.0)
        self.acceptance.merge(summary.acceptance)
        self.output_tokens += summary.output_tokens
        self.wall_seconds += one.wall_seconds
        for step in one.steps:
            self.propose_seconds += step.propose_seconds
            self.row_steps += step.num_requests
            if not step.num_prompt_tokens:
                self.decode_tokens += step.num_emitted
                self.decode_row_steps += step.num_requests

    @property
    def speed(self) -> float:
        """Tokens per second, the median of the repeats."""
        return median(self.tokens_per_second)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a request gains in a step without prompt tokens, whether it had drafts or not."""
        return self.decode_tokens / self.decode_row_steps if self.decode_row_steps else None

    @property
    def drafting_us(self) -> float | None:
        """Microseconds of drafting per request and step, prompts included."""
        return 1e6 * self.propose_seconds / self.row_steps if self.row_steps else None

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data, with the derived numbers."""
        derived = {
            "mean_acceptance_length": self.acceptance.mean_acceptance_length,
            "acceptance_rate": self.acceptance.acceptance_rate,
            "tokens_per_step": self.tokens_per_step,
            "drafting_us": self.drafting_us,
            "lossless": self.verdict.sentence(),
        }
        return dataclasses.asdict(self) | derived


def pooled(rows: Sequence[Row]) -> Row:
    """All groups as one: every token and second counts the same."""
    total = Row("all", rows[0].method, rows[0].batch_size, rows[0].memory)
    for row in rows:
        total.acceptance.merge(row.acceptance)
        for name in (
            "output_tokens", "wall_seconds", "propose_seconds", "row_steps", "decode_tokens", "decode_row_steps",
        ):  # fmt: skip
            setattr(total, name, getattr(total, name) + getattr(row, name))
    total.tokens_per_second = [throughput(total.output_tokens, total.wall_seconds) or 0.0]
    counted = sum(row.verdict.compared_requests for row in rows), sum(row.verdict.compared_tokens for row in rows)
    worst = max((row.verdict for row in rows), key=lambda verdict: _VERDICTS.index(verdict.status))
    differing = sum(row.verdict.differences for row in rows)
    total.verdict = LosslessVerdict(worst.status, *counted, worst.first_difference, worst.reason, differing)
    return total


def with_totals(rows: Sequence[Row]) -> list[Row]:
    """The rows, and behind them one of all groups for every method and batch size, if there are several groups."""
    kinds: dict[tuple[int, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row.batch_size, row.method, row.memory].append(row)
    if all(len(found) == 1 for found in kinds.values()):
        return list(rows)
    totals = {key: pooled(found) for key, found in kinds.items()}
    for (batch_size, method, _), total in totals.items():
        if method != PLAIN:
            total.speedup = total.speed / totals[batch_size, PLAIN, COLD].speed
    return [*rows, *totals.values()]


def lossless(row: Row) -> str:
    """The verdict in a cell."""
    if row.method == PLAIN:
        return ""
    words = {"verified": "equal", "verified_up_to_ties": "equal but for ties", "failed": "DIFFERENT"}
    count = f" ({row.verdict.differences} of {row.verdict.compared_requests})" if row.verdict.differences else ""
    return words[row.verdict.status] + count


def table(header: Sequence[str], lines: Sequence[Sequence[str]], left: int = 2) -> str:
    """A Markdown table; the first columns are texts, the others numbers."""
    rule = ["---"] * left + ["---:"] * (len(header) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))


def main_table(rows: Sequence[Row], labels: dict[str, str]) -> str:
    """One row per group and method, first passes only."""
    header = (
        "prompts", "method", "mean acceptance length", "acceptance rate", "tokens per step", "tokens/s", "speed-up",
        "drafting, µs", "lossless",
    )  # fmt: skip
    lines = []
    for row in rows:
        plain = row.method == PLAIN
        lines.append(
            (
                labels.get(row.group, "**all**"),
                row.method,
                "–" if plain else wording.count(row.acceptance.mean_acceptance_length, 2),
                "–" if plain else wording.percent(row.acceptance.acceptance_rate),
                wording.count(row.tokens_per_step, 2),
                wording.count(row.speed),
                "1.00×" if plain else wording.times(row.speedup),
                "–" if plain else wording.count(row.drafting_us),
                lossless(row),
            )
        )
    return table(header, lines)


def learning_table(rows: Sequence[Row], labels: dict[str, str]) -> str:
    """First against second pass over the same prompts, for the methods that have a second."""
    header = (
        "prompts", "method", "batch", "acceptance length: first pass", "second", "tokens per step: first", "second",
        "speed-up: first", "second", "lossless: second",
    )  # fmt: skip
    first = {(row.group, row.method, row.batch_size): row for row in rows if row.memory == COLD}
    lines = []
    for row in rows:
        if row.memory == COLD:
            continue
        before = first[row.group, row.method, row.batch_size]
        pairs = (
            wording.count(one, 2)
            for name in ("mean_acceptance_length", "tokens_per_step")
            for one in (before.to_dict()[name], row.to_dict()[name])
        )
        speedups = wording.times(before.speedup), wording.times(row.speedup)
        label = labels.get(row.group, "**all**")
        lines.append((label, row.method, str(row.batch_size), *pairs, *speedups, lossless(row)))
    return table(header, lines) if lines else ""


def page(facts: dict[str, str], groups: Sequence[Group], rows: Sequence[Row], picture: str) -> str:
    """The Markdown text."""
    labels = {group.name: group.label for group in groups}
    rows = with_totals(rows)
    parts = ["# Drafting without weights, measured", "Written by `benchmarks/model_free.py`, which also says how."]
    parts.append("\n".join(f"- {name}: {value}" for name, value in facts.items()))
    parts.append(f"![Mean acceptance length and speed-up by kind of prompt]({picture})")
    for batch_size in sorted({row.batch_size for row in rows}):
        chosen = [row for row in rows if row.batch_size == batch_size and row.memory == COLD]
        parts += [f"## Batch {batch_size}", main_table(chosen, labels)]
    learnt = learning_table(rows, labels)
    if learnt:
        explained = (
            "The same engine runs the same prompts again. Everything it drafts from was its own output; the text does "
            "not change, so a second pass shows what repeated requests gain."
        )
        parts += ["## Learning from its own outputs", explained, learnt]
    parts += ["## Prompts", prompt_table(groups), "## How to read it", _READING]
    return "\n\n".join(parts) + "\n"


def prompt_table(groups: Sequence[Group]) -> str:
    """How many prompts there were, and why not more."""
    lines = [
        (
            group.label,
            group.note or "",
            str(len(group.prompts)),
            str(sum(len(prompt.turns) for prompt in group.prompts)),
            str(group.skipped),
        )
        for group in groups
    ]
    return table(("prompts", "", "taken", "requests", "skipped: too long"), lines)


def draw(groups: Sequence[Group], rows: Sequence[Row]) -> Any:
    """A figure: mean acceptance length, then the speed-up at each batch size, as bars by group and method."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    batches = sorted({row.batch_size for row in rows})
    figure = Figure(figsize=(11, 3.1 * (1 + len(batches))), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08)
    panels = figure.subplots(1 + len(batches), 1, squeeze=False)[:, 0]
    kinds = list(dict.fromkeys((row.method, row.memory) for row in rows if row.method != PLAIN))
    methods = list(dict.fromkeys(method for method, _ in kinds))
    for panel, batch_size in zip(panels, (None, *batches), strict=True):
        for index, (method, memory) in enumerate(kinds):
            heights = [_height(rows, group.name, method, memory, batch_size) for group in groups]
            width = 0.8 / len(kinds)
            places = [place + (index - (len(kinds) - 1) / 2) * width for place in range(len(groups))]
            colour = METHOD_COLOURS[methods.index(method) % len(METHOD_COLOURS)]
            again = memory != COLD
            style = {"facecolor": "white", "hatch": "////"} if again else {"facecolor": colour}
            label = f"{method}, second pass" if again else method
            panel.bar(places, heights, width * 0.9, edgecolor=colour, linewidth=0.8, label=label, **style)
        title = (
            "Mean acceptance length (tokens per round)" if batch_size is None else f"Speed-up at batch {batch_size} (×)"
        )
        _dress(panel, title, [group.name for group in groups])
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(kinds), frameon=False)
    return figure


def _height(rows: Sequence[Row], group: str, method: str, memory: str, batch_size: int | None) -> float:
    """Speed-up at a batch size, or acceptance length over all batch sizes; 0 where nothing was drafted."""
    chosen = [row for row in rows if (row.group, row.method, row.memory) == (group, method, memory)]
    if batch_size is not None:
        return next(row.speedup or 0.0 for row in chosen if row.batch_size == batch_size)
    counts = AcceptanceCounts()
    for row in chosen:
        counts.merge(row.acceptance)
    return counts.mean_acceptance_length or 0.0


def _dress(panel: Any, title: str, names: Sequence[str]) -> None:
    panel.set_title(title, loc="left", fontsize=12, fontweight="bold", color=_INK)
    panel.set_xticks(range(len(names)), names)
    panel.axhline(1, color=_GREY, linewidth=1.2)
    panel.annotate("plain", (1, 1), (4, 0), ("axes fraction", "data"), "offset points", va="center", color=_GREY)
    panel.spines[["top", "right", "left"]].set_visible(False)
    panel.tick_params(length=0, labelsize=10, colors=_INK)
    panel.grid(axis="y", color=_FAINT, linewidth=0.8)
    panel.set_axisbelow(True)
    panel.set_xlim(-0.5, len(names) - 0.5)


def write(output: Path, facts: dict[str, str], groups: Sequence[Group], rows: Sequence[Row]) -> None:
    """The page, its picture and the numbers, all three beside each other."""
    output.parent.mkdir(parents=True, exist_ok=True)
    picture = output.with_suffix(".png")
    draw(groups, rows).savefig(picture)
    output.write_text(page(facts, groups, rows, picture.name), encoding="utf-8")
    data = {"facts": facts, "rows": [row.to_dict() for row in rows]}
    output.with_suffix(".json").write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
