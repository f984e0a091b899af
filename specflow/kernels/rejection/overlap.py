"""Programmatic dependent launch: a kernel may start while the one before it drains, and waits for its results inside.

Off where the launch does not ask for it, on AMD and in the interpreter; the instructions exist from sm_90 on.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl


@triton.jit
def let_next_start(OVERLAP: tl.constexpr):
    """The next kernel's programs may take the places that this kernel's leave."""
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(OVERLAP: tl.constexpr):
    """What the kernel before this one wrote can be read from here on."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
