"""From a nested configuration to the flat, short, plainly named values that tracking stores accept."""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

__all__ = ["CUT_MARK", "chunks", "cut", "finite", "flatten", "safe_name"]

T = TypeVar("T")

CUT_MARK = "…[cut]"
_MAX_NAME = 250  # characters of a name in MLflow's stores
_UNSAFE = re.compile(r"[^\w\-. /:]")


def flatten(values: Mapping[str, Any], most: int = 500) -> dict[str, str]:
    """`group.option` -> text for every leaf; lists are JSON; a text longer than `most` is cut with a visible mark."""
    return {safe_name(name): cut(text, most) for name, text in _leaves(values, "")}


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def cut(text: str, most: int) -> str:
    """The text, or its beginning with a mark when it is longer than `most` characters."""
    return text if len(text) <= most else text[: most - len(CUT_MARK)] + CUT_MARK


def safe_name(name: str) -> str:
    """The name with characters that stores refuse replaced, and not too long."""
    return cut(_UNSAFE.sub("_", name).strip("/") or "_", _MAX_NAME).replace(CUT_MARK, "_cut")


def finite(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Only the values that are finite numbers: a quantity that does not exist is left out instead of logged as NaN."""
    return {
        safe_name(name): float(value)
        for name, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def chunks(items: Sequence[T], size: int) -> Iterator[Sequence[T]]:
    """Consecutive pieces of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
