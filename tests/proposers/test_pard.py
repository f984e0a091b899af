"""The parallel drafter, driven by contexts made by hand; transformers computes text and masks afresh beside it."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare

from specflow.checkpoints.mask_token import MASK_KEYS, MaskToken, find_mask_token
from specflow.core.draft import Draft
from specflow.errors import ConfigError
from specflow.kernels.noise import DRAFT, gumbel_noise
from specflow.proposers.mask_watch import MaskWatch
from specflow.proposers.pard import PardOptions, PardProposer
from tests.models import add_to_config, tiny_llama, tiny_mistral, tiny_qwen3
from tests.proposers.helpers import SLOTS, Bench, Row, after, fake_target

PROMPT = [5, 9, 200, 17, 33, 8, 90]
MASK = 3
K = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_to_config(
        tiny_qwen3(tmp_path_factory.mktemp("pard"), layers=2), spd_type="pard", pard_token=MASK, para_num=8
    )


@pytest.fixture(params=["fused", "torch"])
def way(request: pytest.FixtureRequest) -> str:
    """Both ways of running a round."""
    return request.param


def make_bench(folder: Path, k: int = K, way: str = "fused", **options: Any) -> Bench:
    bench = Bench(folder, k, method="pard", **options)
    if way == "torch":
        bench.proposer._pages.steps = None
    return bench


@pytest.fixture
def bench(folder: Path, way: str) -> Bench:
    return make_bench(folder, K, way)


def ids_of(draft: Draft, row: int = 0) -> list[int]:
    return draft.token_ids[row].tolist()


@pytest.mark.parametrize("accepted", [[0], [1], [K], [K, K, 2, 0, 3, K], [0, 0, 1, K, 1]])
def test_drafts_equal_fresh_recomputation(bench: Bench, accepted: list[int]) -> None:
    """Whatever the masks of earlier rounds have left in the pages is overwritten before it is read."""
    bench.start(0)
    tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
    for number, kept in enumerate([*accepted, 0]):
        draft = bench.step(Row(0, tokens, chunk, K))
        assert draft.num_drafts.tolist() == [K]
        assert ids_of(draft) == bench.parallel(tokens, MASK), f"round {number}"
        tokens, chunk = after(tokens, ids_of(draft), kept, 70 + number)


@pytest.mark.parametrize("seed", range(3))
def test_random_rounds_of_a_ragged_batch(bench: Bench, seed: int) -> None:
    """Requests of other lengths that accept anything, sometimes draft nothing, sometimes are not in the step, and are
    now and then pre-empted, in random order."""
    rng = random.Random(seed)
    texts = {slot: [rng.randrange(1, 384) for _ in range(rng.choice((1, 2, 3, 6, 14)))] for slot in range(SLOTS)}
    chunks = {slot: (0, len(text) - 1) for slot, text in texts.items()}
    for slot in texts:
        bench.start(slot)
    for _ in range(12):
        rows = [
            Row(slot, texts[slot], chunks[slot], rng.choice((0, K, K, 2)))
            for slot in rng.sample(range(SLOTS), rng.randint(1, SLOTS))
            if len(texts[slot]) + 2 * K < bench.limits.max_model_len
        ]
        if not rows:
            break
        draft = bench.step(*rows)
        for index, row in enumerate(rows):
            kept = 0
            if row.max_drafts:
                assert ids_of(draft, index) == bench.parallel(row.tokens, MASK)
                kept = rng.choice((0, 1, row.max_drafts, row.max_drafts))
            slot = row.slot
            texts[slot], chunks[slot] = after(row.tokens, ids_of(draft, index), kept, rng.randrange(1, 384))
            if rng.random() < 0.15:
                bench.proposer.finish(f"request-{slot}", slot, [])
                bench.start(slot)
                chunks[slot] = (0, len(texts[slot]) - 1)


def test_one_pass_per_round(folder: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 2K tokens per request, whatever was accepted."""
    bench = make_bench(folder, K, way)
    runs: list[int] = []
    runner, method = (
        (bench.proposer._pages.decoder, "forward") if way == "torch" else (bench.proposer._pages.steps, "run")
    )
    inner = getattr(runner, method)
    monkeypatch.setattr(runner, method, lambda ids, *rest: runs.append(len(ids)) or inner(ids, *rest))
    tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
    bench.start(0)
    bench.start(1)
    bench.step(Row(0, tokens, chunk, 0), Row(1, tokens, chunk, 0))
    runs.clear()
    for kept in (K, 0, 2):
        draft = bench.step(Row(0, tokens, chunk, K), Row(1, tokens, chunk, K))
        tokens, chunk = after(tokens, ids_of(draft), kept, 70)
    assert runs == [2 * 2 * K] * 3


@pytest.mark.parametrize("length", [1, 2, K, K + 1, K + 2])
def test_contexts_shorter_than_what_is_fed_again(bench: Bench, length: int) -> None:
    """Surplus rows neither read nor spoil anything, in this round and the next."""
    bench.start(0)
    tokens, chunk = PROMPT[:length], (0, length - 1)
    for kept in (1, K):
        draft = bench.step(Row(0, tokens, chunk, K))
        assert ids_of(draft) == bench.parallel(tokens, MASK)
        tokens, chunk = after(tokens, ids_of(draft), kept, 71)


@pytest.mark.parametrize("k", [1, 2, 7, 12])
def test_other_lengths(folder: Path, way: str, k: int) -> None:
    """With K = 1 there is no mask at all."""
    bench = make_bench(folder, k, way)
    bench.start(1)
    tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
    for kept in (k, 0, k // 2, k):
        draft = bench.step(Row(1, tokens, chunk, k))
        assert ids_of(draft) == bench.parallel(tokens, MASK)
        tokens, chunk = after(tokens, ids_of(draft), kept, 70)


def test_a_sliding_window(tmp_path: Path, way: str) -> None:
    folder = add_to_config(tiny_mistral(tmp_path, layers=2), pard_token=MASK)
    bench = make_bench(folder, K, way)
    bench.start(0)
    tokens, chunk = [*PROMPT, *PROMPT, 44], (0, 2 * len(PROMPT))
    for kept in (K, 1, 0):
        draft = bench.step(Row(0, tokens, chunk, K))
        assert ids_of(draft) == bench.parallel(tokens, MASK)
        tokens, chunk = after(tokens, ids_of(draft), kept, 70)


def test_chunked_prefill(bench: Bench) -> None:
    bench.start(0)
    prompt = PROMPT * 3
    for first, last in ((0, 5), (5, 13)):
        assert bench.step(Row(0, prompt, (first, last), 0)).num_drafts.tolist() == [0]
    tokens = [*prompt, 44]
    assert ids_of(bench.step(Row(0, tokens, (13, len(prompt)), K))) == bench.parallel(tokens, MASK)


def test_rounds_without_drafts_are_followed(bench: Bench) -> None:
    """K = 0 for longer than a round's catch-up, before and after accepted drafts, then drafting again."""
    bench.start(0)
    tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
    for most, kept in ((K, K), *[(0, 0)] * (K + 3), (K, 2), (0, 0), (K, K), (K, 0)):
        draft = bench.step(Row(0, tokens, chunk, most))
        assert draft.num_drafts.tolist() == [most]
        if most:
            assert ids_of(draft) == bench.parallel(tokens, MASK)
        tokens, chunk = after(tokens, ids_of(draft), kept, 71)


def test_a_slot_is_used_again(bench: Bench) -> None:
    bench.start(0)
    bench.step(Row(0, [*PROMPT, 44], (0, len(PROMPT)), K))
    bench.proposer.finish("request-0", 0, [])
    bench.start(0)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    assert ids_of(bench.step(Row(0, tokens, (0, 8), K))) == bench.parallel(tokens, MASK)


def test_drafting_at_the_context_limit(bench: Bench) -> None:
    """Masks past the last position go to spare blocks; what counts is cut by max_drafts."""
    bench.start(0)
    limit = bench.limits.max_model_len
    tokens = (PROMPT * 20)[: limit - 1]
    draft = bench.step(Row(0, tokens, (0, limit - 2), 1))
    assert draft.num_drafts.tolist() == [1]
    assert ids_of(draft)[:1] == bench.parallel(tokens, MASK)[:1]


def test_no_drafts_past_the_trained_positions(tmp_path: Path, way: str) -> None:
    folder = add_to_config(tiny_llama(tmp_path, layers=1, max_position_embeddings=10), pard_token=MASK)
    bench = make_bench(folder, K, way)
    bench.start(0)
    draft = bench.step(Row(0, [*PROMPT, 44], (0, len(PROMPT)), K))
    assert draft.num_drafts.tolist() == [2]
    assert ids_of(draft)[:2] == bench.parallel([*PROMPT, 44], MASK)[:2]


def test_a_given_mask_token_is_used(folder: Path) -> None:
    bench = make_bench(folder, mask_token_id=9)
    bench.start(0)
    tokens = [*PROMPT, 44]
    found = ids_of(bench.step(Row(0, tokens, (0, len(PROMPT)), K)))
    assert found == bench.parallel(tokens, 9) != bench.parallel(tokens, MASK)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run(folder: Path, dtype: str) -> None:
    bench = make_bench(folder, dtype=dtype)
    bench.start(0)
    assert bench.step(Row(0, [*PROMPT, 44], (0, len(PROMPT)), K)).num_drafts.tolist() == [K]
    assert bench.proposer.describe()["dtype"] == dtype


def test_logits_that_are_not_numbers(tmp_path: Path, way: str) -> None:
    """A broken anchor leaves no draft, and neighbours are untouched. A broken mask spoils what comes from masks, and
    in plain torch, where a hidden value still counts as 0 * NaN, the first draft too."""
    folder = add_to_config(tiny_llama(tmp_path, layers=1), pard_token=MASK)
    saved = load_file(folder / "model.safetensors")
    saved["model.embed_tokens.weight"][13] = float("nan")
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    good, bad, chunk = [*PROMPT, 44], [*PROMPT, 13], (0, len(PROMPT))
    bench = make_bench(folder, K, way)
    bench.start(0), bench.start(1)
    draft = bench.step(Row(0, bad, chunk, K), Row(1, good, chunk, K))
    assert draft.num_drafts.tolist() == [0, K]
    assert ids_of(draft, 1) == bench.parallel(good, MASK)
    assert "pard: logits were not finite in 1 rounds" in bench.proposer.describe()["warning"]
    bench = make_bench(folder, K, way, mask_token_id=13)
    bench.start(0)
    assert bench.step(Row(0, good, chunk, K)).num_drafts.tolist() == [1 if way == "fused" else 0]


# -- probabilistic drafts -----------------------------------------------------------------------------------------


def test_drafts_follow_the_softmax(folder: Path) -> None:
    """4000 seeds against softmax(logits / T) by chi-square, at the anchor and at a mask, and independent of each
    other: no draft depends on an earlier one."""
    bench, temperature = make_bench(folder, 3, draft_sample_method="probabilistic"), 0.8
    tokens = [*PROMPT, 44]
    seen = []
    for seed in range(0, 4000, SLOTS):
        for slot in range(SLOTS):
            bench.start(slot)
        rows = [Row(slot, tokens, (0, len(PROMPT)), 3, temperature, seed + slot) for slot in range(SLOTS)]
        seen += bench.step(*rows).token_ids.tolist()
    laws = torch.softmax(bench.parallel_logits(tokens, MASK).double() / temperature, -1).numpy()
    drawn = np.array(seen)
    for index in (0, 2):
        assert _p_value(np.bincount(drawn[:, index], minlength=384), laws[index]) > 1e-4
    pairs = np.bincount(drawn[:, 0] * 384 + drawn[:, 1], minlength=384 * 384)
    assert _p_value(pairs, np.outer(laws[0], laws[1]).ravel()) > 1e-4


def _p_value(observed: np.ndarray, law: np.ndarray) -> float:
    expected = law * observed.sum()
    large = expected >= 5
    counts = np.append(observed[large], observed[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    assert len(counts) > 4
    return float(chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue)


def test_stored_law_is_the_sampled_one(folder: Path, way: str) -> None:
    bench = make_bench(folder, K, way, draft_sample_method="probabilistic")
    rows = [Row(slot, [*PROMPT, 44 + slot], (0, len(PROMPT)), K, 0.8, 100 + slot) for slot in range(3)]
    for row in rows:
        bench.start(row.slot)
    draft = bench.step(*rows)
    assert draft.logits is not None
    assert draft.logits.shape == (3, K, 384)
    for b, row in enumerate(rows):
        fresh = bench.parallel_logits(row.tokens, MASK) / row.temperature
        torch.testing.assert_close(draft.logits[b], fresh, rtol=1e-4, atol=1e-4 * float(fresh.abs().max()))
        for i in range(K):
            noise = gumbel_noise(torch.tensor([row.seed]), torch.tensor([len(row.tokens) + i]), DRAFT, 384)[0]
            assert int((draft.logits[b, i] + noise).argmax()) == int(draft.token_ids[b, i])


def test_greedy_rows_of_a_mixed_batch(folder: Path) -> None:
    bench = make_bench(folder, draft_sample_method="probabilistic")
    tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
    for slot in range(3):
        bench.start(slot)
    draft = bench.step(Row(0, tokens, chunk, K, 0.0), Row(1, tokens, chunk, 0), Row(2, tokens, chunk, K, 1.0, 3))
    assert draft.logits is not None
    assert ids_of(draft) == bench.parallel(tokens, MASK)
    law = torch.softmax(draft.logits[0], -1)
    assert torch.equal(law, torch.nn.functional.one_hot(draft.token_ids[0], 384).float())
    assert torch.softmax(draft.logits[2], -1).max() < 1
    assert draft.num_drafts.tolist() == [K, 0, K]


# -- who is a parallel drafter ------------------------------------------------------------------------------------


def load(folder: Path, **options: Any) -> PardProposer:
    proposer = PardProposer(PardOptions(path=str(folder), **options))
    proposer.load(fake_target(folder, 384), SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
    return proposer


def test_an_ordinary_model_is_refused(llama_folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load(llama_folder)
    message = str(caught.value)
    assert all(word in message for word in (str(llama_folder), *MASK_KEYS, "+proposer=draft_model", "mask_token_id"))


def test_an_ordinary_model_with_a_mask_token_is_refused(tmp_path: Path) -> None:
    folder = add_to_config(tiny_llama(tmp_path, layers=1), mask_token_id=4)
    with pytest.raises(ConfigError) as caught:
        load(folder)
    message = str(caught.value)
    assert all(word in message for word in (str(folder), "mask_token_id=4", "spd_type", "+proposer=draft_model"))
    assert load(folder, mask_token_id=4).describe()["mask token"] == "4 (proposer.mask_token_id)"
    assert load(add_to_config(folder, spd_type="pard")).describe()["mask token"] == "4 (mask_token_id of config.json)"


@pytest.mark.parametrize("value", [-1, 384, "3", True])
def test_a_mask_token_outside_the_vocabulary_is_refused(tmp_path: Path, value: object) -> None:
    """-1 is what PARD's training code writes when it was told no unused token."""
    folder = add_to_config(tiny_llama(tmp_path, layers=1), spd_type="pard", pard_token=value)
    with pytest.raises(ConfigError, match=f"pard_token={value} in its config.json is no id from 0 to 383"):
        load(folder)
    load(folder, mask_token_id=383)


@pytest.mark.parametrize("given", [-1, 384])
def test_a_given_mask_token_outside_the_vocabulary_is_refused(folder: Path, given: int) -> None:
    with pytest.raises(ConfigError, match=f"mask_token_id={given}.*0 to 383"):
        load(folder, mask_token_id=given)


def test_the_mask_token_is_looked_for_in_order() -> None:
    config: dict[str, Any] = {"ptd_token_id": 5, "vocab_size": 9}
    assert find_mask_token({"vocab_size": 9, "mask_token_id": None, "dflash_config": 3}) is None
    for key, value in (("pard_token", 4), ("mask_token_id", 2)):
        config[key] = value
        assert find_mask_token(config) == MaskToken(key, value)
    config["dflash_config"] = {"mask_token_id": 1}
    assert find_mask_token(config) == MaskToken("dflash_config.mask_token_id", 1)


# -- the rest -----------------------------------------------------------------------------------------------------


def test_description_and_requirements(folder: Path) -> None:
    proposer = make_bench(folder).proposer
    described = proposer.describe()
    assert described["mask token"] == f"{MASK} (pard_token of config.json)"
    assert described["drafts in training"] == "8"
    assert described["drafting steps"] == "fused CPU kernels"
    assert "warning" not in described
    requirements = proposer.requirements()
    assert requirements.lookahead_tokens == K
    assert requirements.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert not requirements.draft_logits


@pytest.mark.parametrize(
    ("accepted", "warns"), [([1, 0, 1, 1], True), ([K, 0, 1, 2], False), ([0, 0, 0, 0], False), ([K, K, K, K], False)]
)
def test_masks_that_do_not_work_are_noticed(folder: Path, accepted: list[int], warns: bool) -> None:
    """First drafts are good, those from masks are not: said after a few hundred rounds, by host numbers alone."""
    bench = make_bench(folder)
    bench.proposer._watch._rounds = bench.proposer._watch._first = 0
    for number in range(100):
        bench.start(0)
        tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
        for kept in accepted:
            bench.proposer._watch.see(_host(tokens, chunk))
            tokens, chunk = after(tokens, [7] * K, kept, 70)
        bench.proposer._watch.see(_host(tokens, chunk))
        if number < 70:
            assert "warning" not in bench.proposer.describe()
    assert ("mask token" in bench.proposer.describe().get("warning", "")) == warns


def _host(tokens: list[int], chunk: tuple[int, int]) -> Any:
    whole = {"slots": 0, "num_tokens": len(tokens), "chunk_start": chunk[0], "chunk_len": chunk[1] - chunk[0]}
    arrays = {name: np.array([value]) for name, value in whole.items()}
    return SimpleNamespace(**arrays, max_drafts=np.array([K]), wants_drafts=np.array([True]))


def test_rounds_of_another_owner_do_not_count() -> None:
    watch = MaskWatch(SLOTS, K)
    watch.see(_host([*PROMPT, 44], (0, len(PROMPT))))
    watch.forget(0)
    watch.see(_host([*PROMPT, 44, 45], (len(PROMPT), len(PROMPT) + 1)))
    assert watch._rounds == 0
