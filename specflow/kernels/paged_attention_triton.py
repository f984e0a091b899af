"""Attention over paged keys and values by Triton kernels: the results of `paged_attention.paged_attention`.

One program serves one KV head of one request and all query rows that share it: the tokens of a block times the query
heads of the group, so that keys and values are read once however long the block is. The sequence is cut into splits,
one program each, and a second kernel joins them by their log-sum-exps (Dao et al. 2023, Flash-Decoding). Where a
sequence begins and ends is read on the device, so that a call captured in a graph stays right as texts grow: splits
without work leave at once.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.kernels import paged_attention as reference
from specflow.kernels.launch_overlap import early_start
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.streamed_attention import can_stream
from specflow.kernels.triton_choice import device_of, device_sizes

# Requests with more query tokens take the reference's path, which hands whole prompts to torch.
MOST_QUERY = 32
MOST_SPLITS = 64
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
# Keys that a split should have at least: fewer cost more in joining than they gain.
_LEAST_KEYS = 128
LEAST_KEYS = tl.constexpr(_LEAST_KEYS)
# Tiles of keys and values in flight. A third one read long texts no faster, and took the room in which the next product
# asks for its weights meanwhile.
_STAGES = 2


@triton.jit
def tanh(values):
    """By base 2, which every backend and the interpreter have; absolute error near 1e-7."""
    return 1.0 - 2.0 / (tl.exp2(values * 2.8853900817779268) + 1.0)


@triton.jit
def bound(number):
    """The same number as a loop's bound. Triton 3.6 interprets scalars as arrays of one element, which numpy 2.4 no
    longer takes for integers."""
    if INTERPRETED:
        return int(number.handle.data[0])
    return number


@triton.jit
def product(left, right):
    """Matrix product with a float32 sum. The interpreter would multiply the bits of bfloat16."""
    if INTERPRETED:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision="ieee")


@triton.jit
def find_rows(
    positions, query_start, request, tile, kv_head, first_request, first_token, query_len,
    SHARED: tl.constexpr, BLOCK_M: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Token, head and position of each row of a tile, and whether it is one; heads of a token lie side by side."""
    if RAGGED:
        start = tl.load(query_start + request, cache_modifier=".cg").to(tl.int32)
        length = tl.load(query_start + request + 1, cache_modifier=".cg").to(tl.int32) - start
    else:
        start, length = first_token + (request - first_request) * query_len, query_len
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    real = row < length * SHARED
    token = start + row // SHARED
    place = tl.load(positions + token, mask=real, other=0, cache_modifier=".cg").to(tl.int32)
    return token, kv_head * SHARED + row % SHARED, place, real


@triton.jit
def see_keys(place, real, seq_len, request, window, CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr):
    """First key that any row of the tile sees, and the end of those; 0 and 0 for a tile without rows."""
    newest = tl.max(tl.where(real, place, -1))
    oldest = tl.min(tl.where(real, place, 2147483647))
    first, end = 0, newest + 1
    if not CAUSAL:
        end = tl.load(seq_len + request, cache_modifier=".cg").to(tl.int32)
    if HAS_WINDOW:
        first = tl.maximum(oldest - window + 1, 0)
        if not CAUSAL:
            end = tl.minimum(end, newest + window)
    return tl.where(newest < 0, 0, first), tl.where(newest < 0, 0, end)


@triton.jit
def load_rows(rows, there, D: tl.constexpr, DP: tl.constexpr):
    """Keys or values that begin at rows [BLOCK_N], [BLOCK_N, DP]; zeros where none is, whatever the page holds."""
    column = tl.arange(0, DP)
    mask = there[:, None] & (column < D)[None, :]
    return tl.load(rows[:, None] + column[None, :], mask=mask, other=0.0)


@triton.jit
def score_keys(
    queries, keys, key, place, end, window, scale, softcap,
    CAUSAL: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Scores in base 2, [BLOCK_M, BLOCK_N]; -inf for keys that a row does not see."""
    scores = product(queries, tl.trans(keys)) * scale
    if HAS_SOFTCAP:
        scores = softcap * tanh(scores / softcap)
    seen = (key < end)[None, :]
    if CAUSAL:
        seen = seen & (key[None, :] <= place[:, None])
    if HAS_WINDOW:
        seen = seen & (key[None, :] > place[:, None] - window)
        if not CAUSAL:
            seen = seen & (key[None, :] < place[:, None] + window)
    return tl.where(seen, scores * 1.4426950408889634, float("-inf"))


@triton.jit
def store_rows(
    output, partial, log_sums, sinks, peak, total, mixed, row, head, split, splits, real, busy,
    DV: tl.constexpr, DVP: tl.constexpr, HAS_SINKS: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """Divide by the denominator and store: the result, or a part of it with the logarithm of its denominator."""
    column = tl.arange(0, DVP)
    if JOINED:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * 1.4426950408889634
            base = tl.maximum(peak, sink)
            fade = tl.exp2(peak - base)
            total = total * fade + tl.exp2(sink - base)
            mixed = mixed * fade[:, None]
        mixed = mixed / tl.where(total > 0, total, 1.0)[:, None]
        out = output + row[:, None] * DV + column[None, :]
        tl.store(out, mixed.to(output.dtype.element_ty), mask=real[:, None] & (column < DV)[None, :])
    else:
        place = row * splits + split
        total = tl.where(total > 0, total, 1.0)
        tl.store(log_sums + place, peak + tl.log2(total), mask=real)  # -inf where a row saw nothing
        mixed = mixed / total[:, None]
        out = partial + place[:, None] * DV + column[None, :]
        tl.store(out, mixed, mask=busy[:, None] & (column < DV)[None, :])


@triton.jit(
    do_not_specialize=["first_request", "first_token", "query_len", "page_size", "window"],
    do_not_specialize_on_alignment=[
        "positions", "block_table", "seq_len", "query_start", "log_sums", "sinks",
    ],
)  # fmt: skip
def attend_kernel(
    query, key_pages, value_pages, output, partial, log_sums, sinks, positions, block_table, seq_len, query_start,
    query_stride_t, query_stride_h, key_stride_b, key_stride_s, key_stride_h, value_stride_b, value_stride_s,
    value_stride_h, table_stride, first_request, first_token, query_len, page_size, window, scale, softcap,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, DV: tl.constexpr,
    DVP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, RAGGED: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, JOINED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (tiles * KV_HEADS, splits, requests).

    JOINED: there is one split, so output [T, HEADS, DV] is written at once; else partial [T, HEADS, splits, DV] and
    log_sums [T, HEADS, splits], base 2, both float32.
    """
    let_next_start(OVERLAP)
    tiles, split, splits = tl.num_programs(0) // KV_HEADS, tl.program_id(1), tl.num_programs(1)
    kv_head, tile, request = tl.program_id(0) // tiles, tl.program_id(0) % tiles, first_request + tl.program_id(2)
    token, head, place, real = find_rows(
        positions, query_start, request, tile, kv_head, first_request, first_token, query_len,
        HEADS // KV_HEADS, BLOCK_M, RAGGED,
    )  # fmt: skip
    first, end = see_keys(place, real, seq_len, request, window, CAUSAL, HAS_WINDOW)
    before, blocks = first // BLOCK_N, (end + BLOCK_N - 1) // BLOCK_N
    # A captured launch has as many splits as the longest sequence needs; a short one uses fewer of them.
    share = tl.maximum((blocks - before + splits - 1) // splits, LEAST_KEYS // BLOCK_N)
    begin = before + split * share
    stop = tl.minimum(begin + share, blocks)
    busy = real & (begin < stop)
    column = tl.arange(0, DKP)
    # All that is read above was there before the kernel that writes pages let this one start.
    wait_for_previous(OVERLAP)
    rows = query + token.to(tl.int64)[:, None] * query_stride_t + head[:, None] * query_stride_h + column[None, :]
    queries = tl.load(rows, mask=busy[:, None] & (column < DK)[None, :], other=0.0)
    peak = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    mixed = tl.zeros((BLOCK_M, DVP), tl.float32)
    table = block_table + request.to(tl.int64) * table_stride
    for number in range(bound(begin), bound(stop)):
        key = number * BLOCK_N + tl.arange(0, BLOCK_N)
        block = tl.load(table + key // page_size, mask=key < end, other=0).to(tl.int64)
        k_rows = key_pages + (block * key_stride_b + key % page_size * key_stride_s + kv_head * key_stride_h)
        v_rows = value_pages + (block * value_stride_b + key % page_size * value_stride_s + kv_head * value_stride_h)
        scores = score_keys(
            queries, load_rows(k_rows, key < end, DK, DKP), key, place, end, window, scale, softcap,
            CAUSAL, HAS_WINDOW, HAS_SOFTCAP,
        )  # fmt: skip
        higher = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # rows that see nothing yet
        weights, fade = tl.exp2(scores - base[:, None]), tl.exp2(peak - base)
        values = load_rows(v_rows, key < end, DV, DVP)
        mixed = mixed * fade[:, None] + product(weights.to(values.dtype), values)
        total, peak = total * fade + tl.sum(weights, 1), higher
    store_rows(
        output, partial, log_sums, sinks, peak, total, mixed, token.to(tl.int64) * HEADS + head, head, split, splits,
        real, busy, DV, DVP, HAS_SINKS, JOINED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["first_token", "splits"], do_not_specialize_on_alignment=["log_sums", "sinks"])
def join_kernel(
    partial, log_sums, sinks, output, first_token, splits,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, SPLITS: tl.constexpr,
    HAS_SINKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of HEADS, tokens): splits of some rows, each weighted by what its keys add to the softmax's
    denominator."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    head = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    row = (first_token + tl.program_id(1)).to(tl.int64) * HEADS + head
    split, column = tl.arange(0, SPLITS), tl.arange(0, DVP)
    place = row[:, None] * splits + split[None, :]
    logs = tl.load(log_sums + place, mask=(split < splits)[None, :], other=float("-inf"))
    used = logs > float("-inf")
    mask = used[:, :, None] & (column < DV)[None, None, :]
    parts = tl.load(partial + place[:, :, None] * DV + column[None, None, :], mask=mask, other=0.0)
    base = tl.max(logs, 1)
    sink = tl.full((BLOCK_H,), float("-inf"), tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        base = tl.maximum(base, sink)
    base = tl.where(base == float("-inf"), 0.0, base)
    weights = tl.exp2(logs - base[:, None])
    total = tl.sum(weights, 1)
    if HAS_SINKS:
        total += tl.exp2(sink - base)
    mixed = tl.sum(parts * weights[:, :, None], 1) / tl.where(total > 0, total, 1.0)[:, None]
    out = output + row[:, None] * DV + column[None, :]
    tl.store(out, mixed.to(output.dtype.element_ty), mask=(column < DV)[None, :])


@dataclass(frozen=True)
class Run:
    """Adjacent requests that one launch serves."""

    first_request: int
    num_requests: int
    tokens: slice
    query_len: int  # longest of them
    ragged: bool  # of different lengths, which the device reads from `AttentionInputs.query_start`
    max_seq_len: int


@dataclass(frozen=True, kw_only=True)
class LaunchShape:
    """How the kernel is launched. None leaves the choice to the sizes; no result depends on it beyond rounding."""

    splits: int | None = None
    block_m: int | None = None  # query rows of a program
    block_n: int | None = None  # keys that it reads at a time
    warps: int | None = None
    stages: int | None = None  # tiles of keys and values in flight
    streamed: bool | None = None  # by `paged_attention_gluon`; None = where that can


def paged_attention(
    query: torch.Tensor,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    inputs: AttentionInputs,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    causal: bool = True,
    shape: LaunchShape = LaunchShape(),
) -> torch.Tensor:
    """See `paged_attention.paged_attention`. Groups of more than `MOST_QUERY` query tokens take that path, unless their
    length is only a bound.

    Can be captured in a CUDA graph after one ordinary call of the same shape. Then only the numbers of requests,
    tokens, and `QueryGroup.max_seq_len` are fixed, the last as the bound that decides about the number of splits.
    """
    rules = {"scale": scale, "window": window, "softcap": softcap, "sinks": sinks, "causal": causal}
    if query.stride(2) != 1:
        query = query.contiguous()
    output = query.new_empty((*query.shape[:2], value_pages.shape[3]))
    for run in plan_runs(inputs):
        if isinstance(run, QueryGroup):
            part = reference.paged_attention(query, key_pages, value_pages, replace(inputs, groups=(run,)), **rules)
            output[run.tokens] = part
        else:
            _launch(query, key_pages, value_pages, output, inputs, run, rules, shape)
    return output


def plan_runs(inputs: AttentionInputs) -> list[Run | QueryGroup]:
    """What the kernel serves, in as few launches as possible, and the groups whose queries are too long for it."""
    runs: list[Run | QueryGroup] = []
    for group in inputs.groups:
        last = runs[-1] if runs else None
        # In a graph lengths are bounds, and a path that works through all of a bound would cost more than it saves.
        if group.query_len > MOST_QUERY and not group.is_bound:
            runs.append(group)
        elif isinstance(last, Run) and inputs.query_start is not None:
            runs[-1] = Run(
                last.first_request,
                last.num_requests + group.num_requests,
                slice(last.tokens.start, group.tokens.stop),
                max(last.query_len, group.query_len),
                True,
                max(last.max_seq_len, group.max_seq_len),
            )
        else:
            runs.append(
                Run(group.first_request, group.num_requests, group.tokens, group.query_len, False, group.max_seq_len)
            )
    return runs


def _launch(query, key_pages, value_pages, output, inputs, run: Run, rules, shape: LaunchShape) -> None:
    """One run: the kernel, and the second one where it was split."""
    heads, kv_heads, size = query.shape[1], key_pages.shape[2], key_pages.shape[3]
    rows, value_size = run.query_len * (heads // kv_heads), value_pages.shape[3]
    # Without matrix instructions a tall tile does not fit into registers.
    most_rows = 16 if query.element_size() == 4 else 64
    block_m = shape.block_m or min(most_rows, max(16, triton.next_power_of_2(rows)))
    row_bytes = max(size, value_size) * key_pages.element_size()
    block_n = shape.block_n or _keys_at_a_time(row_bytes, block_m, query.device)
    kernel, more = attend_kernel, {"num_stages": shape.stages or _STAGES}
    streamed = shape.streamed
    if streamed is None:
        streamed = (block_m, block_n) == (64, 64) and can_stream(query, key_pages, value_pages, rules)
    if streamed:
        from specflow.kernels.paged_attention_gluon import attend_tiles_kernel as kernel

        more = {"LEAST_KEYS": _LEAST_KEYS}
    tiles = -(-rows // block_m)
    splits = shape.splits or _choose_splits(run.num_requests * kv_heads * tiles, run.max_seq_len, query.device)
    partial, log_sums = output, output
    if splits > 1:
        flat = torch.empty(len(query) * heads * splits * (value_size + 1), dtype=torch.float32, device=query.device)
        partial, log_sums = flat.split([flat.numel() - len(query) * heads * splits, len(query) * heads * splits])
    sinks, positions, early = rules["sinks"], inputs.positions.contiguous(), early_start(query.device)
    with device_of(query):
        kernel[(tiles * kv_heads, splits, run.num_requests)](
            query, key_pages, value_pages, output, partial, log_sums, query if sinks is None else sinks,
            positions, inputs.block_table, inputs.seq_len.contiguous(), inputs.query_start if run.ragged else positions,
            *query.stride()[:2], *key_pages.stride()[:3], *value_pages.stride()[:3], inputs.block_table.stride(0),
            run.first_request, run.tokens.start, run.query_len, key_pages.shape[1], rules["window"] or 0,
            rules["scale"], rules["softcap"] or 0.0,
            HEADS=heads, KV_HEADS=kv_heads, DK=size, DKP=padded(size), DV=value_size, DVP=padded(value_size),
            BLOCK_M=block_m, BLOCK_N=block_n, CAUSAL=rules["causal"], RAGGED=run.ragged,
            HAS_WINDOW=rules["window"] is not None, HAS_SOFTCAP=rules["softcap"] is not None,
            HAS_SINKS=sinks is not None, JOINED=splits == 1,
            num_warps=shape.warps or (8 if block_m * padded(value_size) > 64 * 128 else 4), OVERLAP=bool(early),
            **more, **early,
        )  # fmt: skip
        if splits > 1:
            most = max(8, triton.next_power_of_2(splits))
            together = 4 if most <= 16 and heads % 4 == 0 else 1
            join_kernel[(heads // together, run.tokens.stop - run.tokens.start)](
                partial, log_sums, query if sinks is None else sinks, output, run.tokens.start, splits,
                HEADS=heads, BLOCK_H=together, DV=value_size, DVP=padded(value_size),
                SPLITS=most, HAS_SINKS=sinks is not None, num_warps=4, OVERLAP=bool(early), **early,
            )  # fmt: skip


def padded(size: int) -> int:
    """A tile's columns for heads of this size: a power of two, and what a matrix instruction needs at least."""
    return max(16, triton.next_power_of_2(size))


def _keys_at_a_time(row_bytes: int, block_m: int, device: torch.device) -> int:
    """Keys of a tile of about 16 KiB, so that several fit into any device's shared memory; of 32 KiB where there is
    more of it and query rows are few, since those wait longer for a tile than they work on it."""
    large = block_m <= 32 and device_sizes(device)[1] >= 224 * 1024
    return min(128, max(16, (32768 if large else 16384) // triton.next_power_of_2(row_bytes)))


def _choose_splits(programs: int, max_seq_len: int, device: torch.device) -> int:
    """As many as two programs per processor need, no more than there is work for."""
    useful = max(1, max_seq_len // _LEAST_KEYS)
    return max(1, min(MOST_SPLITS, useful, 2 * device_sizes(device)[0] // programs))
