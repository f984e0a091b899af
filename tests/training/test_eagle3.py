"""Training of EAGLE-3 heads: the unrolled head is the drafting chain, and a label is counted where it should be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.checkpoints.eagle3 import load_eagle3
from specflow.errors import ConfigError
from specflow.targets.base import TokenTables
from specflow.training.eagle3 import Eagle3Training, Eagle3TrainingOptions, choose_ids, training_layers
from specflow.training.objective import TrainBatch
from tests.heads.eagle3_helpers import VARIANTS, VOCAB, chain, make_head, tiny_facts
from tests.training.eagle3_helpers import make_batch, make_training, part_of, random_tables

COUNTS = torch.arange(VOCAB).flip(0)
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"fc_norm": False, "norm_output": False, "qk_norm": False},
    "eagle3.1": {},
    "norm_before_fc": {"fc_norm": False, "norm_before_fc": True, "norm_before_residual": True},
    "two_layers": {"num_layers": 2},
    "reduced": {"draft_vocab_size": 100},
    "trained head": {"train_head": True, "draft_vocab_size": 100},
}


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name != "five_captures"])
def test_the_unrolled_head_is_the_drafting_chain(variant: str) -> None:
    """Step s of row t equals a chain drafted from row t that is fed the true tokens, logit for logit."""
    training, head = make_training(), make_head(**VARIANTS[variant])
    training.module = head
    batch = make_batch([11])
    steps = [head.logits(normed) for normed in training.unroll(batch)]
    for row in range(2, 6):
        truth = batch.token_ids[row + 2 : row + 2 + len(steps)].tolist()
        _, logits = chain(head, batch.token_ids[: row + 2], batch.hidden, truth)
        for step in range(len(steps)):
            torch.testing.assert_close(steps[step][row], logits[step], atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", list(KINDS))
def test_packed_documents_are_as_if_alone(kind: str) -> None:
    training = make_training(COUNTS, **KINDS[kind])
    batch = make_batch([9, 1, 4, 12], padding=5)
    whole = training.loss(batch)
    parts = [training.loss(part_of(batch, number)) for number in range(4)]
    torch.testing.assert_close(whole.total, sum(part.total for part in parts))
    torch.testing.assert_close(whole.weight, sum(part.weight for part in parts))
    for name, (total, count) in whole.measures.items():
        torch.testing.assert_close(total, sum(part.measures[name][0] for part in parts))
        assert count == sum(part.measures[name][1] for part in parts)
    whole.total.backward()
    for name, weight in training.module.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


def test_which_labels_count() -> None:
    """A token may be a label at step s if it is marked and stands s + 2 or more into its document: no earlier gate."""
    training = make_training()
    batch = make_batch([10, 5], padding=3, prompt=2)
    counts = [int(training.loss(batch).measures[f"accuracy/{step}"][1]) for step in range(4)]
    assert counts == [8 + 3, 7 + 2, 6 + 1, 5 + 0]
    prompted = replace(batch, predicted=batch.predicted & (batch.positions >= 4))
    counts = [int(training.loss(prompted).measures[f"accuracy/{step}"][1]) for step in range(4)]
    assert counts == [6 + 1, 6 + 1, 6 + 1, 5 + 0]
    expected = sum(count * 0.8**step for step, count in enumerate(counts))
    assert float(training.loss(prompted).weight) == pytest.approx(expected)


def test_a_pack_without_labels() -> None:
    batch = make_batch([6])
    parts = make_training().loss(replace(batch, predicted=torch.zeros_like(batch.predicted)))
    assert float(parts.weight) == float(parts.total.detach()) == 0.0


def test_labels_are_the_distributions_that_the_target_has_there() -> None:
    """With a target that is certain of token t + 1 at row t, the loss is the cross-entropy of the true tokens."""
    training = make_training()
    batch = make_batch([8])
    tables = random_tables()
    normalised = torch.nn.functional.normalize(tables.head, dim=1)
    training._tables = replace(tables, head=normalised * 1e3)
    certain = normalised[batch.token_ids.roll(-1)]
    parts = training.loss(replace(batch, last_hidden=certain))
    with torch.no_grad():
        steps = training.unroll(batch)
    total = 0.0
    for step, normed in enumerate(steps):
        log = torch.log_softmax(training.module.logits(normed), -1).detach()
        for row in range(8):
            if row + 2 + step < 8:
                total -= 0.8**step * float(log[row, batch.token_ids[row + 2 + step]])
    assert float(parts.total.detach()) == pytest.approx(total, rel=1e-4)


def test_autocast() -> None:
    training = make_training(train_head=True)
    batch = make_batch([30, 20])
    exact = training.loss(batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = training.loss(
            replace(batch, hidden=batch.hidden.bfloat16(), last_hidden=batch.last_hidden.bfloat16())
        )
    assert rounded.total.dtype == torch.float32
    torch.testing.assert_close(rounded.total, exact.total, rtol=0.02, atol=0.1)
    rounded.total.backward()
    assert {weight.grad.dtype for weight in training.module.parameters() if weight.grad is not None} == {torch.float32}


def test_recomputing_changes_nothing() -> None:
    training = make_training()
    batch = make_batch([30, 20])
    training.loss(batch).total.backward()
    kept = [weight.grad.clone() for weight in training.module.parameters() if weight.grad is not None]
    training.module.zero_grad()
    training.recompute = True
    training.loss(batch).total.backward()
    again = [weight.grad for weight in training.module.parameters() if weight.grad is not None]
    for one, other in zip(kept, again, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", list(KINDS))
def test_saved_heads_are_those_that_were_trained(tmp_path: Path, kind: str) -> None:
    training = make_training(COUNTS, **KINDS[kind])
    with torch.no_grad():
        for weight in training.module.parameters():
            weight.copy_(weight.bfloat16())
    training.save(tmp_path)
    facts = tiny_facts()
    loaded = load_eagle3(tmp_path, facts, random_tables(), device=torch.device("cpu"), dtype=torch.float32)
    batch = make_batch([9])
    before = [training.module.logits(normed) for normed in training.unroll(batch)]
    ids = training.module.ids if training.module.config.reduced else None
    training.module = loaded.head
    after = [training.module.logits(normed) for normed in training.unroll(batch)]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(one, other, atol=0.05, rtol=0.05)  # a reduced head's rows are stored in bfloat16
    assert ids is None or torch.equal(loaded.head.ids, ids)
    assert ("head" in loaded.borrowed) == (kind not in ("reduced", "trained head"))


def test_the_draft_vocabulary_goes_with_the_weights() -> None:
    """A head that goes on keeps its ids, whatever the counts are now."""
    first = make_training(COUNTS, draft_vocab_size=100)
    again = make_training(COUNTS.flip(0), draft_vocab_size=100)
    assert not torch.equal(first.module.ids, again.module.ids)
    again.load_state(first.state())
    again.module.load_state_dict(first.module.state_dict())
    batch = make_batch([12])
    torch.testing.assert_close(again.loss(batch).total, first.loss(batch).total)
    with pytest.raises(ConfigError, match="all ids"):
        first.load_state({})
    with pytest.raises(ConfigError, match="50 ids"):
        first.load_state({"ids": torch.arange(50)})
    assert make_training().state() == {}


def test_choosing_ids() -> None:
    counts = torch.tensor([0, 5, 5, 1, 9, 5, 0])
    assert choose_ids(counts, 3, ()).tolist() == [1, 2, 4]
    assert choose_ids(counts, 3, (0,)).tolist() == [0, 1, 4]
    assert choose_ids(counts, 6, ()).tolist() == [0, 1, 2, 3, 4, 5]


def test_layers_of_shallow_targets() -> None:
    """C32."""
    assert training_layers(30) == (1, 14, 26)
    assert training_layers(8) == (1, 3, 4)
    for num_layers in range(1, 40):
        layers = training_layers(num_layers)
        assert len(layers) == (2 if num_layers == 1 else 3)
        assert layers == tuple(sorted(set(layers)))
        assert layers[0] >= -1
        assert layers[-1] < num_layers


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ttt_length": 0}, "ttt_length=0"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"head_dim": 3}, "head_dim=3"),
        ({"step_loss_decay": 0.0}, "step_loss_decay"),
        ({"loss": "tv"}, "loss='tv'"),
        ({"draft_vocab_size": 0}, "draft_vocab_size=0"),
        ({"norm_before_fc": True, "fc_norm": True}, "two ways"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Eagle3TrainingOptions(**options)


@pytest.mark.parametrize(
    ("options", "counts", "words"),
    [
        ({"layers": (0, 4)}, None, "no layer 4"),
        ({"layers": (-2, 1)}, None, "no layer -2"),
        ({"draft_vocab_size": VOCAB + 1}, COUNTS, "more than the target's 384"),
        ({"draft_vocab_size": 100}, None, "no counts"),
        ({"num_heads": 4, "num_kv_heads": 3}, None, "num_kv_heads=3"),
    ],
)
def test_options_that_do_not_fit_the_target(options: dict[str, Any], counts: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_training(counts, **options)


def test_default_sizes() -> None:
    facts = tiny_facts(hidden_size=576, num_layers=30, eos_token_ids=(0,), architecture="X")
    tables = TokenTables(torch.zeros(VOCAB, 576), torch.zeros(VOCAB, 576))
    training = Eagle3Training(Eagle3TrainingOptions())
    training.build(facts, tables, None, torch.device("cpu"))
    shape = training.module.config.layer
    assert (shape.intermediate_size, shape.num_heads, shape.num_kv_heads) == (1536, 9, 9)
    assert training.layers == (1, 14, 26)
    assert training.num_speculative_tokens == 5


@pytest.mark.gpu
def test_a_long_pack_on_a_gpu() -> None:
    """8192 tokens of one document: neither scores nor logits of all rows exist at once."""
    width, vocab, device = 576, 49_152, torch.device("cuda")
    facts = tiny_facts(hidden_size=width, vocab_size=vocab, num_layers=30, eos_token_ids=(0,), architecture="X")
    table = torch.randn(vocab, width, device=device, dtype=torch.bfloat16)
    training = Eagle3Training(Eagle3TrainingOptions(ttt_length=7))
    training.build(facts, TokenTables(table, table), None, device)
    hidden = torch.randn(8192, 3, width, device=device, dtype=torch.bfloat16)
    numbers = torch.arange(8192, device=device)
    batch = TrainBatch(
        token_ids=numbers,
        predicted=numbers >= 0,
        documents=torch.zeros_like(numbers),
        positions=numbers,
        hidden=hidden,
        last_hidden=hidden[:, 0],
        sample_ids=("one",),
        seed=0,
    )
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        parts = training.loss(batch)
    parts.total.backward()
    everything = 8192 * 8192 * 9 * 7 * 2 + 8192 * 7 * vocab * 4
    assert torch.cuda.max_memory_allocated() < everything / 2
    assert all(weight.grad is not None and weight.grad.isfinite().all() for weight in training.module.parameters())
