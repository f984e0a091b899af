"""Products of some dozens to some hundreds of rows on NVIDIA GPUs of compute capability 9.0, in Gluon.

One warp of a program does nothing but ask the copy engine for tiles, into a ring in shared memory; one or two groups of
four warps multiply what has arrived, each for its own rows of the values. What the ring holds first are weights, which
no kernel writes: they are asked for before the kernel in front has ended, and the next kernel may start when the last
tile has been asked for. So the pauses between products, in which no memory is read and nothing is multiplied, become
short. A gate is applied in registers, which saves a kernel and its traffic.

Programs are as many as run at the same time; each does one unit of work after the other, and the ring runs on. A unit
is a tile of the result, or a part of a tile's depth (`split`), where tiles alone would leave multiprocessors idle.
"""

# mypy: ignore-errors
# Bodies below are Gluon's language, which only looks like typed Python.

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from specflow.kernels.launch_overlap import early_start
from specflow.kernels.layer_ops_triton import silu
from specflow.kernels.many_rows import GROUP_ROWS, ManyRowsShape
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.triton_choice import device_of, device_sizes


@gluon.jit
def place_of(unit, tiles_m, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr, SPLIT: gl.constexpr, DEPTH: gl.constexpr):
    """First row and column of the result, and the first column of the weight, of a unit of work. Neighbours share
    weights: tiles with the same columns follow one another, and so do the parts of a tile."""
    tile = unit // SPLIT
    return tile % tiles_m * BLOCK_M, tile // tiles_m * WIDTH, unit % SPLIT * DEPTH


@gluon.jit
def ask_for_weights(
    weight, ring, slot, bar, first, N, column, PANEL: gl.constexpr, PANELS: gl.constexpr, GATED: gl.constexpr
):  # fmt: skip
    """The panels of a tile; when gated, gates above and what they are applied to below in each."""
    HALF: gl.constexpr = PANEL // 2
    for panel in gl.static_range(PANELS):
        place = ring.index(slot * PANELS + panel)
        if GATED:
            top = first + panel * HALF
            tma.async_copy_global_to_shared(weight, [top, column], bar, place.slice(0, HALF))
            tma.async_copy_global_to_shared(weight, [N + top, column], bar, place.slice(HALF, HALF))
        else:
            tma.async_copy_global_to_shared(weight, [first + panel * PANEL, column], bar, place)


@gluon.jit
def ask_for_tiles(
    values, weight, given, ring, full, empty, N, tiles_m, units,
    STEPS: gl.constexpr, STAGES: gl.constexpr, BLOCK_M: gl.constexpr, LOADED: gl.constexpr, PANEL: gl.constexpr,
    PANELS: gl.constexpr, BLOCK_K: gl.constexpr, SPLIT: gl.constexpr, GATED: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """The warp that asks: a first ring of weights, whatever runs in front, then everything in its turn."""
    BYTES: gl.constexpr = (LOADED + PANEL * PANELS) * BLOCK_K * 2
    WIDTH: gl.constexpr = (PANEL // 2 if GATED else PANEL) * PANELS
    DEPTH: gl.constexpr = STEPS * BLOCK_K
    row, first, column = place_of(gl.program_id(0), tiles_m, BLOCK_M, WIDTH, SPLIT, DEPTH)
    for early in gl.static_range(STAGES):
        mbarrier.expect(full.index(early), BYTES)
        at = column + early * BLOCK_K
        ask_for_weights(weight, ring, early, full.index(early), first, N, at, PANEL, PANELS, GATED)
    wait_for_previous(OVERLAP)
    for early in gl.static_range(STAGES):
        place = given.index(early).slice(0, LOADED)
        tma.async_copy_global_to_shared(values, [row, column + early * BLOCK_K], full.index(early), place)
    count = STAGES
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, first, column = place_of(unit, tiles_m, BLOCK_M, WIDTH, SPLIT, DEPTH)
        for step in range(gl.where(unit == gl.program_id(0), STAGES, 0), STEPS):
            slot, at = count % STAGES, column + step * BLOCK_K
            mbarrier.wait(empty.index(slot), (count // STAGES - 1) & 1)
            mbarrier.expect(full.index(slot), BYTES)
            ask_for_weights(weight, ring, slot, full.index(slot), first, N, at, PANEL, PANELS, GATED)
            place = given.index(slot).slice(0, LOADED)
            tma.async_copy_global_to_shared(values, [row, at], full.index(slot), place)
            count += 1
    let_next_start(OVERLAP)


@gluon.jit
def add_step(some, ring, slot, s0, s1, s2, PANELS: gl.constexpr):
    """A step's products, added to the sums of each panel; those of the step before have been added when it returns."""
    s0 = warpgroup_mma(some, ring.index(slot * PANELS).permute([1, 0]), s0, is_async=True)
    if PANELS == 3:
        s1 = warpgroup_mma(some, ring.index(slot * PANELS + 1).permute([1, 0]), s1, is_async=True)
        s2 = warpgroup_mma(some, ring.index(slot * PANELS + 2).permute([1, 0]), s2, is_async=True)
        s0, s1, s2 = warpgroup_mma_wait(3, deps=[s0, s1, s2])
    else:
        s0 = warpgroup_mma_wait(1, deps=[s0])
    return s0, s1, s2


@gluon.jit
def multiply(
    given, ring, full, empty, bias, output, parts, tickets, rows, N, tiles_m, units,
    STEPS: gl.constexpr, STAGES: gl.constexpr, ROWS: gl.constexpr, GROUP: gl.constexpr, GROUPS: gl.constexpr,
    PANEL: gl.constexpr, PANELS: gl.constexpr, SPLIT: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Four warps that multiply: rows GROUP * ROWS and following of every tile."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PANEL, 16])
    WIDTH: gl.constexpr = PANEL // 2 if GATED else PANEL
    count = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        s0 = gl.zeros([ROWS, PANEL], gl.float32, mma)
        s1, s2 = s0, s0
        for step in range(STEPS):
            slot = count % STAGES
            mbarrier.wait(full.index(slot), (count // STAGES) & 1)
            some = given.index(slot).slice(GROUP * ROWS, ROWS)
            s0, s1, s2 = add_step(some, ring, slot, s0, s1, s2, PANELS)
            mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES), pred=step > 0)
            count += 1
        if PANELS == 3:
            s0, s1, s2 = warpgroup_mma_wait(0, deps=[s0, s1, s2])
        else:
            s0 = warpgroup_mma_wait(0, deps=[s0])
        mbarrier.arrive(empty.index((count + STAGES - 1) % STAGES))
        row, first, _ = place_of(unit, tiles_m, ROWS * GROUPS, WIDTH * PANELS, SPLIT, 1)
        row += GROUP * ROWS
        last = True
        own = (unit * GROUPS + GROUP) * PANELS
        tile = (unit // SPLIT * SPLIT * GROUPS + GROUP) * PANELS
        if SPLIT > 1:
            keep_sums(s0, parts, own, ROWS, PANEL)
            if PANELS == 3:
                keep_sums(s1, parts, own + 1, ROWS, PANEL)
                keep_sums(s2, parts, own + 2, ROWS, PANEL)
            last = take_ticket(tickets + unit // SPLIT * GROUPS + GROUP, SPLIT)
        if last:
            for panel in gl.static_range(PANELS):
                sums = s0 if panel == 0 else (s1 if panel == 1 else s2)
                if SPLIT > 1:
                    sums = add_parts(parts, tile + panel, GROUPS * PANELS, ROWS, PANEL, SPLIT, mma)
                store_tile(sums, bias, output, rows, N, row, first + panel * WIDTH, ROWS, WIDTH, HAS_BIAS, GATED)


@gluon.jit
def place_in_part(ROWS: gl.constexpr, PANEL: gl.constexpr, layout: gl.constexpr):
    """Of the sums of four warps in the memory for parts."""
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    return row * PANEL + gl.arange(0, PANEL, gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def keep_sums(sums, parts, own, ROWS: gl.constexpr, PANEL: gl.constexpr):
    """Write the sums of a panel where the last part of its tile finds them."""
    layout: gl.constexpr = sums.type.layout
    gl.store(parts + own.to(gl.int64) * (ROWS * PANEL) + place_in_part(ROWS, PANEL, layout), sums)


@gluon.jit
def take_ticket(ticket, SPLIT: gl.constexpr):
    """Whether all other parts of the tile have been written. The ticket is 0 again behind the last."""
    gl.thread_barrier()
    before = gl.atomic_add(ticket, 1, sem="acq_rel", scope="gpu")
    if before == SPLIT - 1:
        gl.store(ticket, 0)
    return before == SPLIT - 1


@gluon.jit
def add_parts(
    parts, first, STRIDE: gl.constexpr, ROWS: gl.constexpr, PANEL: gl.constexpr, SPLIT: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """All parts of a panel, in their order: the same bits whoever adds them."""
    place = place_in_part(ROWS, PANEL, layout)
    start = parts + first.to(gl.int64) * (ROWS * PANEL)
    total = gl.load(start + place)
    for part in gl.static_range(1, SPLIT):
        total += gl.load(start + part * (STRIDE * ROWS * PANEL) + place)
    return total


@gluon.jit
def store_tile(
    sums, bias, output, rows, N, top, first,
    ROWS: gl.constexpr, WIDTH: gl.constexpr, HAS_BIAS: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """Bias or gate, and out."""
    kind: gl.constexpr = output.dtype.element_ty
    if GATED:
        gate, other = sums.reshape([ROWS, 2, WIDTH]).permute([0, 2, 1]).split()
        gate = gate.to(kind).to(gl.float32)
        total = silu(gate).to(kind).to(gl.float32) * other.to(kind).to(gl.float32)
    else:
        total = sums
    layout: gl.constexpr = total.type.layout
    column = first + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    row = top + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    if HAS_BIAS:
        total += gl.load(bias + column, mask=column < N, other=0.0).to(gl.float32)[None, :]
    place = row.to(gl.int64)[:, None] * N + column[None, :]
    gl.store(output + place, total.to(kind), mask=(row < rows)[:, None] & (column < N)[None, :])


@gluon.jit(do_not_specialize=["rows", "tiles_m", "units"])
def many_rows_kernel(
    values, weight, bias, output, parts, tickets, rows, N, tiles_m, units,
    K: gl.constexpr, ROWS: gl.constexpr, GROUPS: gl.constexpr, LOADED: gl.constexpr, PANEL: gl.constexpr,
    PANELS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr,
    HAS_BIAS: gl.constexpr, GATED: gl.constexpr, WORK: gl.constexpr, ASK: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """values [rows, K], weight [N or 2 N, K], output [rows, N]; parts [units, GROUPS, PANELS, ROWS, PANEL] float32,
    tickets [units / SPLIT, GROUPS] zeros. LOADED: rows of a tile that can be any of values; WORK and ASK: registers of
    warps that multiply and of the one that asks."""
    BLOCK_M: gl.constexpr = ROWS * GROUPS
    STEPS: gl.constexpr = K // BLOCK_K // SPLIT
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ring = gl.allocate_shared_memory(values.dtype, [STAGES * PANELS, PANEL, BLOCK_K], swizzled)
    given = gl.allocate_shared_memory(values.dtype, [STAGES, BLOCK_M, BLOCK_K], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=GROUPS)
    # Tuples stand where they are used: under a name their constants would become values.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (multiply, (given, ring, full, empty, bias, output, parts, tickets, rows, N, tiles_m, units, STEPS,
                            STAGES, ROWS, 0, GROUPS, PANEL, PANELS, SPLIT, HAS_BIAS, GATED)),
                (multiply, (given, ring, full, empty, bias, output, parts, tickets, rows, N, tiles_m, units, STEPS,
                            STAGES, ROWS, 1, GROUPS, PANEL, PANELS, SPLIT, HAS_BIAS, GATED)),
                (ask_for_tiles, (values, weight, given, ring, full, empty, N, tiles_m, units, STEPS, STAGES, BLOCK_M,
                                 LOADED, PANEL, PANELS, BLOCK_K, SPLIT, GATED, OVERLAP)),
            ],
            [4, 1],
            [WORK, ASK],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (given, ring, full, empty, bias, output, parts, tickets, rows, N, tiles_m, units, STEPS,
                            STAGES, ROWS, 0, GROUPS, PANEL, PANELS, SPLIT, HAS_BIAS, GATED)),
                (ask_for_tiles, (values, weight, given, ring, full, empty, N, tiles_m, units, STEPS, STAGES, BLOCK_M,
                                 LOADED, PANEL, PANELS, BLOCK_K, SPLIT, GATED, OVERLAP)),
            ],
            [1],
            [ASK],
        )  # fmt: skip


def many_rows_linear(
    values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, gated: bool, shape: ManyRowsShape
) -> torch.Tensor:
    """See `few_rows.few_rows_linear`, for any number of rows and weights that the shape `fits`.

    Weights are read before what is in front has ended: the launch just before must not write them. With `split` above
    1, launches on a device must follow one another.
    """
    values = values.contiguous()
    (rows, depth), columns = values.shape, weight.shape[0] // (2 if gated else 1)
    assert shape.fits(weight, gated), "this weight cannot be read by launches of this shape"
    if values.data_ptr() % 16:
        values = values.clone()
    output = values.new_empty(rows, columns)
    tiles_m = triton.cdiv(rows, shape.block_m)
    units = tiles_m * triton.cdiv(columns, shape.block_n // (2 if gated else 1)) * shape.split
    parts = tickets = output
    if shape.split > 1:
        parts = torch.empty(units * shape.block_m * shape.block_n, dtype=torch.float32, device=values.device)
        tickets = _tickets(values.device)
        assert units // shape.split * shape.groups <= len(tickets), "too many tiles to be split"
    layout = gl.NVMMASharedLayout(128, 16, 2)
    # Rows that nobody has take the copy engine's time, too; its tiles are of eight rows at least.
    loaded = max(8, min(shape.block_m, triton.next_power_of_2(rows)))
    early = early_start(values.device)
    most, work, ask = REGISTERS[shape.groups]
    with device_of(values):
        many_rows_kernel[(min(units, device_sizes(values.device)[0]),)](
            TensorDescriptor.from_tensor(values, [loaded, shape.block_k], layout),
            TensorDescriptor.from_tensor(weight, [shape.panel // (2 if gated else 1), shape.block_k], layout),
            values if bias is None else bias, output, parts, tickets, rows, columns, tiles_m, units,
            K=depth, ROWS=GROUP_ROWS, GROUPS=shape.groups, LOADED=loaded, PANEL=shape.panel, PANELS=shape.panels,
            BLOCK_K=shape.block_k, STAGES=shape.stages, SPLIT=shape.split, HAS_BIAS=bias is not None, GATED=gated,
            WORK=work, ASK=ask, OVERLAP=bool(early), num_warps=4, maxnreg=most, **early,
        )  # fmt: skip
    return output


# By groups: most registers of a thread when the kernel starts, then those of warps that multiply and of the one that
# asks.
REGISTERS = {1: (232, 240, 40), 2: (168, 232, 40)}


@functools.cache
def _tickets(device: torch.device) -> torch.Tensor:
    """Zeros, which every launch leaves as zeros."""
    return torch.zeros(4096, dtype=torch.int32, device=device)
