"""The DFlash proposer, driven by contexts made by hand; every block computed afresh beside it."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from specflow.core.draft import Draft
from specflow.errors import ConfigError, ProposerError
from specflow.heads.dflash import BlockLayer, DFlashConfig
from specflow.kernels.noise import DRAFT, gumbel_noise
from specflow.proposers.base import Features, ProposeContext
from specflow.proposers.block_drafter import BlockRows, GpuBlockDrafter, TorchBlockDrafter
from specflow.proposers.dflash import DFlashOptions, DFlashProposer
from specflow.proposers.draft_sampling import DraftSampler
from tests.heads.dflash_cases import (
    FULL,
    VOCAB,
    WIDTH,
    make_config,
    make_head,
    make_tables,
    make_target,
    plain_block,
    saved_head,
)
from tests.proposers.helpers import SLOTS, Row, make_context, make_limits, skip_without_interpreter

CPU = SimpleNamespace(device=torch.device("cpu"))
NAN = float("nan")


class DFlashBench:
    """A proposer with pages full of junk, and a target whose states are random numbers per request and position."""

    def __init__(
        self, folder: Path, config: DFlashConfig | None = None, way: str = "fused", k: int | None = None, **options: Any
    ) -> None:
        self.head = saved_head(folder, config)
        target = make_target()
        self.proposer = DFlashProposer(DFlashOptions(path=str(folder), num_speculative_tokens=k, **options))
        self.proposer.load(target, CPU)  # type: ignore[arg-type]
        self.k = self.proposer.num_speculative_tokens
        self.limits = make_limits(self.k, VOCAB, self.proposer.requirements().lookahead_tokens)
        self.proposer.attach(target, self.limits)
        if way != "fused":
            kind = TorchBlockDrafter
            if way == "triton":
                skip_without_interpreter()
                kind, self.limits = GpuBlockDrafter, replace(self.limits, paged_kernels="triton")
            loaded, whole = self.proposer._head, self.proposer.options.whole_block
            self.proposer._drafter = kind(loaded, self.limits, self.k, "dflash", whole)
        # Nothing may depend on what blocks held before; plain torch multiplies hidden values by zero.
        self.proposer._drafter.pages.stacked.fill_(1e4 if way == "torch" else NAN)
        blocks = np.arange(1, 1 + SLOTS * self.limits.max_blocks_per_seq)
        np.random.default_rng(0).shuffle(blocks)
        self.blocks = np.zeros((SLOTS + 1, self.limits.max_blocks_per_seq), dtype=np.int64)
        self.blocks[:SLOTS] = blocks.reshape(SLOTS, -1)
        self.table = np.zeros((SLOTS + 1, self.limits.table_width), dtype=np.int64)
        generator = torch.Generator().manual_seed(5)
        shape = (SLOTS, self.limits.table_width, len(self.head.config.capture_layers), WIDTH)
        self.states = torch.randn(shape, generator=generator)

    def step(self, *rows: Row, rejected: int = 2) -> Draft:
        """One call. Behind the kept rows of every request stand `rejected` rows of NaN."""
        starts, positions, hidden = [], [], []
        for row in rows:
            self.table[row.slot, : len(row.tokens)] = row.tokens
            starts.append(sum(map(len, positions)))
            positions.append(np.arange(row.chunk[0], row.chunk[1] + rejected))
            kept = self.states[row.slot, slice(*row.chunk)]
            hidden.append(torch.cat([kept, kept.new_full((rejected, *kept.shape[1:]), NAN)]))
        layers = self.head.config.capture_layers
        packed = torch.cat(hidden)
        features = Features(
            start=torch.tensor(starts),
            num_valid=torch.tensor([row.chunk[1] - row.chunk[0] for row in rows]),
            positions=torch.from_numpy(np.concatenate(positions)),
            hidden={layer: packed[:, index] for index, layer in enumerate(layers)},
            last_hidden=None,
        )
        return self.proposer.propose(replace(make_context(self.table, self.blocks, rows), features=features))

    def fresh(self, slot: int, tokens: list[int]) -> torch.Tensor:
        """Logits [K, Vd] of the drafts behind these tokens, everything computed at once."""
        config = self.head.config
        features = self.states[slot, : len(tokens) - 1]
        rows = config.rows_to_run(self.k, self.proposer.options.whole_block)
        return plain_block(self.head, features, tokens[-1], rows)[config.answers][: self.k]

    def greedy(self, slot: int, tokens: list[int]) -> list[int]:
        return self.fresh(slot, tokens).argmax(-1).tolist()


LAYOUTS = {"fill-in": False, "next-token": True}
RULES = {
    "full": (FULL, FULL),
    "causal": (BlockLayer(causal=True), BlockLayer(causal=True)),
    "window": (BlockLayer(window=4, causal=True), FULL),
    "both ways": (BlockLayer(window=3), BlockLayer(window=3)),
}


@pytest.mark.parametrize("way", ["fused", "torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fewer_drafts_are_the_first_of_a_whole_block(tmp_path: Path, layout: str, way: str) -> None:
    """Rows that see the whole block say something else in a shorter one: a head well trained with blocks of 8 rows had
    84 % of its first drafts accepted there, and 8 % in blocks of 4."""
    config, tokens = make_config(sample_from_anchor=LAYOUTS[layout], block_layers=RULES["full"]), [5, 9, 11, 6, 7]
    logits = {}
    for k, whole in ((None, True), (2, True), (2, False)):
        bench = DFlashBench(tmp_path, config, way, k, whole_block=whole, draft_sample_method="probabilistic")
        draft = bench.step(Row(0, tokens, (0, 4), bench.k, 1.0, 3))
        assert draft.logits is not None
        assert draft.token_ids.shape == (1, bench.k)
        torch.testing.assert_close(draft.logits[0], bench.fresh(0, tokens), rtol=1e-4, atol=1e-4)
        logits[k, whole] = draft.logits[0]
    torch.testing.assert_close(logits[2, True], logits[None, True][:2], rtol=1e-5, atol=1e-5)
    assert (logits[2, False] - logits[2, True]).abs().max() > 1e-2


def test_causal_blocks_run_no_row_in_vain() -> None:
    causal = make_config(block_layers=RULES["causal"])
    assert causal.rows_to_run(2, whole=True) == causal.num_rows(2)
    both = make_config(block_layers=RULES["window"])
    assert both.rows_to_run(2, whole=True) == both.block_size
    assert both.rows_to_run(2, whole=False) == both.num_rows(2)


@pytest.mark.parametrize(
    ("layout", "rule", "way"),
    [
        *itertools.product(LAYOUTS, RULES, ["fused", "torch"]),
        *(
            pytest.param(layout, rule, "triton", marks=pytest.mark.slow)
            for layout, rule in (("fill-in", "window"), ("next-token", "both ways"))
        ),
    ],
)
def test_pages_filled_step_by_step_equal_one_computation(tmp_path: Path, layout: str, rule: str, way: str) -> None:
    """Random acceptance, four requests of unlike lengths, prompts in chunks, rejected rows and old blocks of NaN."""
    config = make_config(sample_from_anchor=LAYOUTS[layout], block_layers=RULES[rule])
    bench = DFlashBench(tmp_path, config, way, draft_sample_method="probabilistic")
    assert bench.k == config.max_drafts
    random = np.random.default_rng(1)
    tokens = [random.integers(4, VOCAB, length).tolist() for length in (1, 6, 11, 2)]
    done = [0] * SLOTS
    for number in range(8):
        rows = []
        for slot in range(SLOTS):
            pending = len(tokens[slot]) - done[slot]
            chunk = min(pending, 5) if number < 3 else pending
            rows.append((slot, done[slot] + chunk, chunk == pending))
        contexts = []
        for slot, end, samples in rows:
            if samples:
                tokens[slot] = [*tokens[slot], int(random.integers(4, VOCAB))]
            contexts.append(Row(slot, tokens[slot], (done[slot], end), bench.k if samples else 0, 1.0, slot))
        draft = bench.step(*contexts)
        assert draft.logits is not None or not any(samples for _, _, samples in rows)
        for slot, end, samples in rows:
            done[slot] = end
            assert draft.num_drafts[slot] == (bench.k if samples else 0)
            if samples:
                wanted = bench.fresh(slot, tokens[slot])
                torch.testing.assert_close(draft.logits[slot], wanted, rtol=1e-4, atol=1e-4)
                # The target accepts some of them: those positions are processed in its next pass.
                tokens[slot] += draft.token_ids[slot, : random.integers(0, bench.k + 1)].tolist()


@pytest.mark.parametrize("way", ["fused", "torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("k", [1, 2])
def test_fewer_drafts_feed_fewer_masks(tmp_path: Path, k: int, layout: str, way: str) -> None:
    bench = DFlashBench(tmp_path, make_config(sample_from_anchor=LAYOUTS[layout]), way, k)
    tokens = [9, 8, 7, 6, 50]
    draft = bench.step(Row(0, tokens, (0, 4), k))
    assert draft.token_ids[0].tolist() == bench.greedy(0, tokens)
    assert draft.logits is None


@pytest.mark.parametrize("way", ["fused", "torch", "triton"])
def test_mixed_batch(tmp_path: Path, way: str) -> None:
    """A prompt chunk, a request at a limit of one draft, and two that draft; then their slots change hands."""
    bench = DFlashBench(tmp_path, None, way)
    long = list(range(5, 25))
    chunks = [Row(2, long, (0, 7), 0), Row(0, [9, 8, 50], (0, 2), 1), Row(3, long[:8], (0, 7), bench.k)]
    draft = bench.step(*chunks)
    assert draft.num_drafts.tolist() == [0, 1, bench.k]
    assert draft.token_ids[1].tolist() == bench.greedy(0, [9, 8, 50])
    assert draft.token_ids[2].tolist() == bench.greedy(3, long[:8])
    # Slot 3 goes to a shorter request: what the last owner left behind it must not be seen.
    assert bench.step(Row(3, [7, 6], (0, 1), bench.k)).token_ids[0].tolist() == bench.greedy(3, [7, 6])
    assert bench.step(Row(2, long, (7, 19), bench.k)).token_ids[0].tolist() == bench.greedy(2, long)


@pytest.mark.parametrize("way", ["fused", "torch", "triton"])
def test_drafting_at_the_context_limit(tmp_path: Path, way: str) -> None:
    """C48: the block goes on past the last position, into the blocks kept for that."""
    bench = DFlashBench(tmp_path, None, way)
    tokens = [int(5 + i % 80) for i in range(bench.limits.max_model_len - 2)]
    draft = bench.step(Row(0, tokens, (0, len(tokens) - 1), 1))
    assert draft.num_drafts.tolist() == [1]
    assert draft.token_ids[0].tolist() == bench.greedy(0, tokens)


def test_the_layout_decides_which_rows_answer(tmp_path: Path) -> None:
    """The same weights run the other way give other drafts: nothing else would show a mistake."""
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    fill = DFlashBench(tmp_path / "a", make_config())
    following = DFlashBench(tmp_path / "b", make_config(sample_from_anchor=True, block_size=4))
    tokens = [9, 8, 7, 6, 50]
    rows = plain_block(fill.head, fill.states[0, :4], 50, 5).argmax(-1).tolist()
    assert fill.step(Row(0, tokens, (0, 4), 4)).token_ids[0].tolist() == rows[1:]
    rows = plain_block(fill.head, fill.states[0, :4], 50, 4).argmax(-1).tolist()
    assert following.step(Row(0, tokens, (0, 4), 4)).token_ids[0].tolist() == rows


# -- probabilistic drafts, vocabularies ---------------------------------------------------------------------------


def test_stored_law_is_the_sampled_one(tmp_path: Path) -> None:
    """The noise is a function of seed and position, so each draft can be drawn again from the stored logits."""
    bench = DFlashBench(tmp_path, draft_sample_method="probabilistic")
    rows = [Row(slot, [9, 8, 7, 50 + slot], (0, 3), bench.k, 0.7, 100 + slot) for slot in range(3)]
    draft = bench.step(*rows)
    assert draft.logits is not None
    for b, row in enumerate(rows):
        fresh = bench.fresh(row.slot, row.tokens) / row.temperature
        torch.testing.assert_close(draft.logits[b], fresh, rtol=1e-4, atol=1e-4)
        for i in range(bench.k):
            noise = gumbel_noise(torch.tensor([row.seed]), torch.tensor([len(row.tokens) + i]), DRAFT, VOCAB)[0]
            assert int((draft.logits[b, i] + noise).argmax()) == int(draft.token_ids[b, i])


@pytest.mark.parametrize("way", ["fused", "torch", "triton"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reduced_vocabulary(tmp_path: Path, temperature: float, way: str) -> None:
    """Drafts are ids of the target, and the law is over its ids; the head says odd ones only."""
    config = make_config(draft_vocab_size=40, own_head=True)
    bench = DFlashBench(tmp_path, config, way, draft_sample_method="probabilistic")
    tokens = [9, 8, 7, 50]
    draft = bench.step(Row(0, tokens, (0, 3), bench.k, temperature, 3))
    assert (draft.token_ids % 2 == 1).all()
    fresh = bench.fresh(0, tokens)
    if temperature == 0:
        assert draft.token_ids[0].tolist() == bench.head.ids[fresh.argmax(-1)].tolist()
    else:
        assert draft.logits is not None
        torch.testing.assert_close(draft.logits[0][:, bench.head.ids], fresh, rtol=1e-4, atol=1e-4)
        others = [i for i in range(VOCAB) if i not in set(bench.head.ids.tolist())]
        assert torch.isneginf(draft.logits[0][:, others]).all()


def test_padding_of_the_target_is_never_proposed(tmp_path: Path) -> None:
    """C43."""
    saved_head(tmp_path)
    tables = make_tables()
    tables.head[60:] = 50.0 * tables.head[60:].sign()
    proposer = DFlashProposer(DFlashOptions(path=str(tmp_path)))
    proposer.load(make_target(tables, num_token_ids=60), CPU)  # type: ignore[arg-type]
    assert proposer._head.head_table.shape[0] == 60


class ChainedProposer(DFlashProposer):
    """What a head with more than a block does: it corrects each row by the draft before it, and verifies fewer."""

    name = "chained"

    def choose(self, rows: BlockRows, sampler: DraftSampler, sampled: bool) -> torch.Tensor:
        assert rows.states.shape == (len(rows.anchors), self.num_speculative_tokens, WIDTH)
        drafts = [rows.anchors]
        for index, logits in enumerate(rows.logits.unbind(1)):
            bonus = torch.nn.functional.one_hot((drafts[-1] + 1) % VOCAB, VOCAB) * 1e3
            drafts.append(sampler.choose(index, logits + bonus))
        return torch.stack(drafts[1:], 1)

    def count(
        self, context: ProposeContext, rows: BlockRows, drafts: torch.Tensor, usable: torch.Tensor
    ) -> torch.Tensor:
        return usable.clamp(max=2)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_head_on_top_chooses_in_its_own_way(tmp_path: Path, temperature: float) -> None:
    bench = DFlashBench(tmp_path, draft_sample_method="probabilistic")
    chained = ChainedProposer(DFlashOptions(path=str(tmp_path), draft_sample_method="probabilistic"))
    chained.load(make_target(), CPU)  # type: ignore[arg-type]
    chained.attach(make_target(), bench.limits)
    bench.proposer = chained
    draft = bench.step(Row(0, [9, 8, 7, 50], (0, 3), 4, temperature, 1), Row(1, [9, 8, 60], (0, 2), 4, temperature, 1))
    assert draft.token_ids.tolist() == [[51, 52, 53, 54], [61, 62, 63, 64]]
    assert draft.num_drafts.tolist() == [2, 2]
    if temperature:
        assert draft.logits is not None
        assert draft.logits[0].argmax(-1).tolist() == [51, 52, 53, 54]


# -- the rest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fused", "torch", "triton"])
def test_states_that_are_not_numbers(tmp_path: Path, way: str) -> None:
    """C40: that request drafts nothing and is counted; the others, and later owners of its blocks, are untouched."""
    bench = DFlashBench(tmp_path, None, way)
    good, bad = [9, 8, 7, 50], [4, 5, 6, 51]
    healthy = bench.states[1].clone()
    bench.states[1] = NAN
    draft = bench.step(Row(1, bad, (0, 3), bench.k), Row(0, good, (0, 3), bench.k))
    if way == "fused":  # the plain pages store zeros for what is no number
        assert draft.num_drafts.tolist() == [0, bench.k]
        assert "dflash" in bench.proposer.describe()["warning"]
    assert draft.token_ids[1].tolist() == bench.greedy(0, good)
    bench.states[1] = healthy
    again = bench.step(Row(1, bad, (0, 3), bench.k), Row(0, [*good, 52], (3, 4), bench.k))
    assert again.token_ids[0].tolist() == bench.greedy(1, bad)
    assert again.token_ids[1].tolist() == bench.greedy(0, [*good, 52])


@pytest.mark.parametrize("target", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16", "float16"])
def test_dtype_pairs(tmp_path: Path, dtype: str, target: str) -> None:
    """C46."""
    saved_head(tmp_path)
    tables = make_tables()
    kind = getattr(torch, target)
    lent = replace(tables, embedding=tables.embedding.to(kind), head=tables.head.to(kind))
    proposer = DFlashProposer(DFlashOptions(path=str(tmp_path), dtype=dtype))  # type: ignore[arg-type]
    fake = make_target(lent, kind)
    proposer.load(fake, CPU)  # type: ignore[arg-type]
    limits = make_limits(4, VOCAB, proposer.requirements().lookahead_tokens)
    proposer.attach(fake, limits)
    table = np.zeros((SLOTS + 1, limits.table_width), dtype=np.int64)
    table[0, :4] = [9, 8, 7, 50]
    blocks = np.arange(1, 1 + (SLOTS + 1) * limits.max_blocks_per_seq).reshape(SLOTS + 1, -1)
    hidden = {layer: torch.randn(3, WIDTH).to(kind) for layer in (0, 2, 5)}
    features = Features(torch.tensor([0]), torch.tensor([3]), torch.arange(3), hidden, None)
    context = make_context(table, blocks, (Row(0, [9, 8, 7, 50], (0, 3), 4),))
    assert proposer.propose(replace(context, features=features)).num_drafts.tolist() == [4]
    assert proposer.describe()["dtype"] == (target if dtype == "auto" else dtype)


def test_no_states_no_drafts(tmp_path: Path) -> None:
    """C78: a head without the target's states must stop, not draft at random."""
    bench = DFlashBench(tmp_path)
    with pytest.raises(ProposerError, match="hidden states"):
        bench.proposer.propose(make_context(bench.table, bench.blocks, (Row(0, [9, 8, 7, 50], (0, 3), 4),)))


def test_more_drafts_than_trained_are_refused(tmp_path: Path) -> None:
    saved_head(tmp_path)
    for layout, most in ((False, 4), (True, 5)):
        saved_head(tmp_path, make_config(sample_from_anchor=layout))
        proposer = DFlashProposer(DFlashOptions(path=str(tmp_path), num_speculative_tokens=most + 1))
        with pytest.raises(ConfigError, match=f"num_speculative_tokens={most + 1}.* at most {most}"):
            proposer.load(make_target(), CPU)  # type: ignore[arg-type]


def test_describe_names_what_is_in_memory(tmp_path: Path) -> None:
    """C54 and C78."""
    bench = DFlashBench(tmp_path, k=3)
    described = bench.proposer.describe()
    count = sum(weight.numel() for weight in make_head().parameters())
    assert described["parameters"] == f"{count:,}"
    assert described["num_speculative_tokens"] == "3 of 4 the head was trained for"
    assert described["captured layers"] == "0, 2, 5 (1, 3, 6 in vLLM's count)"
    assert described["block layout"].startswith("fill-in (sample_from_anchor=false")
    assert described["tables"] == "embedding and head borrowed from the target"
    assert described["drafting steps"] == "fused CPU kernels"
    assert len(described["weights"]) == 16
    assert str(tmp_path) in described["head"]


def test_requirements(tmp_path: Path) -> None:
    assert DFlashBench(tmp_path, k=3).proposer.requirements().lookahead_tokens == 5  # the whole block
    requirements = DFlashBench(tmp_path, k=3, whole_block=False).proposer.requirements()
    assert requirements.taps.layers == (0, 2, 5)
    assert requirements.lookahead_tokens == 4  # the anchor's own position is not covered by what the target has done
    assert requirements.kv_bytes_per_token == 2 * 2 * 2 * 8 * 4
    assert not requirements.draft_logits


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_speculative_tokens": 0}, ["num_speculative_tokens=0", "1 or more"]),
        ({"dtype": "int8"}, ["dtype='int8'", "bfloat16"]),
        ({"draft_sample_method": "random"}, ["draft_sample_method='random'", "probabilistic"]),
    ],
)
def test_bad_options(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        DFlashOptions(**options)
    assert all(word in str(caught.value) for word in words)
