"""Rejection sampling on a GPU: block statistics, rejection, Gumbel resample, insert.

Nothing of size [N, V] is written and nothing is read twice but the rows that a token is drawn from. Every kernel
stands in its own file; `reference` holds the same four stages in plain torch. Triton is imported by the kernel files
alone, so that this package can be imported without it.
"""

from importlib.util import find_spec


def triton_available() -> bool:
    """True when triton can be imported; says nothing about a device."""
    return find_spec("triton") is not None
