"""One page that holds everything about a run and needs nothing else: styles and pictures are inside it."""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from specflow.metrics.summary import BenchSummary
from specflow.report import wording
from specflow.report.plots import acceptance_plot, throughput_plot

__all__ = ["Page", "render_page"]

_MOST_ROWS = 300  # of the table of requests; all of them are in requests.jsonl
_MOST_TEXT = 160  # characters of an answer


@dataclass(frozen=True)
class Page:
    """What the page is made from."""

    summary: BenchSummary
    config: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    requests_file: Path | None = None
    status: str = "finished"


def render_page(page: Page) -> str:
    """The HTML text. No address of the network is loaded by it."""
    from jinja2 import Environment, PackageLoader  # here: only reports need it

    environment = Environment(
        loader=PackageLoader("specflow.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["w"] = wording
    summary = page.summary
    rows, total = _request_rows(page.requests_file)
    return environment.get_template("report.html.j2").render(
        summary=summary,
        acceptance=summary.acceptance_by_method(),
        tone=wording.VERDICT_COLOURS[summary.lossless.status],
        plots=[
            _picture(throughput_plot, summary, "Throughput by batch size"),
            _picture(acceptance_plot, summary, "Acceptance by draft position"),
        ],
        really_ran={name: facts for name, facts in summary.really_ran.items() if facts},
        facts=page.facts,
        config=yaml.safe_dump(_plain(page.config), sort_keys=False, allow_unicode=True) if page.config else "",
        rows=rows,
        total_rows=total,
        status=page.status,
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        most_relative=max((point.relative for point in summary.cost_curve or ()), default=1.0),
    )


def _picture(plot: Any, summary: BenchSummary, title: str) -> dict[str, str] | None:
    """A plot in both versions as data addresses."""
    light, dark = plot(summary), plot(summary, dark=True)
    return {"title": title, "light": _inline(light), "dark": _inline(dark)} if light and dark else None


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _request_rows(file: Path | None) -> tuple[list[dict[str, Any]], int]:
    """The first rows of the file and how many it has."""
    if file is None or not file.is_file():
        return [], 0
    with file.open(encoding="utf-8") as lines:
        rows = [_shortened(json.loads(line)) for line in islice(lines, _MOST_ROWS)]
        return rows, len(rows) + sum(1 for _ in lines)


def _shortened(row: dict[str, Any]) -> dict[str, Any]:
    text = row["text"]
    return row | {"text": text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "…"}


def _plain(value: Any) -> Any:
    """Containers as YAML knows them."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence | set | frozenset) and not isinstance(value, str):
        items: Iterable[Any] = value
        return [_plain(item) for item in items]
    return value if isinstance(value, str | int | float | bool | None) else str(value)
