"""Kernels of prompt lookup: Triton and the torch reference agree, compiled where there is a GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.kernels import ngram_match
from specflow.kernels.ngram_match import MatchRule
from tests.kernels.rejection_cases import DEVICE
from tests.proposers.prompt_lookup_cases import oracle

pytest.importorskip("triton")

from specflow.kernels import ngram_match_triton

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Found = tuple[torch.Tensor, torch.Tensor]


def make_case(batch: int, width: int, seed: int, *, alphabet: int = 3, k: int = 4) -> Inputs:
    """A table full of ids, texts of 0 … width tokens in rows of any order, 0 … K drafts wanted."""
    random = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=random)

    slots = torch.randperm(batch + 2, generator=random)[:batch]
    lengths = integers(width + 1, batch)
    lengths[0] = width
    tensors = integers(alphabet, batch + 2, width), slots, lengths, integers(k + 1, batch)
    return tuple(tensor.to(DEVICE) for tensor in tensors)  # type: ignore[return-value]


def same(first: Found, second: Found) -> bool:
    return all(one.equal(other) and one.dtype == other.dtype for one, other in zip(first, second, strict=True))


@pytest.fixture(params=[(16, 4), (1024, 32)], ids=str)
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks make short texts span several of them, and several parts."""
    monkeypatch.setattr(ngram_match_triton, "BLOCK", request.param[0])
    monkeypatch.setattr(ngram_match_triton, "PARTS", request.param[1])


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    width=st.integers(1, 60),
    low=st.integers(1, 4),
    extra=st.integers(0, 4),
    latest=st.booleans(),
)
def test_reference_is_the_definition(seed: int, width: int, low: int, extra: int, latest: bool) -> None:
    rule = MatchRule(low, low + extra, latest, 4)
    table, slots, lengths, most = make_case(4, width, seed)
    ids, counts = ngram_match.ngram_drafts(table, slots, lengths, most, rule)
    for row, slot in enumerate(slots.tolist()):
        text = table[slot, : lengths[row]].tolist()
        expected = oracle(text, low, low + extra, int(most[row]), latest)
        assert ids[row].tolist() == expected + [-1] * (4 - len(expected))
        assert counts[row] == len(expected)


@pytest.mark.usefixtures("blocks")
@pytest.mark.parametrize("latest", [False, True])
@pytest.mark.parametrize(("low", "high"), [(1, 1), (1, 4), (3, 6), (5, 5), (1, 40)])
def test_kernels_equal_the_reference(low: int, high: int, latest: bool) -> None:
    rule = MatchRule(low, high, latest, 4)
    for seed, (batch, width) in enumerate([(1, 1), (1, 130), (5, 65), (3, 200), (4, 17)]):
        case = make_case(batch, width, seed)
        assert same(ngram_match_triton.ngram_drafts(*case, rule), ngram_match.ngram_drafts(*case, rule))


@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("latest", [False, True])
def test_a_long_text(k: int, latest: bool) -> None:
    """Several real blocks; a slice of a wider table."""
    table, slots, lengths, most = make_case(3, 5000, 1, alphabet=12, k=k)
    rule = MatchRule(2, 5, latest, k)
    wide = torch.cat([table, table], 1)[:, : table.shape[1]]
    found = ngram_match_triton.ngram_drafts(wide, slots, lengths, most, rule)
    assert same(found, ngram_match.ngram_drafts(table, slots, lengths, most, rule))
    assert found[1].any()


def test_no_requests_and_padded_ones() -> None:
    rule = MatchRule(1, 2, False, 3)
    for find in (ngram_match.ngram_drafts, ngram_match_triton.ngram_drafts):
        table, slots, lengths, most = make_case(2, 20, 0)
        ids, counts = find(table, slots[:0], lengths[:0], most[:0], rule)
        assert (ids.shape, counts.shape) == ((0, 3), (0,))
        ids, counts = find(table, slots, lengths * 0, most * 0 + 3, rule)
        assert counts.tolist() == [0, 0]
        assert bool((ids == -1).all())


def test_reference_traces_without_a_break() -> None:
    """No branch on values: one graph serves every batch and width."""
    rule = MatchRule(1, 3, False, 4)
    traced = torch.compile(ngram_match.ngram_drafts, backend="eager", fullgraph=True, dynamic=True)
    for seed, (batch, width) in enumerate([(3, 40), (5, 90)]):
        case = make_case(batch, width, seed)
        assert same(traced(*case, rule), ngram_match.ngram_drafts(*case, rule))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("module", [ngram_match, ngram_match_triton], ids=["torch", "triton"])
def test_a_captured_call_replays_with_longer_texts(module) -> None:
    """Captured over short texts, replayed over others; nothing waits for the device."""
    rule = MatchRule(1, 4, False, 4)
    static = make_case(8, 3000, 0, alphabet=8)
    static[2].clamp_(max=20)
    module.ngram_drafts(*static, rule)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = module.ngram_drafts(*static, rule)
        module.ngram_drafts(*static, rule)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for seed in range(1, 20):
        case = make_case(8, 3000, seed, alphabet=8)
        for buffer, values in zip(static, case, strict=True):
            buffer.copy_(values)
        graph.replay()
        assert same(found, ngram_match.ngram_drafts(*case, rule))
        assert found[1].any()
