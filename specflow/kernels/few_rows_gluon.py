"""Products of a few rows as one unbroken stream of weights: `few_rows.few_rows_linear` on NVIDIA GPUs, in Gluon.

What such a product costs beyond its bytes is its start and its end, when nothing is read. No weight depends on the
kernel in front, so a program fills a ring of tiles in shared memory before it waits for that kernel; Triton's own
pipelining, which `few_rows_triton` leaves it to, begins after the wait. And it lets the next kernel start when it has
asked for its last tile: then the next weights arrive while this product, and the small kernels behind it, end.

A tile is read into registers at once, which frees its place for a later tile before the matrix instructions begin; a
sum for each half of the tile keeps these instructions from waiting for one another.
"""

# mypy: ignore-errors
# Bodies below are Gluon's language, which only looks like typed Python.

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from specflow.kernels.few_rows_triton import FewRowsShape
from specflow.kernels.launch_overlap import early_start
from specflow.kernels.layer_ops_triton import silu
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.triton_choice import device_of


@gluon.jit
def ask_for_tiles(ring, other_ring, slot, own, other, place, GATED: gl.constexpr):
    """The tiles of one step; place: of a tile's elements."""
    async_copy.async_copy_global_to_shared(ring.index(slot), own + place)
    if GATED:
        async_copy.async_copy_global_to_shared(other_ring.index(slot), other + place)


@gluon.jit
def ask_for_values(given, slot, values, place, live, ONE: gl.constexpr):
    """The values of one step. Rows that are not live keep what was there; nobody stores what comes of them."""
    if ONE:
        async_copy.async_copy_global_to_shared(given.index(slot), values + place)
    else:
        async_copy.async_copy_global_to_shared(given.index(slot), values + place, mask=live)


@gluon.jit
def read_values(
    some, begin: gl.constexpr, HALF: gl.constexpr, BLOCK_M: gl.constexpr, right: gl.constexpr, ONE: gl.constexpr
):
    """Half of a step's values as the right side of a product, [HALF, BLOCK_M]; a single row stands in every column."""
    if ONE:
        row = gl.expand_dims(some.slice(begin, HALF).load(gl.SliceLayout(1, right)), 1)
        rows, _ = gl.broadcast(row, gl.zeros([HALF, BLOCK_M], row.dtype, right))
        return rows
    else:
        return some.slice(begin, HALF, dim=1).permute([1, 0]).load(right)


@gluon.jit
def read_step(
    ring, other_ring, given, slot,
    BLOCK_M: gl.constexpr, HALF: gl.constexpr, left: gl.constexpr, right: gl.constexpr, GATED: gl.constexpr,
    ONE: gl.constexpr,
):  # fmt: skip
    """Halves of a step's values, of its tile, and of its other tile when gated."""
    x0 = read_values(given.index(slot), 0, HALF, BLOCK_M, right, ONE)
    x1 = read_values(given.index(slot), HALF, HALF, BLOCK_M, right, ONE)
    a0 = ring.index(slot).slice(0, HALF, dim=1).load(left)
    a1 = ring.index(slot).slice(HALF, HALF, dim=1).load(left)
    b0, b1 = a0, a1
    if GATED:
        b0 = other_ring.index(slot).slice(0, HALF, dim=1).load(left)
        b1 = other_ring.index(slot).slice(HALF, HALF, dim=1).load(left)
    return x0, x1, a0, a1, b0, b1


@gluon.jit
def add_step(step, s0, s1, g0, g1, GATED: gl.constexpr):
    """A step's products, added to the sums of both halves."""
    x0, x1, a0, a1, b0, b1 = step
    s0 = mma_v2(a0, x0, s0)
    s1 = mma_v2(a1, x1, s1)
    if GATED:
        g0 = mma_v2(b0, x0, g0)
        g1 = mma_v2(b1, x1, g1)
    return s0, s1, g0, g1


@gluon.jit
def store_sums(
    total, gated, bias, output, rows, N, first,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """Bias or gate, and out."""
    kind: gl.constexpr = output.dtype.element_ty
    column = first + gl.arange(0, BLOCK_N, gl.SliceLayout(1, mma))
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(0, mma))
    if HAS_BIAS:
        total += gl.load(bias + column).to(gl.float32)[:, None]
    if GATED:
        gate = total.to(kind).to(gl.float32)
        total = silu(gate).to(kind).to(gl.float32) * gated.to(kind).to(gl.float32)
    gl.store(output + row[None, :] * N + column[:, None], total.to(kind), mask=(row < rows)[None, :])


@gluon.jit(do_not_specialize=["rows"])
def few_rows_stream_kernel(
    values, weight, bias, output, rows, N,
    K: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, HAS_BIAS: gl.constexpr,
    GATED: gl.constexpr, STAGES: gl.constexpr, NEXT_EARLY: gl.constexpr, ONE: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid (N / BLOCK_N,). values [rows, K], weight [N or 2 N, K], output [rows, N]; ONE: there is one row."""
    if NEXT_EARLY:
        let_next_start(OVERLAP)
    WARPS: gl.constexpr = gl.num_warps()
    HALF: gl.constexpr = BLOCK_K // 2
    STEPS: gl.constexpr = K // BLOCK_K
    kind: gl.constexpr = weight.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[WARPS, 1], instr_shape=[16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    across: gl.constexpr = min(32, BLOCK_K // 8)  # threads along a row, 16 bytes each
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [32 // across, across], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    first = gl.program_id(0) * BLOCK_N
    own = weight + first.to(gl.int64) * K
    other = weight + (N + first).to(gl.int64) * K
    column = gl.arange(0, BLOCK_K, gl.SliceLayout(0, copied))[None, :]
    place = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied))[:, None] * K + column
    ring = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, BLOCK_K], shared)
    other_ring = ring
    if GATED:
        other_ring = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, BLOCK_K], shared)
    for early in gl.static_range(STAGES):
        ask_for_tiles(ring, other_ring, early, own + early * BLOCK_K, other + early * BLOCK_K, place, GATED)
        async_copy.commit_group()
    wait_for_previous(OVERLAP)
    row = gl.arange(0, BLOCK_M, gl.SliceLayout(1, copied))[:, None]
    live = (row < rows) & (column < K)
    if ONE:
        given = gl.allocate_shared_memory(kind, [STAGES, BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        values_place = gl.arange(0, BLOCK_K, gl.BlockedLayout([8], [32], [WARPS], [0]))
    else:
        given = gl.allocate_shared_memory(kind, [STAGES, BLOCK_M, BLOCK_K], shared)
        values_place = row * K + column
    for early in gl.static_range(STAGES):
        ask_for_values(given, early, values + early * BLOCK_K, values_place, live, ONE)
        async_copy.commit_group()
    s0 = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma)
    s1, g0, g1 = s0, s0, s0
    for start in range(STEPS - STAGES):
        slot = start % STAGES
        async_copy.wait_group(STAGES - 1)
        step = read_step(ring, other_ring, given, slot, BLOCK_M, HALF, left, right, GATED, ONE)
        ahead = (start + STAGES) * BLOCK_K
        ask_for_tiles(ring, other_ring, slot, own + ahead, other + ahead, place, GATED)
        ask_for_values(given, slot, values + ahead, values_place, live, ONE)
        async_copy.commit_group()
        s0, s1, g0, g1 = add_step(step, s0, s1, g0, g1, GATED)
    if not NEXT_EARLY:
        let_next_start(OVERLAP)
    for last in gl.static_range(STEPS - STAGES, STEPS):
        async_copy.wait_group(STEPS - 1 - last)
        end = read_step(ring, other_ring, given, last % STAGES, BLOCK_M, HALF, left, right, GATED, ONE)
        s0, s1, g0, g1 = add_step(end, s0, s1, g0, g1, GATED)
    store_sums(s0 + s1, g0 + g1, bias, output, rows, N, first, BLOCK_M, BLOCK_N, HAS_BIAS, GATED, mma)


def few_rows_stream(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, shape: FewRowsShape
) -> torch.Tensor:
    """See `few_rows_triton.few_rows_linear`, which calls this for shapes with `stream`; 16 bit dtypes, sizes that the
    shape's blocks divide, weights at an address of a multiple of 16 bytes. Weights are read before what is in front has
    ended: the launch just before must not write them."""
    (rows, depth), columns = values.shape, weight.shape[0] // (2 if gated else 1)
    assert shape.fits(weight, gated), "this weight cannot be streamed by launches of this shape"
    if values.data_ptr() % 16:
        values = values.clone()
    output = values.new_empty(rows, columns)
    early = early_start(values.device)
    with device_of(values):
        few_rows_stream_kernel[(columns // shape.block_n,)](
            values, weight, values if bias is None else bias, output, rows, columns,
            K=depth, BLOCK_M=max(8, triton.next_power_of_2(rows)), BLOCK_N=shape.block_n, BLOCK_K=shape.block_k,
            HAS_BIAS=bias is not None, GATED=gated, STAGES=min(shape.stages, depth // shape.block_k),
            NEXT_EARLY=shape.next_early, ONE=rows == 1, OVERLAP=bool(early), num_warps=shape.warps, **early,
        )  # fmt: skip
    return output
