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

__all__ = ["Page", "Picture", "draw_pictures", "inline", "render", "render_page"]

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
    pictures: Sequence["Picture"] | None = None  # drawn before; None: the page draws its own


@dataclass(frozen=True)
class Picture:
    """One plot in both versions."""

    file: str  # name of the light one in the run's folder
    title: str
    light: bytes
    dark: bytes


def draw_pictures(summary: BenchSummary) -> list[Picture]:
    """The plots of a run; what was not measured is not drawn."""
    plots = {
        "throughput.png": ("Throughput by batch size", throughput_plot),
        "acceptance.png": ("Acceptance by draft position", acceptance_plot),
    }
    drawn = [(file, title, plot(summary), plot(summary, dark=True)) for file, (title, plot) in plots.items()]
    return [Picture(file, title, light, dark) for file, title, light, dark in drawn if light and dark]


def render_page(page: Page) -> str:
    """The HTML text. No address of the network is loaded by it."""
    summary = page.summary
    rows, total = _request_rows(page.requests_file)
    return render(
        "report.html.j2",
        summary=summary,
        acceptance=summary.acceptance_by_method(),
        tone=wording.VERDICT_COLOURS[summary.lossless.status],
        plots=[
            {"title": one.title, "light": inline(one.light), "dark": inline(one.dark)}
            for one in (draw_pictures(summary) if page.pictures is None else page.pictures)
        ],
        really_ran={name: facts for name, facts in summary.really_ran.items() if facts},
        facts=page.facts,
        config=yaml.safe_dump(_plain(page.config), sort_keys=False, allow_unicode=True) if page.config else "",
        rows=rows,
        total_rows=total,
        status=page.status,
        most_relative=max((point.relative for point in summary.cost_curve or ()), default=1.0),
    )


def render(template: str, **values: Any) -> str:
    """A template of this room with the values in it; everything is escaped, numbers are worded by `wording`."""
    from jinja2 import Environment, PackageLoader  # here: only reports need it

    environment = Environment(
        loader=PackageLoader("specflow.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals["w"] = wording
    return environment.get_template(template).render(
        written=datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"), **values
    )


def inline(png: bytes) -> str:
    """A picture as an address that holds it."""
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
