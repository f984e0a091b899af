"""The look of every plot: colours, light and dark theme, axes, labels. PNG bytes, 200 pixels to an inch."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["METHOD_COLOURS", "Theme", "colours_of", "drawing", "png_width", "spread", "style_axes", "theme_of"]

_INCHES = (8.0, 4.2)
_DPI = 200
# Of Okabe and Ito's palette, which colour-blind readers can tell apart; plain decoding is always grey.
METHOD_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
_DARK_COLOURS = ("#3E9BDC", "#E69F00", "#1FB58F", "#D78DB6", "#E3743A", "#8CCBF0")


@dataclass(frozen=True)
class Theme:
    """Colours that do not belong to a method."""

    paper: str
    ink: str
    faint: str
    plain: str


_LIGHT = Theme("#ffffff", "#1f2328", "#d8dee4", "#8b949e")
_DARK = Theme("#161b22", "#e6edf3", "#30363d", "#8b949e")


def theme_of(dark: bool) -> Theme:
    """The light or the dark theme."""
    return _DARK if dark else _LIGHT


def colours_of(names: Sequence[str], plain: str, dark: bool) -> dict[str, str]:
    """A colour for each name in turn; `plain` comes first, in grey."""
    drafting = [name for name in names if name != plain]
    colours = {plain: theme_of(dark).plain} if plain in names else {}
    palette = _DARK_COLOURS if dark else METHOD_COLOURS
    return colours | {name: palette[index % len(palette)] for index, name in enumerate(drafting)}


@contextmanager
def drawing(dark: bool, inches: tuple[float, float] = _INCHES) -> Iterator[tuple[Any, io.BytesIO]]:
    """A figure to draw on, and the buffer that holds the PNG after the block. No window system is involved."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # here: a second of import, only reports need it
    from matplotlib.figure import Figure

    theme, buffer = theme_of(dark), io.BytesIO()
    figure = Figure(figsize=inches, dpi=_DPI, facecolor=theme.paper, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)  # type: ignore[call-arg, union-attr]
    yield figure, buffer
    figure.savefig(buffer, format="png", facecolor=theme.paper)


def png_width(png: bytes) -> int:
    """Width in pixels, from the picture's header."""
    return int.from_bytes(png[16:20], "big")


def style_axes(axes: Any, dark: bool) -> None:
    """Light lines, no box, a grid to read heights from."""
    theme = theme_of(dark)
    axes.set_facecolor(theme.paper)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(theme.faint)
    axes.tick_params(colors=theme.ink, labelsize=10, length=0)
    axes.grid(axis="y", color=theme.faint, linewidth=0.8)
    axes.set_axisbelow(True)


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Heights as near to the wanted ones as `gap` between any two allows, inside low … high where that is possible.

    Labels of lines that end close together are drawn there.
    """
    order = sorted(range(len(wanted)), key=lambda index: wanted[index])
    places: list[float] = []
    for index in order:
        places.append(max(wanted[index], places[-1] + gap) if places else max(low, wanted[index]))
    limit = high
    for number in reversed(range(len(places))):
        places[number] = min(places[number], limit)
        limit = places[number] - gap
    found = [0.0] * len(wanted)
    for number, index in enumerate(order):
        found[index] = places[number]
    return found
