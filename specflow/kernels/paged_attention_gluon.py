"""Attention over paged keys and values for tiles of 64 query rows on Hopper GPUs, in Gluon: what `attend_kernel` of
`paged_attention_triton` computes, for heads of 128 values in half precision without window, soft-cap and sinks.

Triton's own pipelining asks for the next keys and values when it is done with those at hand, since it first has to look
up their pages. Here pages are looked up two tiles ahead, so that keys and values are on their way while the matrix
instructions run. The first of them are asked for while the kernel before still makes the newest ones.
"""

# mypy: ignore-errors
# Bodies below are Gluon's language, which only looks like typed Python.

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous

STAGES = gl.constexpr(3)  # tiles of keys and values in their rings


@gluon.jit
def find_rows(start, length, tile, kv_head, SHARED: gl.constexpr, BLOCK_M: gl.constexpr, layout: gl.constexpr):
    """Token and head of each row of a tile, and whether it is one; heads of a token lie side by side."""
    row = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout)
    real = row < length * SHARED
    return start + gl.where(real, row // SHARED, 0), kv_head * SHARED + row % SHARED, real


@gluon.jit
def look_up(table, number, end, stride_s, PAGE: gl.constexpr, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Pages of a tile's keys, and where in its page each is. Beyond the last key it stands in, which nobody sees but as
    a finite number."""
    key = gl.minimum(number * BLOCK_N + gl.arange(0, BLOCK_N, layout), end - 1)
    return gl.load(table + key // PAGE, cache_modifier=".cg").to(gl.int32), key % PAGE * stride_s


@gluon.jit
def ask_for_tile(key_rows, value_rows, keys, values, slot, wanted, page, within, stride_b):
    """Rows of one KV head, [BLOCK_N, HEAD_SIZE], into their places of the rings; two groups, empty if not wanted."""
    place = page.to(gl.int64) * stride_b + within
    if wanted:
        async_copy.async_copy_global_to_shared(keys.index(slot), key_rows + place[:, None])
    async_copy.commit_group()
    if wanted:
        async_copy.async_copy_global_to_shared(values.index(slot), value_rows + place[:, None])
    async_copy.commit_group()


@gluon.jit
def weigh_keys(scores, number, end, place, peak, total, CAUSAL: gl.constexpr, BLOCK_N: gl.constexpr):
    """Weights of a tile's keys by their scores in base 2, what the sums so far fade by, and the new peak and total."""
    key = number * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores.type.layout))
    seen = (key < end)[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= place[:, None])
    scores = gl.where(seen, scores, float("-inf"))
    higher = gl.maximum(peak, gl.max(scores, 1))
    base = gl.where(higher == float("-inf"), 0.0, higher)  # rows that see nothing yet
    weights, fade = gl.exp2(scores - base[:, None]), gl.exp2(peak - base)
    return weights, fade, higher, total * fade + gl.sum(weights, 1)


@gluon.jit
def read_split(
    rows, key_rows, value_rows, table, stride_b, stride_s, begin, stop, end, oldest, place, scale, peak, total, mixed,
    CAUSAL: gl.constexpr, PAGE: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, SIZE: gl.constexpr,
    copied: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Peak, total and weighted sum over the tiles begin to stop of the keys; rows [BLOCK_M, SIZE] point to queries,
    key_rows and value_rows [1, SIZE] to the first position of their KV head. Keys before `oldest` were there before
    this step."""
    summed: gl.constexpr = mixed.type.layout
    scored: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    by_copy: gl.constexpr = gl.SliceLayout(1, copied)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    kind: gl.constexpr = rows.dtype.element_ty
    queries = gl.allocate_shared_memory(kind, [BLOCK_M, SIZE], swizzled)
    keys = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, SIZE], swizzled)
    values = gl.allocate_shared_memory(kind, [STAGES, BLOCK_N, SIZE], swizzled)
    for early in gl.static_range(STAGES - 1):
        page, within = look_up(table, begin + early, end, stride_s, PAGE, BLOCK_N, by_copy)
        known = (begin + early < stop) & ((begin + early + 1) * BLOCK_N <= oldest)
        ask_for_tile(key_rows, value_rows, keys, values, early, known, page, within, stride_b)
    wait_for_previous(OVERLAP)
    async_copy.async_copy_global_to_shared(queries, rows)  # in the group of the first keys
    for early in gl.static_range(STAGES - 1):
        page, within = look_up(table, begin + early, end, stride_s, PAGE, BLOCK_N, by_copy)
        new = (begin + early < stop) & ((begin + early + 1) * BLOCK_N > oldest)
        ask_for_tile(key_rows, value_rows, keys, values, early, new, page, within, stride_b)
    page, within = look_up(table, begin + STAGES - 1, end, stride_s, PAGE, BLOCK_N, by_copy)
    for number in range(begin, stop):
        slot, free = (number - begin) % STAGES, (number - begin + STAGES - 1) % STAGES
        async_copy.wait_group(2 * STAGES - 3)
        fence_async_shared()
        gl.thread_barrier()  # keys are here, and nobody reads the tile before any more
        wanted = number + STAGES - 1 < stop
        ask_for_tile(key_rows, value_rows, keys, values, free, wanted, page, within, stride_b)
        page, within = look_up(table, number + STAGES, end, stride_s, PAGE, BLOCK_N, by_copy)
        scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scored)
        scores = warpgroup_mma(queries, keys.index(slot).permute([1, 0]), scores, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores]) * (scale * 1.4426950408889634)
        weights, fade, peak, total = weigh_keys(scores, number, end, place, peak, total, CAUSAL, BLOCK_N)
        mixed = mixed * gl.convert_layout(fade, gl.SliceLayout(1, summed))[:, None]
        weights = gl.convert_layout(weights.to(kind), gl.DotOperandLayout(0, summed, 2))
        async_copy.wait_group(2 * STAGES - 2)
        fence_async_shared()
        gl.thread_barrier()
        mixed = warpgroup_mma(weights, values.index(slot), mixed, is_async=True)
        mixed = warpgroup_mma_wait(0, deps=[mixed])
    async_copy.wait_group(0)
    return peak, total, mixed


@gluon.jit
def store_rows(
    output, partial, log_sums, peak, total, mixed, token, head, real, busy, split, splits,
    HEADS: gl.constexpr, DV: gl.constexpr, JOINED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Divide by the denominator and store: the result, or a part of it with the logarithm of its denominator."""
    row = token.to(gl.int64) * HEADS + head
    column = gl.arange(0, DV, gl.SliceLayout(0, layout))
    mixed = mixed / gl.where(total > 0, total, 1.0)[:, None]
    if JOINED:
        gl.store(output + row[:, None] * DV + column[None, :], mixed.to(output.dtype.element_ty), mask=real[:, None])
    else:
        place = row * splits + split
        gl.store(log_sums + place, peak + gl.log2(gl.where(total > 0, total, 1.0)), mask=real)  # -inf: saw nothing
        gl.store(partial + place[:, None] * DV + column[None, :], mixed, mask=(real & busy)[:, None])


@gluon.jit(
    do_not_specialize=["first_request", "first_token", "query_len", "window"],
    do_not_specialize_on_alignment=["positions", "block_table", "seq_len", "query_start", "log_sums", "sinks"],
)
def attend_tiles_kernel(
    query, key_pages, value_pages, output, partial, log_sums, sinks, positions, block_table, seq_len, query_start,
    query_stride_t, query_stride_h, key_stride_b, key_stride_s, key_stride_h, value_stride_b, value_stride_s,
    value_stride_h, table_stride, first_request, first_token, query_len, page_size: gl.constexpr, window, scale,
    softcap,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DK: gl.constexpr, DKP: gl.constexpr, DV: gl.constexpr,
    DVP: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr, RAGGED: gl.constexpr,
    HAS_WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, HAS_SINKS: gl.constexpr, JOINED: gl.constexpr,
    LEAST_KEYS: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Grid, arguments and results of `attend_kernel`; keys and values have the same strides. LEAST_KEYS: of a split."""
    let_next_start(OVERLAP)
    SHARED: gl.constexpr = HEADS // KV_HEADS
    scored: gl.constexpr = gl.SliceLayout(1, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))
    summed: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DV, 16])
    copied: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    tiles, split, splits = gl.num_programs(0) // KV_HEADS, gl.program_id(1), gl.num_programs(1)
    kv_head, tile, request = gl.program_id(0) // tiles, gl.program_id(0) % tiles, first_request + gl.program_id(2)
    if RAGGED:
        start = gl.load(query_start + request, cache_modifier=".cg").to(gl.int32)
        length = gl.load(query_start + request + 1, cache_modifier=".cg").to(gl.int32) - start
    else:
        start, length = first_token + (request - first_request) * query_len, query_len
    token, head, real = find_rows(start, length, tile, kv_head, SHARED, BLOCK_M, scored)
    place = gl.load(positions + token, mask=real, other=0, cache_modifier=".cg").to(gl.int32)
    newest = gl.max(gl.where(real, place, -1), 0)
    end = newest + 1
    if not CAUSAL:
        end = gl.where(newest < 0, 0, gl.load(seq_len + request, cache_modifier=".cg").to(gl.int32))
    # The tile must hold all rows of the request to know where its new keys begin.
    oldest = gl.where(length * SHARED <= BLOCK_M, gl.min(gl.where(real, place, end), 0), 0)
    blocks = (end + BLOCK_N - 1) // BLOCK_N
    # A captured launch has as many splits as the longest sequence needs; a short one uses fewer of them.
    share = gl.maximum((blocks + splits - 1) // splits, LEAST_KEYS // BLOCK_N)
    begin = split * share
    stop = gl.minimum(begin + share, blocks)
    peak = gl.full([BLOCK_M], float("-inf"), gl.float32, scored)
    total = gl.zeros([BLOCK_M], gl.float32, scored)
    mixed = gl.zeros([BLOCK_M, DV], gl.float32, summed)
    if begin < stop:
        asked, whose, _ = find_rows(start, length, tile, kv_head, SHARED, BLOCK_M, gl.SliceLayout(1, copied))
        column = gl.arange(0, DK, gl.SliceLayout(0, copied))[None, :]
        peak, total, mixed = read_split(
            query + (asked.to(gl.int64) * query_stride_t + whose * query_stride_h)[:, None] + column,
            key_pages + (kv_head * key_stride_h + column), value_pages + (kv_head * key_stride_h + column),
            block_table + request.to(gl.int64) * table_stride, key_stride_b, key_stride_s, begin, stop, end, oldest,
            place, scale, peak, total, mixed, CAUSAL, page_size, BLOCK_M, BLOCK_N, DK, copied, OVERLAP,
        )  # fmt: skip
    wait_for_previous(OVERLAP)  # who has nothing to read must not write before, either
    by_sum: gl.constexpr = gl.SliceLayout(1, summed)
    token, head, real = find_rows(start, length, tile, kv_head, SHARED, BLOCK_M, by_sum)
    store_rows(
        output, partial, log_sums, gl.convert_layout(peak, by_sum), gl.convert_layout(total, by_sum), mixed, token,
        head, real, begin < stop, split, splits, HEADS, DV, JOINED, summed,
    )  # fmt: skip
