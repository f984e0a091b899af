"""The books in three launches against plain torch; interpreted on a CPU, compiled where there is a GPU."""

from dataclasses import replace

import pytest
import torch

from specflow.core.draft import Draft, Verdict
from specflow.core.limits import EngineLimits
from specflow.engine.buffers import StepBuffers
from specflow.engine.decode_books import RESULTS, DecodeBooks
from specflow.engine.decode_state import DecodeState
from tests.kernels.rejection_cases import DEVICE
from tests.proposers.helpers import make_limits

pytest.importorskip("triton")

from specflow.engine.decode_books_gpu import GpuDecodeBooks

SLOTS, K, VOCAB = 5, 3, 100
LIMITS = replace(make_limits(K, VOCAB, K, max_len=40, num_blocks=80), max_num_seqs=SLOTS, device=DEVICE)


def books_of(kind: type[DecodeBooks], limits: EngineLimits, seed: int = 0) -> DecodeBooks:
    """Books of five requests: one at its limit, one without room for drafts, one that does not speculate."""
    buffers, state = StepBuffers(limits, keeps_draft_logits=False), DecodeState(limits, 8)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, tuple(buffers.tokens.device.shape), generator=generator)
    buffers.tokens.device.copy_(ids)
    each = buffers.blocks.device.shape[1]
    buffers.blocks.device[:SLOTS] = 1 + torch.randperm(SLOTS * each, generator=generator).view(SLOTS, each).to(DEVICE)
    rows = [(9, 2, 4, 2**40 + 7, 30, 1, 5), (12, 3, 1, 11, 12, 1, 0), (16, 0, 0, 3, 18, 1, 0), (7, 3, 2, 5, 30, 0, 2)]
    for slot, row in enumerate([*rows, (20, 1, 9, -3, 23, 1, 0)]):
        state.ints[:, slot] = torch.tensor(row, device=DEVICE)
        state.floats[:, slot] = torch.tensor([0.5 + slot, 0.9, 0.1], device=DEVICE)
    return kind(buffers, state, limits)


def both(limits: EngineLimits = LIMITS) -> tuple[DecodeBooks, DecodeBooks]:
    return books_of(DecodeBooks, limits), books_of(GpuDecodeBooks, limits)


def verdict_of(batch: int, width: int, seed: int) -> Verdict:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch, width + 1), generator=generator)
    emitted = torch.randint(1, width + 2, (batch,), generator=generator)
    return Verdict(ids.to(DEVICE), emitted.to(DEVICE), (emitted - 1).to(DEVICE))


@pytest.mark.parametrize("drafts", [True, False])
@pytest.mark.parametrize(("batch", "width"), [(8, K), (1, K), (4, 0)])
def test_steps_leave_the_same_books(batch: int, width: int, drafts: bool) -> None:
    """Six steps: what the target gets, what is told of each row, every table and every result."""
    pair = both()
    for books in pair:
        books.state.seat([3, 0, 4, 1, 2][:batch])
        books.begin(2)
    for step in range(6):
        seen = []
        for books in pair:
            opened = books.open(batch, width)
            verdict = verdict_of(batch, width, step)
            done = books.commit(opened.rows, verdict)
            ids = torch.randint(-1, VOCAB + 9, (batch, K), generator=torch.Generator().manual_seed(step)).to(DEVICE)
            draft = Draft(ids, torch.full((batch,), K, device=DEVICE) - step % 2) if drafts else None
            books.close(opened.rows, verdict, done, draft)
            books.buffers.tokens.device[SLOTS] = 0  # the padding row: what is written there means nothing
            rows, packed = opened.rows, opened.batch
            seen.append([
                *(rows.slots, rows.num_tokens, rows.num_drafts, rows.rounds, rows.seeds, rows.limits, rows.speculates),
                *(rows.temperature, rows.filters.top_k, rows.filters.top_p, rows.filters.min_p, opened.draft_ids),
                *(packed.token_ids, packed.positions, packed.attention.slot_mapping, packed.attention.block_table),
                *(packed.attention.seq_len, packed.query_start, done.emitted, done.accepted, done.num_tokens),
                *(done.rounds, done.max_drafts, books.buffers.tokens.device[:SLOTS], books.state.ints[:, :SLOTS]),
                books.results,
            ])  # fmt: skip
        for number, (expected, found) in enumerate(zip(*seen, strict=True)):
            assert torch.equal(found, expected), f"step {step}, part {number}"


def test_results_go_round_in_a_ring() -> None:
    books = both()[1]
    books.state.seat([0])
    books.begin(RESULTS - 1)
    for turn in (RESULTS - 1, 0):
        opened = books.open(1, 0)
        verdict = verdict_of(1, 0, turn)
        books.close(opened.rows, verdict, books.commit(opened.rows, verdict), None)
        assert books.results[turn, 0, 5] == verdict.token_ids[0, 0]


def test_a_long_block_table_is_copied_whole() -> None:
    """More blocks than a program copies at a time."""
    limits = replace(LIMITS, max_model_len=4500, num_blocks=6000)
    expected, found = (books.open(2, 0).batch.attention.block_table for books in both(limits))
    assert expected.shape[1] > 1024
    assert torch.equal(found, expected)
