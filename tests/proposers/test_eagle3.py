"""The EAGLE-3 proposer, driven by contexts made by hand; the head over a plain causal mask computes beside it."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specflow import Engine
from specflow.errors import ConfigError, ProposerError
from specflow.kernels.noise import DRAFT, gumbel_noise
from specflow.kernels.paged_attention import plan_groups
from specflow.proposers import eagle3
from specflow.proposers.base import ProposeContext
from specflow.proposers.eagle3 import Eagle3Options
from specflow.proposers.feature_rows import FeatureRows, feature_rows
from specflow.zoo.bundle import model_folder
from tests.heads.eagle3_helpers import VARIANTS, VOCAB, dense, make_head, rotary
from tests.proposers.eagle3_helpers import EVERY_PATH, PATHS, Eagle3Bench
from tests.proposers.helpers import MAX_LEN, Row, after

PROMPT = [5, 9, 200, 17, 33, 8, 90]
K = 4


@pytest.fixture(params=PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def bench(tmp_path: Path, path: str) -> Eagle3Bench:
    """Both ways of running the steps."""
    return Eagle3Bench(tmp_path, make_head(qk_norm=True), K, path)


def ids_of(draft: Any, row: int = 0) -> list[int]:
    return draft.token_ids[row].tolist()


@pytest.mark.parametrize("path", EVERY_PATH)
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_kind_of_head_drafts_what_it_says_afresh(tmp_path: Path, path: str, variant: str) -> None:
    bench = Eagle3Bench(tmp_path, make_head(**VARIANTS[variant]), K, path)
    tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
    for number, kept in enumerate((1, 0, K, 3)):
        draft = bench.step(Row(0, tokens, chunk, K), rejected=number)
        assert draft.num_drafts.tolist() == [K]
        assert ids_of(draft) == bench.truth(0, tokens), f"round {number}"
        tokens, chunk = after(tokens, ids_of(draft), kept, 70 + number)


@pytest.mark.parametrize("variant", ["plain", "two_layers", "eagle3.1"])
@pytest.mark.parametrize("accepted", range(K + 1))
def test_pages_after_a_round_are_those_of_a_fresh_prefill(
    tmp_path: Path, path: str, variant: str, accepted: int
) -> None:
    """What drafting wrote for positions that were then accepted is replaced by what the target's states give."""
    bench = Eagle3Bench(tmp_path / "a", make_head(**VARIANTS[variant]), K, path)
    tokens = [*PROMPT, 44]
    draft = bench.step(Row(0, tokens, (0, len(PROMPT)), K))
    while_drafting = bench.stored(0, len(tokens) + K - 2)
    tokens, chunk = after(tokens, ids_of(draft), accepted, 70)
    bench.step(Row(0, tokens, chunk, K), rejected=K - accepted)
    fresh = Eagle3Bench(tmp_path / "b", bench.head, K, path)
    fresh.step(Row(0, tokens, (0, len(tokens) - 1), K))
    count = len(tokens) - 1
    torch.testing.assert_close(bench.stored(0, count), fresh.stored(0, count), atol=1e-4, rtol=1e-4)
    if accepted:
        assert not torch.allclose(while_drafting[:, len(PROMPT)], bench.stored(0, count)[:, len(PROMPT)], atol=1e-2)


@pytest.mark.parametrize("cuts", [(1,), (3,), (6,), (2, 5), tuple(range(1, 7))])
@pytest.mark.parametrize("variant", ["plain", "two_layers"])
def test_chunked_prefill(tmp_path: Path, path: str, variant: str, cuts: tuple[int, ...]) -> None:
    """The last row of a chunk embeds the prompt's next token; nothing is drafted until the prompt is done."""
    bench = Eagle3Bench(tmp_path, make_head(**VARIANTS[variant]), K, path)
    for first, last in itertools.pairwise((0, *cuts)):
        assert bench.step(Row(0, PROMPT, (first, last), 0)).num_drafts.tolist() == [0]
    tokens = [*PROMPT, 44]
    draft = bench.step(Row(0, tokens, (cuts[-1], len(PROMPT)), K))
    assert ids_of(draft) == bench.truth(0, tokens)


def test_rounds_without_drafts_are_followed(bench: Eagle3Bench) -> None:
    tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
    for most, kept in ((K, K), (0, 0), (0, 0), (K, 2), (0, 0), (2, 0)):
        draft = bench.step(Row(0, tokens, chunk, most))
        assert draft.num_drafts.tolist() == [most]
        if most:
            assert ids_of(draft)[:most] == bench.truth(0, tokens, most)
        tokens, chunk = after(tokens, ids_of(draft), kept, 71)


@pytest.mark.parametrize("k", [1, 2, 7])
def test_other_lengths_and_short_prompts(tmp_path: Path, path: str, k: int) -> None:
    bench = Eagle3Bench(tmp_path, make_head(), k, path)
    tokens, chunk = [5, 44], (0, 1)
    for kept in (k, 0, k):
        draft = bench.step(Row(1, tokens, chunk, k))
        assert ids_of(draft) == bench.truth(1, tokens)
        tokens, chunk = after(tokens, ids_of(draft), kept, 70)


@pytest.mark.parametrize("variant", ["plain", "two_layers"])
def test_mixed_batch(tmp_path: Path, path: str, variant: str) -> None:
    """Prompt chunks, a request at its limit and drafting ones with different numbers of kept rows in one call."""
    bench = Eagle3Bench(tmp_path, make_head(**VARIANTS[variant]), K, path)
    short, long = [*PROMPT, 44], [*PROMPT, *PROMPT, 45]
    draft = bench.step(
        Row(2, PROMPT * 2, (0, 6), 0),
        Row(0, short, (0, len(short) - 1), K),
        Row(3, [7, 8, 9], (0, 2), 0),
        Row(1, long, (0, len(long) - 1), K),
    )
    assert draft.num_drafts.tolist() == [0, K, 0, K]
    assert ids_of(draft, 1) == bench.truth(0, short)
    assert ids_of(draft, 3) == bench.truth(1, long)
    short, one = after(short, ids_of(draft, 1), 1, 70)
    long, other = after(long, ids_of(draft, 3), 4, 70)
    done = [*PROMPT * 2, 46]
    draft = bench.step(
        Row(0, short, one, K),
        Row(1, long, other, 3),
        Row(2, done, (6, len(done) - 1), K),
        Row(3, [7, 8, 9, 4], (2, 3), K),
    )
    assert draft.num_drafts.tolist() == [K, 3, K, K]
    for row, (slot, tokens) in enumerate(((0, short), (1, long), (2, done), (3, [7, 8, 9, 4]))):
        assert ids_of(draft, row) == bench.truth(slot, tokens)


def test_a_slot_is_used_again(bench: Eagle3Bench) -> None:
    """Pre-emption: the request comes back and all its positions pass once more."""
    tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
    draft = bench.step(Row(0, tokens, chunk, K))
    tokens, _ = after(tokens, ids_of(draft), 2, 70)
    bench.proposer.finish("request-0", 0, [])
    bench.step(Row(0, [1, 2, 3], (0, 2), K))
    bench.proposer.start("request-0", 0, PROMPT)
    assert ids_of(bench.step(Row(0, tokens, (0, len(tokens) - 1), K))) == bench.truth(0, tokens)


def test_drafting_at_the_context_limit(bench: Eagle3Bench) -> None:
    tokens = (PROMPT * 20)[: MAX_LEN - 1]
    draft = bench.step(Row(0, tokens, (0, MAX_LEN - 2), 1))
    assert draft.num_drafts.tolist() == [1]
    assert ids_of(draft)[:1] == bench.truth(0, tokens, 1)


def test_sliding_window(tmp_path: Path, path: str) -> None:
    head = make_head(windows=(3,))
    bench = Eagle3Bench(tmp_path, head, 1, path)
    tokens = [*PROMPT, 44]
    mask = torch.ones(7, 7, dtype=torch.bool).tril().triu(-2)
    states = head.fuse(bench.features[0, :7])
    _, normed = head(head.embed(torch.tensor(tokens[1:])), states, rotary(head, torch.arange(7)), dense(mask))
    draft = bench.step(Row(0, tokens, (0, 7), 1))
    assert ids_of(draft) == [int(head.logits(normed[-1]).argmax())]
    assert ids_of(draft) != bench.truth(0, tokens)


def padded(context: ProposeContext, block_size: int, width: int, name: str) -> FeatureRows:
    """Rows as a GPU has them: `width` for every request, surplus ones repeat the newest and write to block 0."""
    rows = feature_rows(context, block_size, width, name)
    lengths = context.host.chunk_len.tolist()
    chosen, real, last, first = [], [], [], 0
    for length in lengths:
        last.append(len(chosen) + length - 1)
        chosen += [first + min(step, length - 1) for step in range(width)]
        real += [step < length for step in range(width)]
        first += length
    index, kept = torch.tensor(chosen), torch.tensor(real)
    attention, ends = rows.attention, context.host.chunk_start + context.host.chunk_len
    attention = replace(
        attention,
        positions=attention.positions[index],
        slot_mapping=torch.where(kept, attention.slot_mapping[index], attention.positions[index] % block_size),
        groups=plan_groups(np.full(len(lengths), width), ends, context.host.block_table, block_size),
    )
    return FeatureRows(rows.rows[index], rows.owners[index], torch.tensor(last), attention)


@pytest.mark.parametrize("variant", ["plain", "two_layers", "reduced"])
def test_rows_of_static_shape(tmp_path: Path, variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU every request brings K + 1 rows, however many drafts were accepted."""
    bench = Eagle3Bench(tmp_path, make_head(**VARIANTS[variant]), K, "torch")
    one, two = [*PROMPT, 44], [*PROMPT, *PROMPT, 45]
    draft = bench.step(Row(0, one, (0, 7), K), Row(1, two, (0, 14), K))
    monkeypatch.setattr(eagle3, "feature_rows", padded)
    for kept in ((0, K), (2, 1), (K, K)):
        one, first = after(one, ids_of(draft, 0), kept[0], 70)
        two, second = after(two, ids_of(draft, 1), kept[1], 71)
        draft = bench.step(Row(0, one, first, K), Row(1, two, second, K), rejected=1)
        assert ids_of(draft, 0) == bench.truth(0, one)
        assert ids_of(draft, 1) == bench.truth(1, two)


# -- what may go wrong ------------------------------------------------------------------------------------------------


def test_a_target_without_features_stops_the_run(bench: Eagle3Bench) -> None:
    """C78: a conditioned drafter must not run blind."""
    context = replace(bench.context((Row(0, [*PROMPT, 44], (0, 7), K),)), features=None)
    with pytest.raises(ProposerError, match="eagle3"):
        bench.proposer.propose(context)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_not_finite(bench: Eagle3Bench, value: float) -> None:
    """C40: such drafts do not count, are reported, and leave nothing behind for the block's next owner."""
    good = bench.features.clone()
    bench.features[0, 3:] = value
    draft = bench.step(Row(0, [*PROMPT, 44], (0, 7), K), Row(1, [*PROMPT, 44], (0, 7), K))
    assert draft.num_drafts.tolist() == [0, K]
    assert ids_of(draft, 1) == bench.truth(1, [*PROMPT, 44])
    assert bench.proposer.nan_drafts == 1
    assert "1 rounds" in bench.proposer.describe()["warning"]
    bench.features = good
    short, long = [3, 1, 4, 1], [*PROMPT, 44]  # the long one makes attention read past the short one's last position
    draft = bench.step(Row(0, short, (0, 3), K), Row(1, long, (0, 7), K))
    assert ids_of(draft, 0) == bench.truth(0, short)
    assert draft.num_drafts.tolist() == [K, K]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_speculative_tokens": 0}, "num_speculative_tokens=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"draft_sample_method": "beam"}, "draft_sample_method='beam'"),
        ({"aux_layer_convention": "vllm"}, "aux_layer_convention='vllm'"),
        ({"rope_theta": 0.0}, "rope_theta"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Eagle3Options(**options)


def test_rotary_base_can_be_replaced(tmp_path: Path) -> None:
    plain = Eagle3Bench(tmp_path, make_head(), K)
    other = Eagle3Bench(tmp_path, make_head(), K, rope_theta=20.0)
    tokens = [*PROMPT, 44]
    first = plain.step(Row(0, tokens, (0, 7), K))
    assert ids_of(other.step(Row(0, tokens, (0, 7), K))) != ids_of(first)
    assert (plain.proposer.describe()["rotary base"], other.proposer.describe()["rotary base"]) == ("10000", "20")


def test_description(tmp_path: Path) -> None:
    bench = Eagle3Bench(tmp_path, make_head(own_embedding=False, draft_vocab_size=100), K)
    facts = bench.proposer.describe()
    assert facts["captured layers"] == "0, 1, 3 (1, 2, 4 in vLLM's count)"
    assert facts["tables"] == "embedding borrowed from the target"
    assert facts["vocabulary"] == "100 of 384 ids may be proposed"
    assert facts["drafting steps"] == "fused CPU kernels"
    assert len(facts["weights"]) == 16
    assert facts["dtype"] == "float32"


def test_requirements(tmp_path: Path) -> None:
    bench = Eagle3Bench(tmp_path, make_head(**VARIANTS["two_layers"]), K, draft_sample_method="probabilistic")
    wanted = bench.proposer.requirements()
    assert wanted.taps.layers == (0, 1, 3)
    assert not wanted.taps.last_hidden
    assert wanted.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4  # layers, key and value, heads, width, bytes
    assert wanted.lookahead_tokens == K
    assert wanted.draft_logits


# -- probabilistic drafts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["plain", "reduced"])
def test_the_stored_law_is_the_sampled_one(tmp_path: Path, path: str, variant: str) -> None:
    """Each draft can be drawn again from the stored logits; ids outside a reduced vocabulary have probability 0."""
    head = make_head(**VARIANTS[variant])
    bench = Eagle3Bench(tmp_path, head, K, path, draft_sample_method="probabilistic")
    rows = [Row(slot, [*PROMPT, 44 + slot], (0, len(PROMPT)), K, 0.8, 100 + slot) for slot in range(3)]
    draft = bench.step(*rows)
    assert draft.logits is not None
    assert draft.logits.shape == (3, K, VOCAB)
    for b, row in enumerate(rows):
        _, fresh = bench.chain(row.slot, row.tokens, 1)
        whole = torch.full((VOCAB,), float("-inf"))
        whole[head.ids if head.config.reduced else slice(None)] = fresh[0] / 0.8
        torch.testing.assert_close(draft.logits[b, 0], whole, atol=1e-3, rtol=1e-3)
        for i in range(K):
            positions = torch.tensor([len(row.tokens) + i])
            noise = gumbel_noise(torch.tensor([row.seed]), positions, DRAFT, VOCAB)
            assert int((draft.logits[b, i] + noise[0]).argmax()) == ids_of(draft, b)[i]


def test_greedy_rows_beside_sampled_ones_in_a_reduced_vocabulary(tmp_path: Path, path: str) -> None:
    bench = Eagle3Bench(tmp_path, make_head(draft_vocab_size=100), K, path, draft_sample_method="probabilistic")
    tokens = [*PROMPT, 44]
    draft = bench.step(Row(0, tokens, (0, 7), K), Row(1, tokens, (0, 7), K, 1.0, 7))
    assert ids_of(draft, 0) == bench.truth(0, tokens)
    assert draft.logits is not None
    assert torch.softmax(draft.logits[0], -1).amax(-1).tolist() == [1.0] * K
    alone = bench.step(Row(0, tokens, (0, 7), K))
    assert alone.logits is None
    assert ids_of(alone) == ids_of(draft, 0)


def test_prompt_chunks_beside_sampled_drafts(tmp_path: Path, path: str) -> None:
    bench = Eagle3Bench(tmp_path, make_head(), K, path, draft_sample_method="probabilistic")
    draft = bench.step(Row(1, PROMPT, (0, 3), 0), Row(0, [*PROMPT, 44], (0, 7), K, 1.0, 7))
    assert draft.logits is not None
    assert draft.logits.shape[0] == 2
    assert draft.num_drafts.tolist() == [0, K]
    assert np.isfinite(draft.logits[1].numpy()).all()


def test_without_a_path_the_bundled_head_is_used() -> None:
    engine = Engine.from_config({"proposer": "eagle3", "backend": "cpu"})
    about = engine.describe()["proposer"]
    assert about["head"] == f"{model_folder('eagle3')} (EAGLE-3, 1 layer)"
