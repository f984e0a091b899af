"""Compiling loops over host arrays with numba."""

from collections.abc import Callable
from typing import Any

import numba

# Sums may be reordered, which is what lets them use vector registers; NaN and infinity keep their meaning.
REORDERED_SUMS = {"reassoc", "contract", "arcp", "nsz"}


def compiled(function: Callable[..., Any], *, reorder_sums: bool = False) -> Callable[..., Any]:
    """Machine code for a function of arrays and numbers, kept on disk where some cache folder can be written."""
    options: dict[str, Any] = {"nogil": True, "fastmath": REORDERED_SUMS if reorder_sums else False}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package's folder nor the user's cache folder is writable
        return numba.njit(**options)(function)
