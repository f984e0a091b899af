"""What `task=profile` shows: a table, and a picture of where the time of a step goes and of what more tokens cost."""

from rich.console import Console
from rich.table import Table

from specflow.metrics.profile import ProfileSummary, StepProfile
from specflow.report.figure import colours_of, drawing, style_axes, theme_of

__all__ = ["print_profile", "profile_plot"]

_PARTS = ("target", "verify", "draft", "books", "host gap")
_NONE = "–"


def _parts(one: StepProfile) -> dict[str, float | None]:
    """Seconds by part; of a step whose parts were not told apart only its whole time."""
    if not one.parts:
        return {"undivided": one.step_seconds}
    return {**{part: one.parts.get(part) for part in _PARTS[:-1]}, "host gap": one.host_gap}


def print_profile(summary: ProfileSummary, console: Console) -> None:
    """The table, the cost of verification and what ran."""
    table = Table(title=f"{summary.name}: milliseconds of a decode step, {summary.context} tokens of context")
    for column in ("method", "batch", "tokens", "step", *_PARTS, "target GB", "of copy"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for one in summary.steps:
        seconds = [_parts(one).get(part) for part in _PARTS]
        share = one.target_bandwidth and one.target_bandwidth / summary.copy_bandwidth
        table.add_row(
            one.method,
            str(one.batch_size),
            str(one.num_query_tokens),
            f"{1000 * one.step_seconds:.3f}",
            *(_NONE if value is None else f"{1000 * value:.3f}" for value in seconds),
            f"{one.target_bytes / 1e9:.3f}",
            _NONE if not share else f"{100 * share:.0f} %",
        )
    console.print(table)
    console.print(
        f"copy bandwidth {summary.copy_bandwidth / 1e9:,.0f} GB/s, bytes read plus written; "
        "of copy: the target's least bytes over its time, against that",
        highlight=False,
    )
    if summary.cost_curve:
        points = " · ".join(
            f"{point.query_tokens}: {1000 * point.seconds:.2f} ms ({point.relative:.2f}×)"
            for point in summary.cost_curve
        )
        console.print(f"target pass by query tokens, batch 1: {points}", highlight=False, soft_wrap=True)
    how = summary.really_ran.get("backend", {}).get("decode steps", "operation by operation, the host in the loop")
    console.print(f"decode steps: {how}", highlight=False, soft_wrap=True)


def profile_plot(summary: ProfileSummary, dark: bool = False) -> bytes:
    """Left: stacked parts of a step by method and batch size. Right: the cost of a target pass by query tokens. PNG."""
    theme = theme_of(dark)
    with drawing(dark) as (figure, buffer):
        left, right = figure.subplots(1, 2)
        for axes in (left, right):
            style_axes(axes, dark)
        colours = colours_of([*_PARTS, "undivided"], "host gap", dark)
        labels = [f"{one.method}\nbatch {one.batch_size}" for one in summary.steps]
        floors = [0.0] * len(labels)
        for part, colour in colours.items():
            heights = [1000 * (_parts(one).get(part) or 0.0) for one in summary.steps]
            if any(heights):
                left.bar(range(len(labels)), heights, 0.7, bottom=floors, color=colour, label=part)
            floors = [floor + height for floor, height in zip(floors, heights, strict=True)]
        left.set_xticks(range(len(labels)), labels)
        left.set_ylabel("ms per decode step", color=theme.ink)
        left.legend(frameon=False, fontsize=9, labelcolor=theme.ink)
        left.set_title("Parts of a step", loc="left", color=theme.ink, fontweight="bold")
        if summary.cost_curve:
            tokens = [point.query_tokens for point in summary.cost_curve]
            right.plot(
                tokens, [1000 * point.seconds for point in summary.cost_curve], marker="o", color=colours["target"]
            )
            right.set_xscale("log", base=2)
            right.set_xticks(tokens, [str(count) for count in tokens])
            right.set_ylim(bottom=0)
        right.set_xlabel("query tokens, batch 1", color=theme.ink)
        right.set_ylabel("ms per target pass", color=theme.ink)
        right.set_title("Cost of verification", loc="left", color=theme.ink, fontweight="bold")
    return buffer.getvalue()
