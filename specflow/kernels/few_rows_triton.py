"""Matrix products of a few rows by Triton: the results of `few_rows.few_rows_linear`.

With a few rows a product costs what reading its weight costs, so the kernel is built around that one stream: a program
owns BLOCK_N rows of the weight, which lie in one piece in memory, and reads them once for all rows of the batch, with
several tiles in flight. A gate is applied in registers. There is no split along K: no atomics, and the same bits every
time. `few_rows_gluon` computes the same without a pause in that stream, on NVIDIA GPUs only.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from specflow.kernels.launch_overlap import early_start
from specflow.kernels.layer_ops_triton import silu
from specflow.kernels.paged_attention_triton import product
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.triton_choice import device_of

MOST_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class FewRowsShape:
    """How the kernel is launched; no result depends on it beyond rounding."""

    block_n: int = 16  # rows of the weight that a program owns; when gated, of gates and as many of the other half
    block_k: int = 256  # columns at a time
    warps: int = 2
    stages: int = 4  # tiles in flight
    next_early: bool = False  # the next kernel may start once all programs have, else once all have read their weights
    stream: bool = False  # by `few_rows_gluon`, which asks for its first tiles before the kernel in front has ended

    def fits(self, weight: torch.Tensor, gated: bool) -> bool:
        """Whether it can be launched with a weight [N or 2 N, K]."""
        if not self.stream:
            return True
        columns, depth = weight.shape[0] // (2 if gated else 1), weight.shape[1]
        even = columns % self.block_n == 0 and depth % self.block_k == 0
        return even and weight.element_size() == 2 and weight.data_ptr() % 16 == 0

    def product(self, values, weight, bias=None, *, gated=False):
        """See `few_rows.few_rows_linear`."""
        return few_rows_linear(values, weight, bias, gated=gated, shape=self)


@triton.jit
def read_tile(start, kept, EVEN: tl.constexpr):
    """A tile of a weight, which nobody reads again in this step."""
    if EVEN:
        return tl.load(start, eviction_policy="evict_first")
    return tl.load(start, mask=kept, other=0.0, eviction_policy="evict_first")


@triton.jit(do_not_specialize=["rows"])
def few_rows_kernel(
    values, weight, bias, output, rows, N,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr, EVEN: tl.constexpr, STAGES: tl.constexpr, NEXT_EARLY: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of N,). N: columns of the output; values [rows, K], weight [N or 2 N, K], output [rows, N]."""
    if NEXT_EARLY:
        let_next_start(OVERLAP)
    first = tl.program_id(0) * BLOCK_N
    row, column, place = tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    own = weight + first.to(tl.int64) * K
    other = weight + (N + first).to(tl.int64) * K
    wait_for_previous(OVERLAP)
    offsets = tl.arange(0, BLOCK_N)[:, None] * K + place[None, :]
    live = (row < rows)[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    gated = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        inside = (start + place < K)[None, :]
        kept = inside & (column < N)[:, None]
        some = tl.load(values + row[:, None] * K + start + place[None, :], mask=live & inside, other=0.0)
        total += product(read_tile(own + start + offsets, kept, EVEN), tl.trans(some))
        if GATED:
            gated += product(read_tile(other + start + offsets, kept, EVEN), tl.trans(some))
    if not NEXT_EARLY:
        # Programs that start while others still read may find room on few processors and crowd there.
        let_next_start(OVERLAP)
    kind = output.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column < N, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate = total.to(kind).to(tl.float32)
        total = silu(gate).to(kind).to(tl.float32) * gated.to(kind).to(tl.float32)
    out = output + row.to(tl.int64)[None, :] * N + column[:, None]
    tl.store(out, total.to(kind), mask=(column < N)[:, None] & (row < rows)[None, :])


def few_rows_linear(
    values: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    shape: FewRowsShape = FewRowsShape(),
) -> torch.Tensor:
    """See `few_rows.few_rows_linear`; at most `MOST_ROWS` rows, all tensors of one 16 or 32 bit dtype, no bias when
    gated."""
    values = values.contiguous()
    (rows, depth), columns = values.shape, weight.shape[0] // (2 if gated else 1)
    assert rows <= MOST_ROWS, "more rows than the kernel serves"
    assert weight.is_contiguous()
    if shape.stream:
        # Here, because not every installation that has Triton has what this needs.
        from specflow.kernels.few_rows_gluon import few_rows_stream

        return few_rows_stream(values, weight, bias, gated, shape)
    output = values.new_empty(rows, columns)
    block_k = min(shape.block_k, triton.next_power_of_2(depth))
    even = columns % shape.block_n == 0 and depth % block_k == 0
    early = early_start(values.device)
    with device_of(values):
        few_rows_kernel[(-(-columns // shape.block_n),)](
            values, weight, values if bias is None else bias, output, rows, columns,
            K=depth, BLOCK_M=max(8, triton.next_power_of_2(rows)), BLOCK_N=shape.block_n, BLOCK_K=block_k,
            HAS_BIAS=bias is not None, GATED=gated, EVEN=even, STAGES=shape.stages, NEXT_EARLY=shape.next_early,
            OVERLAP=bool(early), num_warps=shape.warps, **early,
        )  # fmt: skip
    return output
