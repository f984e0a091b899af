"""The books of a decode step in three launches, one program per row; see `specflow.engine.decode_books`.

Columns of a request's state by slot, and of a step's rows, in the order of `decode_columns`.
"""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl

from specflow.kernels import decode_columns as columns
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous

NUM_TOKENS, NUM_DRAFTS, ROUNDS, LIMITS, SPECULATES = (tl.constexpr(columns.STATE.index(name)) for name in (
    "num_tokens", "num_drafts", "rounds", "limits", "speculates",
))  # fmt: skip
NUM_STATE: tl.constexpr = tl.constexpr(len(columns.STATE))
NUM_FLOATS: tl.constexpr = tl.constexpr(len(columns.FLOATS))
# What `commit_kernel` leaves for each row.
EMITTED, ACCEPTED, NEW_TOKENS, NEW_ROUNDS, MAX_DRAFTS = (tl.constexpr(place) for place in range(5))
NUM_COMMITTED = 5
COUNTS: tl.constexpr = tl.constexpr(columns.COUNTS)


# Compiled once whatever the batch is, and wherever in memory small tensors begin.
_INTS = ["batch", "num_slots", "table_width", "most_blocks", "result_rows", "result_columns", "draft_stride"]
_TENSORS = ["slots", "emitted_ids", "num_emitted", "num_accepted", "draft_ids", "num_drafts"]


def _jit(kernel):
    names = kernel.__code__.co_varnames[: kernel.__code__.co_argcount]
    return triton.jit(
        do_not_specialize=[name for name in _INTS if name in names],
        do_not_specialize_on_alignment=[name for name in _TENSORS if name in names],
    )(kernel)


@_jit
def open_kernel(
    slots, ints, floats, num_slots, tokens, table_width, blocks, most_blocks, page_size, turn, num_results,
    row_ints, row_floats, turn_now, positions, slot_mapping, token_ids, draft_ids, block_table, seq_len, batch,
    WIDTH: tl.constexpr, PLACES: tl.constexpr, BLOCKS: tl.constexpr, PIECES: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (B,). WIDTH: drafts of a row; row_ints [NUM_STATE, B], row_floats [NUM_FLOATS, B]; drafts [B, WIDTH]."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    column, few = tl.arange(0, 8), tl.arange(0, 4)
    state = tl.load(ints + column * num_slots + slot, mask=column < NUM_STATE, other=0)
    num_tokens = tl.load(ints + NUM_TOKENS * num_slots + slot)
    active = num_tokens < tl.load(ints + LIMITS * num_slots + slot)
    num_drafts = tl.where(active, tl.load(ints + NUM_DRAFTS * num_slots + slot), 0)
    state = tl.where(column == NUM_DRAFTS, num_drafts, state)
    tl.store(row_ints + column * batch + row, state, mask=column < NUM_STATE)
    other = tl.load(floats + few * num_slots + slot, mask=few < NUM_FLOATS, other=0.0)
    tl.store(row_floats + few * batch + row, other, mask=few < NUM_FLOATS)
    first = tl.where(active, num_tokens - 1, 0)
    tl.store(seq_len + row, first + num_drafts + 1)
    step = tl.arange(0, PLACES)
    inside, real = step <= WIDTH, step <= num_drafts
    position = tl.where(real, first + step, first)
    place = position % page_size
    block = tl.load(blocks + slot * most_blocks + position // page_size, mask=inside, other=0)
    token = tl.load(tokens + slot * table_width + position, mask=inside, other=0)
    out = row * (WIDTH + 1) + step
    tl.store(positions + out, position, mask=inside)
    tl.store(slot_mapping + out, tl.where(real & active, place + block * page_size, place), mask=inside)
    tl.store(token_ids + out, token, mask=inside)
    tl.store(draft_ids + row * WIDTH + step - 1, tl.where(real, token, -1), mask=inside & (step > 0))
    for piece in range(PIECES):
        at = piece * BLOCKS + tl.arange(0, BLOCKS)
        some = tl.load(blocks + slot * most_blocks + at, mask=at < most_blocks, other=0)
        tl.store(block_table + row * most_blocks + at, some, mask=at < most_blocks)
    if row == 0:
        now = tl.load(turn)
        tl.store(turn_now, now)
        tl.store(turn, (now + 1) % num_results)


@_jit
def commit_kernel(
    slots, row_ints, batch, emitted_ids, num_emitted, num_accepted, tokens, table_width, ints, num_slots, committed,
    most_drafts, WIDTH: tl.constexpr, PLACES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (B,). emitted_ids [B, WIDTH + 1], committed [NUM_COMMITTED, B]."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    row = tl.program_id(0)
    slot = tl.load(slots + row)
    num_tokens, rounds = tl.load(row_ints + NUM_TOKENS * batch + row), tl.load(row_ints + ROUNDS * batch + row)
    limit, speculates = tl.load(row_ints + LIMITS * batch + row), tl.load(row_ints + SPECULATES * batch + row)
    active = num_tokens < limit
    emitted = tl.where(active, tl.load(num_emitted + row), 0)
    accepted = tl.where(active, tl.load(num_accepted + row), 0)
    step = tl.arange(0, PLACES)
    token = tl.load(emitted_ids + row * (WIDTH + 1) + step, mask=step <= WIDTH, other=0)
    tl.store(tokens + slot * table_width + num_tokens + step, token, mask=step < emitted)
    total, rounds = num_tokens + emitted, rounds + active
    tl.store(ints + NUM_TOKENS * num_slots + slot, total)
    tl.store(ints + ROUNDS * num_slots + slot, rounds)
    room = tl.minimum(tl.maximum(limit - 1 - total, 0), most_drafts) * speculates
    tl.store(committed + EMITTED * batch + row, emitted)
    tl.store(committed + ACCEPTED * batch + row, accepted)
    tl.store(committed + NEW_TOKENS * batch + row, total)
    tl.store(committed + NEW_ROUNDS * batch + row, rounds)
    tl.store(committed + MAX_DRAFTS * batch + row, room)


@_jit
def close_kernel(
    slots, row_ints, batch, committed, emitted_ids, draft_ids, draft_stride, num_drafts, tokens, table_width, ints,
    num_slots, vocab_size, turn_now, results, result_rows, result_columns,
    WIDTH: tl.constexpr, K: tl.constexpr, PLACES: tl.constexpr, HAS_DRAFTS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (B,). draft_ids [B, K]; results [RESULTS, result_rows, result_columns]."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    row, step = tl.program_id(0), tl.arange(0, PLACES)
    slot = tl.load(slots + row)
    emitted, accepted = tl.load(committed + EMITTED * batch + row), tl.load(committed + ACCEPTED * batch + row)
    verified = tl.load(row_ints + NUM_DRAFTS * batch + row)
    token = tl.load(emitted_ids + row * (WIDTH + 1) + step, mask=step <= WIDTH, other=0)
    usable, dropped = emitted * 0, emitted * 0
    if HAS_DRAFTS:
        total = tl.load(committed + NEW_TOKENS * batch + row)
        wanted = tl.minimum(tl.load(num_drafts + row), tl.load(committed + MAX_DRAFTS * batch + row))
        draft = tl.load(draft_ids + row * draft_stride + step, mask=step < K, other=0)
        strange = (step < K) & ((draft < 0) | (draft >= vocab_size))
        usable = tl.minimum(wanted, tl.min(tl.where(strange, step, K)).to(tl.int64))
        dropped = wanted - usable
        tl.store(tokens + slot * table_width + total + step, draft, mask=step < usable)
        tl.store(ints + NUM_DRAFTS * num_slots + slot, usable)
    out = results + (tl.load(turn_now) * result_rows + row) * result_columns
    tl.store(out, emitted)
    tl.store(out + 1, accepted)
    tl.store(out + 2, verified)
    tl.store(out + 3, usable)
    tl.store(out + 4, dropped)
    tl.store(out + COUNTS + step, token, mask=step <= WIDTH)
