"""Device n-gram proposer: the results of `ngram`, no host read, and nothing made up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.core.limits import EngineLimits
from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError
from specflow.kernels import triton_choice
from specflow.proposers.base import HostView, ProposeContext
from specflow.proposers.ngram import NgramOptions, NgramProposer
from specflow.proposers.ngram_gpu import NgramGpuOptions, NgramGpuProposer, scan_width
from specflow.proposers.prompt_lookup import PromptLookupOptions
from specflow.testing.conformance import assert_lossless, assert_lossless_at_every_length, assert_same
from tests.engine.helpers import PROMPTS, make_engine
from tests.proposers.helpers import Row, make_context, make_limits
from tests.proposers.prompt_lookup_cases import CASES, oracle, propose

REPETITIVE = [[1, 2, 3, 4] * 4, [9] * 6, [50, 60, 50, 60, 50, 60, 7], list(range(100, 108))]


def options(low: int, high: int, k: int, **others: Any) -> dict[str, Any]:
    return {"num_speculative_tokens": k, "prompt_lookup_min": low, "prompt_lookup_max": high, **others}


def build(low: int, high: int, k: int, **others: Any) -> NgramGpuProposer:
    return NgramGpuProposer(NgramGpuOptions(**options(low, high, k, **others)))


def attached(low: int, high: int, k: int, limits: EngineLimits | None = None, **others: Any) -> NgramGpuProposer:
    proposer = build(low, high, k, **others)
    proposer.attach(None, limits or make_limits(k, 384))  # type: ignore[arg-type]
    return proposer


def context_of(*rows: tuple[list[int], int], width: int = 80) -> ProposeContext:
    table = np.zeros((len(rows) + 1, width), dtype=np.int64)
    asked = []
    for slot, (tokens, most) in enumerate(rows):
        table[slot, : len(tokens)] = tokens
        asked.append(Row(slot, tokens, (0, len(tokens) - 1), most))
    return make_context(table, np.zeros((len(rows) + 1, 1), dtype=np.int64), tuple(asked))


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(
    ("name", "history", "low", "high", "k", "earliest", "latest"), CASES, ids=[c[0] for c in CASES]
)
def test_worked_examples(
    name: str,
    history: list[int],
    low: int,
    high: int,
    k: int,
    earliest: list[int],
    latest: list[int] | None,
    kernels: str,
) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
    assert propose(attached(low, high, k, kernels=kernels), (history, k)) == [earliest]
    if latest is not None:
        assert propose(attached(low, high, k, kernels=kernels, match_policy="latest"), (history, k)) == [latest]


def test_the_draft_ends_at_the_context_limit() -> None:
    """N21 and N22: vLLM's device version drafts 3 4 1 2 past the limit; here `max_drafts` caps it as on the host."""
    history = [1, 2, 3, 4, 1, 2]
    assert propose(build(2, 2, 4), (history, 8 - 6)) == [[3, 4]]
    assert propose(build(2, 2, 4), (history, 0)) == [[]]


def test_rows_that_want_no_drafts() -> None:
    """N23 and N24; one long row does not silence the others, as it does in vLLM."""
    n1 = [1, 2, 3, 4, 1, 2, 3]
    found = propose(build(2, 2, 4), (n1, 4), ([1, 2, 3, 4, 5], 4), ([1, 2, 3, 1, 2], 0), ([1, 2] * 32, 0))
    assert found == [[4, 1, 2, 3], [], [], []]
    assert propose(build(2, 2, 4), (n1, 2)) == [[4, 1]]


def test_one_token_and_short_prompts() -> None:
    """C49 and C50: no slice goes negative, nothing matches itself."""
    assert propose(build(1, 5, 3), ([5], 3)) == [[]]
    assert propose(build(5, 5, 3), ([1, 2, 3], 3)) == [[]]
    assert propose(build(2, 2, 3), ([1, 2, 3, 1, 2], 3)) == [[3, 1, 2]]
    assert propose(build(2, 2, 3), (list(range(1, 51)), 3)) == [[]]


ROWS = st.lists(
    st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=90), st.integers(0, 6)), min_size=1, max_size=5
)


@settings(max_examples=300, deadline=None)
@given(
    rows=ROWS,
    low=st.integers(1, 5),
    extra=st.integers(0, 4),
    latest=st.booleans(),
    stale=st.lists(st.integers(0, 3), min_size=1, max_size=5),
)
def test_results_are_those_of_ngram(
    rows: list[tuple[list[int], int]], low: int, extra: int, latest: bool, stale: list[int]
) -> None:
    """Ragged batches with stale tokens behind every text; C50: one documented choice for both methods."""
    chosen = options(low, low + extra, 6, match_policy="latest" if latest else "earliest")
    found = propose(NgramGpuProposer(NgramGpuOptions(**chosen)), *rows, stale=stale)
    assert found == propose(NgramProposer(NgramOptions(**chosen)), *rows, stale=stale)
    assert found == [oracle(history, low, low + extra, most, latest) for history, most in rows]


def test_nothing_is_filled_in() -> None:
    """vLLM's kernels return K copies of the last token without a match, and fill short drafts up with it."""
    draft = build(1, 3, 3).propose(context_of(([1, 2, 3, 4, 5], 3), ([5, 5, 5, 5], 3), ([1, 2], 3)))
    assert draft.num_drafts.tolist() == [0, 1, 0]
    assert draft.token_ids.tolist() == [[-1, -1, -1], [5, -1, -1], [-1, -1, -1]]
    assert (draft.token_ids.dtype, draft.num_drafts.dtype) == (torch.int64, torch.int64)


def test_a_long_ngram() -> None:
    """Lengths of 256 and more are counted right."""
    text = list(range(1, 400))
    history = [*text[-260:], 7, *text[-300:], 8, *text]
    for latest in (False, True):
        policy = "latest" if latest else "earliest"
        assert propose(build(250, 300, 2, match_policy=policy), (history, 2)) == [[8, 1]]
        assert propose(build(301, 350, 2, match_policy=policy), (history, 2)) == [[]]


def test_host_tokens_are_not_read() -> None:
    requirements = build(1, 1, 1).requirements()
    assert not requirements.host_tokens
    assert not requirements.draft_logits
    assert requirements.lookahead_tokens == 0
    context = context_of(([1, 2, 3, 1, 2], 3), ([9, 8, 9], 3))
    blind = replace(context, host=replace(context.host, token_table=None))  # type: ignore[arg-type]
    draft = build(1, 2, 3).propose(blind)
    assert draft.token_ids.tolist() == [[3, 1, 2], [8, 9, -1]]


def test_no_value_is_read_on_the_host() -> None:
    """Meta tensors have no values: whoever reads one, or asks for indices of what is true, fails."""
    context = context_of(([1, 2, 3, 1, 2], 3), ([9, 8, 9], 3))
    on_meta = {name: getattr(context, name).to("meta") for name in ("slots", "num_tokens", "max_drafts", "token_table")}
    draft = build(1, 2, 3).propose(replace(context, **on_meta))
    assert draft.token_ids.shape == (2, 3)
    assert draft.num_drafts.shape == (2,)
    assert draft.token_ids.is_meta


def test_scan_width_covers_the_longest_text() -> None:
    assert scan_width(np.array([3, 9]), 1000) == 64
    assert [scan_width(np.array([length]), 1000) for length in (64, 65, 512, 513, 1000)] == [64, 128, 512, 1000, 1000]
    assert scan_width(np.zeros(0, dtype=np.int64), 10) == 10


def test_the_whole_table_gives_the_same() -> None:
    """What a captured graph scans."""
    proposer = build(2, 3, 4)
    context = context_of(([1, 2, 3, 4, 1, 2, 3], 4), ([7, 7, 7], 2), width=300)
    narrow, wide = (
        proposer.propose(context),
        proposer._find(context.token_table, context.slots, context.num_tokens, context.max_drafts, proposer._rule),
    )
    assert narrow.token_ids.equal(wide[0])
    assert narrow.num_drafts.equal(wide[1])


def test_defaults_are_those_of_ngram() -> None:
    assert PromptLookupOptions.__dataclass_fields__.keys() < NgramGpuOptions.__dataclass_fields__.keys()
    host, device = NgramProposer(NgramOptions()).describe(), NgramGpuProposer(NgramGpuOptions()).describe()
    assert (host.pop("scan"), device.pop("scan")) == ("host, compiled by numba", "device, plain torch")
    assert host == device
    only_one = NgramGpuProposer(NgramGpuOptions(prompt_lookup_min=2)).describe()  # C55
    assert (only_one["prompt_lookup_min"], only_one["prompt_lookup_max"]) == ("2", "2")


def test_what_scans_is_told() -> None:
    assert attached(1, 2, 3).describe()["scan"] == "device, plain torch"
    pytest.importorskip("triton")
    assert attached(1, 2, 3, kernels="triton").describe()["scan"] == "device, Triton"


def test_bad_options(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"prompt_lookup_min=4.*prompt_lookup_max=2"):
        NgramGpuOptions(prompt_lookup_min=4, prompt_lookup_max=2)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if triton_choice.triton_available():
        with pytest.raises(ConfigError, match=r"proposer\.kernels=triton.*device cpu.*auto or torch"):
            attached(1, 2, 3, kernels="triton")
    monkeypatch.setattr(triton_choice, "triton_available", lambda: False)
    with pytest.raises(ConfigError, match=r"proposer\.kernels=triton needs the package triton.*auto or torch"):
        NgramGpuOptions(kernels="triton")


@pytest.mark.parametrize("policy", ["earliest", "latest"])
def test_runs_equal_those_of_ngram(llama_folder: Path, policy: str) -> None:
    """The same rounds, drafts and acceptances, and plain decoding's tokens."""
    chosen = options(1, 3, 4, match_policy=policy)
    sampling = SamplingParams(max_tokens=40, ignore_eos=True)
    prompts = [*PROMPTS, *REPETITIVE]
    names = [f"r{index}" for index in range(len(prompts))]
    device = assert_lossless(
        make_engine(llama_folder, NgramGpuProposer(NgramGpuOptions(**chosen))), prompts, sampling, request_ids=names
    )
    host = make_engine(llama_folder, NgramProposer(NgramOptions(**chosen))).generate(
        prompts, sampling, request_ids=names
    )
    assert_same(device, host)
    counts = [(output.rounds, output.drafted, output.accepted) for output in device]
    assert counts == [(output.rounds, output.drafted, output.accepted) for output in host]
    assert sum(drafted for _, drafted, _ in counts) > 20


def test_lossless_at_every_length(llama_folder: Path) -> None:
    def engine(num_speculative_tokens: int) -> Any:
        return make_engine(llama_folder, build(1, 2, num_speculative_tokens))

    assert_lossless_at_every_length(engine, REPETITIVE, SamplingParams(max_tokens=24, ignore_eos=True))


def test_slots_are_reused_and_requests_pre_empted(llama_folder: Path) -> None:
    """Tokens of a slot's last owner are never matched, whatever it was."""
    engine = make_engine(llama_folder, build(1, 3, 4), max_num_seqs=2, max_model_len=64, num_kv_blocks=20)
    outputs = assert_lossless(engine, [*REPETITIVE, *PROMPTS], SamplingParams(max_tokens=40, ignore_eos=True))
    assert any(output.drafted for output in outputs)
    assert engine.scheduler.num_preemptions > 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_propose_is_captured_and_never_waits(kernels: str) -> None:
    """A graph captured over short texts serves longer ones; the host's view of the lengths is not in it."""
    device = torch.device("cuda")
    limits = replace(make_limits(4, 384, max_len=300), device=device)
    proposer = attached(1, 3, 4, limits, kernels=kernels)
    assert proposer.describe()["scan"] == ("device, plain torch" if kernels == "torch" else "device, Triton")
    names = ("slots", "num_tokens", "max_drafts", "token_table")
    context = context_of(([1, 2, 3, 1, 2], 4), ([9, 8, 9], 4), width=limits.table_width)
    context = replace(context, **{name: getattr(context, name).to(device) for name in names})
    context = replace(context, static=True, host=HostView.bounds(2, limits))
    eager = proposer.propose(context)
    assert eager.token_ids.tolist() == [[3, 1, 2, -1], [8, 9, -1, -1]]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        proposer.propose(context)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            draft = proposer.propose(context)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    text = [7, 6, *range(20, 200), 7, 6]
    context.token_table[0, : len(text)] = torch.tensor(text, device=device)
    context.num_tokens[0] = len(text)
    graph.replay()
    assert draft.token_ids.tolist() == [[20, 21, 22, 23], [8, 9, -1, -1]]
    assert draft.num_drafts.tolist() == [4, 2]
