"""Training of a parallel drafter: who sees whom, what is learnt where, and a saved model that the proposer accepts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from specflow.errors import ConfigError
from specflow.proposers.pard import PardOptions, PardProposer
from specflow.training.distillation import divergence
from specflow.training.language_model import PretrainOptions, PretrainResult, build_model, objective, pretrain
from specflow.training.parallel_drafting import (
    ParallelObjective,
    ParallelRows,
    draw_rows,
    find_mask_token,
    parallel_agreement,
    parallel_logits,
    parallel_loss,
)
from specflow.training.token_data import encode, even_windows
from specflow.zoo.bundle import resolve
from tests.models import make_tokenizer, tiny_qwen3

TEXT = "def add(first, second):\n    return first + second\n\n\nfor step in range(10):\n    print(add(step, 1))\n" * 8
MASK = 3


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def all_rows(length: int, drafts: int) -> ParallelRows:
    return draw_rows(length, drafts, 1.0, 1.0, generator())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_qwen3(tmp_path_factory.mktemp("model"), layers=2)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tiny_qwen3(tmp_path_factory.mktemp("teacher"), layers=1, seed=5)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def windows(count: int, length: int) -> torch.Tensor:
    return torch.randint(4, 384, (count, length), generator=generator())


# -- rows ---------------------------------------------------------------------------------------------------------

# Three segments over the positions 0 to 3; one line per query row, one column per key row, written by hand.
SEEN = """
    1000 0000 0000
    1100 0000 0000
    1110 0000 0000
    1111 0000 0000

    0000 1000 0000
    1000 0100 0000
    1100 0010 0000
    1110 0001 0000

    0000 0000 1000
    0000 1000 0100
    1000 0100 0010
    1100 0010 0001
"""


def test_who_sees_whom() -> None:
    table = [[int(mark) for mark in line.replace(" ", "")] for line in SEEN.split("\n") if line.strip()]
    assert all_rows(4, 3).visible.int().tolist() == table


def test_one_row_of_a_longer_text() -> None:
    """Segment 2 at position 5 sees the text up to 3 and its own chain: 4 in segment 1 and itself."""
    rows = all_rows(7, 4)
    row = rows.visible[2 * 7 + 5]
    seen = list(zip(rows.segments[row].tolist(), rows.positions[row].tolist(), strict=True))
    assert seen == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (2, 5)]


def test_labels_without_text_before_them_are_ignored() -> None:
    """The first i rows of segment i stand for a text that would end before its first token."""
    assert all_rows(4, 3).counted.int().view(3, 4).tolist() == [[1, 1, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1]]


@pytest.mark.parametrize("seed", range(5))
def test_dropped_rows_leave_whole_chains(seed: int) -> None:
    rows = draw_rows(10, 4, 0.7, 0.2, generator(seed))
    kept = [rows.positions[rows.segments == segment].tolist() for segment in range(4)]
    assert [len(positions) for positions in kept] == [10, 7, 4, 3]  # int(10 * 0.7^i)
    for segment in range(1, 4):
        for position in kept[segment]:
            assert (position - 1) % 10 in kept[segment - 1]
    full = all_rows(10, 4)
    places = rows.segments * 10 + rows.positions
    counted = rows.counted
    assert torch.equal(rows.visible, full.visible[places][:, places])
    assert torch.equal(rows.visible[counted].sum(1), full.visible[places][counted].sum(1))  # nothing seen is lost


def test_draws_differ_and_have_one_size() -> None:
    source = generator()
    draws = [draw_rows(64, 6, 0.7, 0.2, source) for _ in range(4)]
    assert len({len(rows.positions) for rows in draws}) == 1
    assert not torch.equal(draws[0].positions, draws[1].positions)
    assert (draws[0].segments == 5).sum() == int(64 * 0.2)  # 0.7^5 is less


# -- logits and loss ----------------------------------------------------------------------------------------------


def test_text_rows_are_an_ordinary_model(model: Any) -> None:
    tokens = windows(2, 12)
    with torch.no_grad():
        found = parallel_logits(model, tokens, draw_rows(12, 4, 0.7, 0.2, generator()), MASK)[:, :12]
        torch.testing.assert_close(found, model(tokens).logits, rtol=1e-4, atol=1e-3)


def test_mask_rows_are_what_a_round_computes(model: Any) -> None:
    """Row (i, t) equals the last row of: the text up to t-i, then i masks."""
    tokens = windows(1, 9)
    rows = draw_rows(9, 4, 0.8, 0.5, generator())
    with torch.no_grad():
        found = parallel_logits(model, tokens, rows, MASK)[0]
        for index, (i, t) in enumerate(zip(rows.segments.tolist(), rows.positions.tolist(), strict=True)):
            if t >= i:
                alone = torch.tensor([[*tokens[0, : t - i + 1].tolist(), *[MASK] * i]])
                torch.testing.assert_close(found[index], model(alone).logits[0, -1], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_loss_by_hand(model: Any, teacher: Any, share: float) -> None:
    """Over counted rows only; every segment at t learns token t+1 and what the teacher says after the text up to t."""
    text = windows(2, 8)
    rows = draw_rows(7, 3, 0.7, 0.3, generator(1))
    with torch.no_grad():
        loss = parallel_loss(model, teacher, text, share, rows.segments, rows.positions, MASK)
        student, wanted = parallel_logits(model, text[:, :-1], rows, MASK), teacher(text[:, :-1]).logits
        entropies, distances = [], []
        for b in range(2):
            for index, (i, t) in enumerate(zip(rows.segments.tolist(), rows.positions.tolist(), strict=True)):
                if t >= i:
                    entropies.append(F.cross_entropy(student[b, index], text[b, t + 1]))
                    distances.append(divergence(student[b, index][None], wanted[b, t][None]))
    assert len(entropies) > 0
    expected = (1 - share) * torch.stack(entropies).mean() + share * torch.stack(distances).mean()
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-4)


def test_one_draft_is_the_ordinary_objective(model: Any, teacher: Any) -> None:
    text = windows(3, 10)
    rows = draw_rows(9, 1, 0.7, 0.2, generator())
    with torch.no_grad():
        found = parallel_loss(model, teacher, text, 0.9, rows.segments, rows.positions, MASK)
        torch.testing.assert_close(found, objective(model, teacher, text, 0.9), rtol=1e-4, atol=1e-4)


def test_measurements_use_the_same_rows_and_training_new_ones(model: Any) -> None:
    measure = ParallelObjective(PretrainOptions(output="m", parallel_drafts=4), MASK)
    text = windows(1, 33)
    with torch.no_grad():
        assert measure(model, None, text, 0.0) == measure(model, None, text, 0.0)
        model.train()
        losses = [measure(model, None, text, 0.0).item() for _ in range(2)]
        model.eval()
    assert losses[0] != losses[1]


def test_agreement_by_draft(model: Any) -> None:
    """A model against itself: its first draft is always the one chosen; later ones against rounds one by one."""
    prompts = windows(3, 6)
    found = parallel_agreement(model, model, prompts, 10, 0, 3, MASK)
    assert found[0] == 1.0
    hits, places = [0, 0, 0], [0, 0, 0]
    with torch.no_grad():
        for prompt in prompts:
            text = prompt.tolist()
            for _ in range(10):
                text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
            end = next((n for n in range(6, 16) if text[n] == 0), 15)
            for anchor in range(5, 15):
                drafts = model(torch.tensor([[*text[: anchor + 1], MASK, MASK]])).logits[0, anchor:].argmax(-1).tolist()
                for i in range(3):
                    if anchor + i + 1 <= end:
                        places[i] += 1
                        hits[i] += drafts[: i + 1] == text[anchor + 1 : anchor + i + 2]
    assert found == pytest.approx([hit / place for hit, place in zip(hits, places, strict=True)])


# -- whole runs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("corpus")
    (root / "module.py").write_text(TEXT)
    (root / "bisect.py").write_text(TEXT)
    return root


def options(corpus: Path, output: Path, **changes: Any) -> PretrainOptions:
    values: dict[str, Any] = {
        "output": str(output), "corpus_root": str(corpus), "vocabulary_size": 300, "hidden_size": 32,
        "intermediate_size": 64, "layers": 2, "heads": 2, "key_value_heads": 1, "head_dim": 16, "max_positions": 64,
        "sequence_length": 32, "batch_windows": 8, "steps": 60, "warmup_steps": 5, "learning_rate": 1e-2,
        "evaluate_every": 20, "log_every": 10, "bf16": False, "threads": 1, "agreement_prompts": 4,
        "agreement_prompt_tokens": 8, "agreement_new_tokens": 16,
    }  # fmt: skip
    return PretrainOptions(**values | changes)


@pytest.fixture(scope="module")
def ordinary(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> PretrainResult:
    return pretrain(options(corpus, tmp_path_factory.mktemp("target") / "model"))


@pytest.fixture(scope="module")
def parallel(corpus: Path, ordinary: PretrainResult, tmp_path_factory: pytest.TempPathFactory) -> PretrainResult:
    changes = {"distill_from": ordinary.output, "initialise_from": ordinary.output, "parallel_drafts": 3}
    return pretrain(options(corpus, tmp_path_factory.mktemp("pard") / "model", **changes))


def load(folder: str) -> PardProposer:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    facts = SimpleNamespace(name="target", vocab_size=300, num_token_ids=len(tokenizer), dtype=torch.float32)
    proposer = PardProposer(PardOptions(path=folder))
    target: Any = SimpleNamespace(tokenizer=tokenizer, facts=facts)
    proposer.load(target, SimpleNamespace(device=torch.device("cpu")))  # type: ignore[arg-type]
    return proposer


def test_a_few_steps_teach_the_masks(ordinary: PretrainResult, parallel: PretrainResult) -> None:
    assert parallel.history[-1][1] < parallel.history[0][1]
    assert len(parallel.agreement_by_draft) == 3
    assert list(parallel.agreement_by_draft) == sorted(parallel.agreement_by_draft, reverse=True)
    assert parallel.agreement_by_draft[2] > 0.5
    before = AutoModelForCausalLM.from_pretrained(ordinary.output).float()
    tokens = encode(AutoTokenizer.from_pretrained(ordinary.output), [TEXT])
    untrained = parallel_agreement(before, before, even_windows(tokens, 8, 4), 16, 0, 3, 1)
    assert untrained[0] == 1.0
    assert untrained[2] < 0.3


def test_what_is_saved_is_accepted_by_the_proposer(ordinary: PretrainResult, parallel: PretrainResult) -> None:
    assert ordinary.agreement_by_draft == ()
    described = load(parallel.output).describe()
    assert described["mask token"] == "1 (pard_token of config.json)"
    assert described["drafts in training"] == "3"
    config = AutoModelForCausalLM.from_pretrained(parallel.output).config
    assert (config.spd_type, config.pard_token, config.para_num) == ("pard", 1, 3)
    with pytest.raises(ConfigError, match="was not trained to draft in parallel"):
        load(ordinary.output)


def test_training_begins_with_the_given_weights(ordinary: PretrainResult, corpus: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(ordinary.output)
    given = AutoModelForCausalLM.from_pretrained(ordinary.output, dtype=torch.float32).state_dict()
    built = build_model(options(corpus, tmp_path, initialise_from=ordinary.output), tokenizer).state_dict()
    assert all(torch.equal(built[name], weight) for name, weight in given.items())
    with pytest.raises(ConfigError, match="has other sizes than the model to train") as caught:
        build_model(options(corpus, tmp_path, initialise_from=ordinary.output, layers=1), tokenizer)
    assert "model.layers.1" in str(caught.value)


def test_a_tokenizer_without_a_mask_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="parallel_drafts needs a mask token"):
        find_mask_token(make_tokenizer())
    assert find_mask_token(AutoTokenizer.from_pretrained(resolve("zoo:target"))) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"parallel_drafts": -1},
        {"parallel_keep": 0.0},
        {"parallel_keep_least": 1.5},
        {"parallel_drafts": 20, "agreement_new_tokens": 16},
    ],
)
def test_impossible_options_are_refused(corpus: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(changes))):
        options(corpus, Path("m"), **changes)
