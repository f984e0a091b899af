"""Wording of error messages about names."""

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest", "valid_names"]


def nearest(word: str, names: Iterable[str], count: int = 3) -> list[str]:
    """The names most like `word`, best first; empty when none is close."""
    return difflib.get_close_matches(word.lower(), list(names), n=count, cutoff=0.5)


def did_you_mean(word: str, names: Iterable[str]) -> str:
    """The question `Did you mean a or b?` with a leading space, or nothing."""
    close = nearest(word, names)
    return f" Did you mean {' or '.join(close)}?" if close else ""


def valid_names(word: str, names: Iterable[str]) -> str:
    """All names, the nearest first, as one comma-separated list."""
    every = sorted(names)
    close = nearest(word, every)
    return ", ".join(close + [name for name in every if name not in close]) or "none"
