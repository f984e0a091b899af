"""The draft model proposer, driven by contexts made by hand; transformers computes everything afresh beside it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare

from specflow.errors import CheckpointError, ConfigError
from specflow.kernels.noise import DRAFT, gumbel_noise
from specflow.proposers.draft_model import DraftModelOptions, DraftModelProposer
from tests.models import make_tokenizer, tiny_llama, tiny_qwen3
from tests.proposers.helpers import SLOTS, Bench, Row, after, fake_target

PROMPT = [5, 9, 200, 17, 33, 8, 90]
K = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("draft"), layers=2)


@pytest.fixture(params=["fused", "torch"])
def bench(request: pytest.FixtureRequest, folder: Path) -> Bench:
    """Both ways of running the steps."""
    found = Bench(folder, K)
    if request.param == "torch":
        found.proposer._pages.steps = None
    return found


def ids_of(draft: Any, row: int = 0) -> list[int]:
    return draft.token_ids[row].tolist()


@pytest.mark.parametrize("accepted", [[0], [1], [K], [K, K, 2, 0, 3, K], [0, 0, 1, K, 1]])
def test_catch_up_equals_fresh_recomputation(bench: Bench, accepted: list[int]) -> None:
    """D1 (partly accepted) and D2 (fully accepted), alone and in every order."""
    bench.start(0)
    tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
    for number, kept in enumerate([*accepted, 0]):
        draft = bench.step(Row(0, tokens, chunk, K))
        assert draft.num_drafts.tolist() == [K]
        assert ids_of(draft) == bench.greedy(tokens), f"round {number}"
        tokens, chunk = after(tokens, ids_of(draft), kept, 70 + number)


def test_one_token_prompt(bench: Bench) -> None:
    """C49."""
    bench.start(0)
    assert ids_of(bench.step(Row(0, [5, 44], (0, 1), K))) == bench.greedy([5, 44])


def test_single_committed_token(bench: Bench) -> None:
    """There is no second last token to feed again: positions stop at 0."""
    bench.start(0)
    assert ids_of(bench.step(Row(0, [5], (0, 0), K))) == bench.greedy([5])


@pytest.mark.parametrize("k", [1, 2, 7])
def test_other_lengths(folder: Path, k: int) -> None:
    bench = Bench(folder, k)
    bench.start(1)
    tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
    for kept in (k, k, 0, k):
        draft = bench.step(Row(1, tokens, chunk, k))
        assert ids_of(draft) == bench.greedy(tokens)
        tokens, chunk = after(tokens, ids_of(draft), kept, 70)


def test_chunked_prefill(bench: Bench) -> None:
    """While the prompt is being processed nothing is drafted, and the first draft is as if it came whole."""
    bench.start(0)
    prompt = PROMPT * 3
    for first, last in ((0, 5), (5, 13)):
        draft = bench.step(Row(0, prompt, (first, last), 0))
        assert draft.num_drafts.tolist() == [0]
    tokens = [*prompt, 44]
    assert ids_of(bench.step(Row(0, tokens, (13, len(prompt)), K))) == bench.greedy(tokens)


def test_rounds_without_drafts_are_followed(bench: Bench) -> None:
    """K = 0 for a while, before and after accepted drafts, then drafting again."""
    bench.start(0)
    tokens, chunk = [*PROMPT, 44], (0, len(PROMPT))
    for most, kept in ((K, K), (0, 0), (0, 0), (K, 2), (0, 0), (K, 0)):
        draft = bench.step(Row(0, tokens, chunk, most))
        assert draft.num_drafts.tolist() == [most]
        if most:
            assert ids_of(draft) == bench.greedy(tokens)
        tokens, chunk = after(tokens, ids_of(draft), kept, 71)


def test_limit_below_k(bench: Bench) -> None:
    bench.start(0)
    tokens = [*PROMPT, 44]
    draft = bench.step(Row(0, tokens, (0, len(PROMPT)), 2))
    assert draft.num_drafts.tolist() == [2]
    tokens, chunk = after(tokens, ids_of(draft), 2, 70)
    assert ids_of(bench.step(Row(0, tokens, chunk, K))) == bench.greedy(tokens)


def test_mixed_batch(bench: Bench) -> None:
    """A prompt chunk, a row at its limit and two drafting rows of different length in one call."""
    for slot in range(SLOTS):
        bench.start(slot)
    short, long = [*PROMPT, 44], [*PROMPT, *PROMPT, 45]
    draft = bench.step(
        Row(2, PROMPT * 2, (0, 6), 0),
        Row(0, short, (0, len(short) - 1), K),
        Row(3, [7, 8, 9], (0, 2), 0),
        Row(1, long, (0, len(long) - 1), K),
    )
    assert draft.num_drafts.tolist() == [0, K, 0, K]
    assert ids_of(draft, 1) == bench.greedy(short)
    assert ids_of(draft, 3) == bench.greedy(long)
    short, chunk = after(short, ids_of(draft, 1), 1, 70)
    done = [*PROMPT * 2, 46]
    draft = bench.step(Row(0, short, chunk, K), Row(2, done, (6, len(done) - 1), K), Row(3, [7, 8, 9, 10], (2, 3), K))
    for row, tokens in enumerate((short, done, [7, 8, 9, 10])):
        assert ids_of(draft, row) == bench.greedy(tokens)


def test_a_slot_is_used_again(bench: Bench) -> None:
    """After pre-emption or the end of a request nothing of the slot's last owner counts."""
    bench.start(0)
    bench.step(Row(0, [*PROMPT, 44], (0, len(PROMPT)), K))
    bench.proposer.finish("request-0", 0, [])
    bench.start(0)
    tokens = [3, 1, 4, 1, 5, 9, 2, 6, 5]
    assert ids_of(bench.step(Row(0, tokens, (0, 8), K))) == bench.greedy(tokens)


def test_drafting_at_the_context_limit(bench: Bench) -> None:
    """C48: drafts past the last position go to spare blocks; what counts is cut by max_drafts."""
    bench.start(0)
    limit = bench.limits.max_model_len
    tokens = (PROMPT * 20)[: limit - 1]
    draft = bench.step(Row(0, tokens, (0, limit - 2), 1))
    assert draft.num_drafts.tolist() == [1]
    assert ids_of(draft)[:1] == bench.greedy(tokens, 1)


def test_no_drafts_past_the_trained_positions(tmp_path: Path) -> None:
    bench = Bench(tiny_llama(tmp_path, layers=1, max_position_embeddings=10), K)
    bench.start(0)
    draft = bench.step(Row(0, [*PROMPT, 44], (0, len(PROMPT)), K))
    assert draft.num_drafts.tolist() == [2]


# -- probabilistic drafts -----------------------------------------------------------------------------------------


def probabilistic(folder: Path, k: int = K) -> Bench:
    return Bench(folder, k, draft_sample_method="probabilistic")


def test_first_drafts_follow_the_softmax(folder: Path) -> None:
    """4000 seeds against softmax(logits / T) by chi-square."""
    bench, temperature = probabilistic(folder, 1), 1.5
    tokens = [*PROMPT, 44]
    seen = []
    for seed in range(0, 4000, SLOTS):
        for slot in range(SLOTS):
            bench.start(slot)
        rows = [Row(slot, tokens, (0, len(PROMPT)), 1, temperature, seed + slot) for slot in range(SLOTS)]
        seen += bench.step(*rows).token_ids[:, 0].tolist()
    with torch.no_grad():
        logits = bench.model(torch.tensor([tokens])).logits[0, -1]
    expected = torch.softmax(logits.double() / temperature, -1).numpy() * len(seen)
    observed = np.bincount(seen, minlength=len(expected))
    large = expected >= 5
    counts = np.append(observed[large], observed[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    assert chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue > 1e-4


def test_stored_law_is_the_sampled_one(folder: Path) -> None:
    """The noise is a function of seed and position, so each draft can be drawn again from the stored logits."""
    bench = probabilistic(folder)
    rows = [Row(slot, [*PROMPT, 44 + slot], (0, len(PROMPT)), K, 0.8, 100 + slot) for slot in range(3)]
    for row in rows:
        bench.start(row.slot)
    draft = bench.step(*rows)
    assert draft.logits is not None
    assert draft.logits.shape == (3, K, 384)
    for b, row in enumerate(rows):
        for i in range(K):
            position = torch.tensor([len(row.tokens) + i])
            noise = gumbel_noise(torch.tensor([row.seed]), position, DRAFT, 384)[0]
            assert int((draft.logits[b, i] + noise).argmax()) == int(draft.token_ids[b, i])
            context = torch.tensor([row.tokens + ids_of(draft, b)[:i]])
            with torch.no_grad():
                fresh = bench.model(context).logits[0, -1] / row.temperature
            torch.testing.assert_close(draft.logits[b, i], fresh, rtol=1e-4, atol=1e-4 * float(fresh.abs().max()))


def test_same_seed_same_drafts_alone_and_in_a_batch(folder: Path) -> None:
    bench = probabilistic(folder)
    rows = [Row(slot, [*PROMPT, 44 + slot], (0, len(PROMPT)), K, 1.0, 7) for slot in range(3)]
    for row in rows:
        bench.start(row.slot)
    together = bench.step(*rows).token_ids.tolist()
    alone = []
    for row in rows:
        bench.start(row.slot)
        alone.append(bench.step(row).token_ids[0].tolist())
    assert together == alone


def test_greedy_rows_of_a_mixed_batch(folder: Path) -> None:
    """Temperature 0 takes the highest logit and stores a one-hot law; a row without drafts stores nothing."""
    bench = probabilistic(folder)
    tokens = [*PROMPT, 44]
    for slot in range(3):
        bench.start(slot)
    chunk = (0, len(PROMPT))
    draft = bench.step(Row(0, tokens, chunk, K, 0.0), Row(1, tokens, chunk, 0), Row(2, tokens, chunk, K, 1.0, 3))
    assert draft.logits is not None
    assert ids_of(draft) == bench.greedy(tokens)
    law = torch.softmax(draft.logits[0], -1)
    assert torch.equal(law, torch.nn.functional.one_hot(draft.token_ids[0], 384).float())
    assert torch.softmax(draft.logits[2], -1).max() < 1
    assert draft.num_drafts.tolist() == [K, 0, K]


def test_all_greedy_batch_has_no_logits(folder: Path) -> None:
    bench = probabilistic(folder)
    bench.start(0)
    assert bench.step(Row(0, [*PROMPT, 44], (0, len(PROMPT)), K)).logits is None


# -- vocabularies -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize(("target_size", "draft_size"), [(64, 72), (72, 64)])
def test_padded_vocabularies(tmp_path: Path, method: str, target_size: int, draft_size: int) -> None:
    """C43: 60 real tokens, other padding on either side, a draft model that prefers padding."""
    folder = tiny_llama(tmp_path, vocab=draft_size, layers=1)
    saved = load_file(folder / "model.safetensors")
    saved["lm_head.weight"][60:] = 50.0 * saved["lm_head.weight"][60:].sign()
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    make_tokenizer(60).save_pretrained(folder)
    bench = Bench(folder, K, vocab=target_size, draft_sample_method=method)
    bench.start(0)
    # The target's own padding may stand in the text: the draft has no embedding for 70 when it has 64 rows.
    tokens, temperature = [5, 9, 33, target_size - 1, 8, 44], float(method == "probabilistic")
    for seed in range(20):
        bench.start(0)
        draft = bench.step(Row(0, tokens, (0, 5), K, temperature, seed))
        assert draft.token_ids.max() < 60
        if draft.logits is not None:
            assert draft.logits.shape[-1] == target_size
            assert torch.isneginf(draft.logits[..., 60:]).all()
            assert draft.logits[..., :60].isfinite().all()


def load_against(folder: Path, tokenizer: Any, vocab: int) -> None:
    proposer = DraftModelProposer(DraftModelOptions(path=str(folder)))
    proposer.load(fake_target(folder, vocab, tokenizer), SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]


def test_other_tokenizer_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_against(folder, make_tokenizer(300), 320)
    message = str(caught.value)
    assert all(
        word in message for word in ("300 tokens", "320 logits", "384 tokens", "384 logits", str(folder), "Tokenizer")
    )


def test_same_size_other_ids_is_refused(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(384)}
    other = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w0")))
    with pytest.raises(ConfigError, match="id 0 is 'w0' for the target"):
        load_against(folder, other, 384)


def test_additional_chat_marks_are_accepted(folder: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    load_against(folder, tokenizer, 400)


def test_draft_without_tokenizer(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path, layers=1)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="has no usable tokenizer"):
        load_against(folder, make_tokenizer(), 384)


# -- the rest -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fused", "torch"])
def test_logits_that_are_not_numbers(tmp_path: Path, way: str) -> None:
    """C40: the row drafts nothing from there on, the others are untouched, and it is counted."""
    folder = tiny_llama(tmp_path, layers=1)
    saved = load_file(folder / "model.safetensors")
    saved["model.embed_tokens.weight"][13] = float("nan")
    save_file(saved, folder / "model.safetensors", {"format": "pt"})
    bench = Bench(folder, K)
    if way == "torch":
        bench.proposer._pages.steps = None
    good, bad = [*PROMPT, 44], [*PROMPT, 13]
    bench.start(0), bench.start(1)
    assert "warning" not in bench.proposer.describe()
    draft = bench.step(Row(0, bad, (0, len(PROMPT)), K), Row(1, good, (0, len(PROMPT)), K))
    assert draft.num_drafts.tolist() == [0, K]
    assert ids_of(draft, 1) == bench.greedy(good)
    assert bench.proposer.nan_drafts == 1
    assert "draft_model" in bench.proposer.describe()["warning"]


def test_infinite_head_column(folder: Path) -> None:
    bench = Bench(folder, K)
    bench.proposer._weights.head[:, 3] = float("inf")
    bench.start(0)
    assert bench.step(Row(0, [*PROMPT, 44], (0, len(PROMPT)), K)).num_drafts.tolist() == [0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_run(folder: Path, dtype: str) -> None:
    bench = Bench(folder, K, dtype=dtype)
    bench.start(0)
    draft = bench.step(Row(0, [*PROMPT, 44], (0, len(PROMPT)), K))
    assert draft.num_drafts.tolist() == [K]
    assert bench.proposer.describe()["dtype"] == dtype
    assert bench.proposer.describe()["drafting steps"] == "plain torch"


def test_describe_names_what_is_in_memory(folder: Path) -> None:
    """C54 and C78."""
    bench = Bench(folder, K)
    described = bench.proposer.describe()
    assert str(folder) in described["model"]
    assert "Qwen3ForCausalLM" in described["model"]
    count = sum(parameter.numel() for parameter in bench.model.parameters())
    assert described["parameters"] == f"{count:,}"
    assert len(described["weights"]) == 16
    assert described["drafting steps"] == "fused CPU kernels"


def test_requirements(folder: Path) -> None:
    requirements = Bench(folder, K).proposer.requirements()
    assert requirements.lookahead_tokens == K
    assert requirements.kv_bytes_per_token == 2 * 2 * 2 * 16 * 4
    assert not requirements.draft_logits
    assert probabilistic(folder).proposer.requirements().draft_logits


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
        DraftModelOptions(**options)
    assert all(word in str(caught.value) for word in words)
