"""The loss against its plain definition, what it moves, and what is saved."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from dspark_helpers import CPU, make_training, scatter, target_parts
from safetensors.torch import load_file
from specflow_dspark.checkpoint import load_dspark
from specflow_dspark.training import DSparkTraining, DSparkTrainingOptions
from torch import Tensor

from specflow.errors import ConfigError
from specflow.training.anchored_blocks import place_blocks
from specflow.training.objective import TrainBatch


def make_batch(lengths: tuple[int, ...] = (20, 14), seed: int = 0) -> TrainBatch:
    draws = torch.Generator().manual_seed(seed)
    facts, _ = target_parts()
    total = sum(lengths)
    return TrainBatch(
        token_ids=torch.randint(0, 380, (total,), generator=draws),
        predicted=torch.cat([torch.arange(length) >= 3 for length in lengths]),
        documents=torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)]),
        positions=torch.cat([torch.arange(length) for length in lengths]),
        hidden=torch.randn(total, 3, facts.hidden_size, generator=draws),
        last_hidden=torch.randn(total, facts.hidden_size, generator=draws),
        sample_ids=tuple(map(str, range(len(lengths)))),
        seed=seed,
    )


def plain_parts(training: DSparkTraining, batch: TrainBatch) -> dict[str, Tensor]:
    """All terms with every logit in memory, one draft after the other."""
    head, options = training.module, training.options
    _, tables = target_parts()
    blocks = place_blocks(batch, options.num_anchors, options.block_size, sample_from_anchor=options.sample_from_anchor)
    states = training.block_states(batch, blocks).unflatten(0, (-1, options.block_size))[:, head.config.answers]
    assert batch.last_hidden is not None
    assert head.markov_head is not None
    assert head.confidence_head is not None
    sums = {"total": torch.zeros(()), "weight": torch.zeros(()), "confidence": torch.zeros(())}
    for block, anchor in enumerate(blocks.anchors.tolist()):
        memory = torch.zeros(1, options.markov_rank)
        for draft in range(states.shape[1]):
            if not blocks.counted[block, draft]:
                break
            previous = batch.token_ids[anchor + draft].unsqueeze(0)
            embedded, state = head.markov_head.embed(previous), states[block, draft : draft + 1]
            latent, memory = head.markov_head.step(embedded, state, memory)
            logits = (state @ tables.head.T + head.markov_head.bias(latent))[0]
            law = (batch.last_hidden[anchor + draft] @ tables.head.T).softmax(-1)
            q = logits.softmax(-1)
            weight = torch.exp(torch.tensor(-draft / 4.0))
            distance = (q - law).abs().sum()
            loss = options.ce * F.cross_entropy(logits, law.argmax()) + options.l1 * distance
            loss = loss + options.kl * (law * (law.log() - q.log())).sum()
            sums["total"] = sums["total"] + weight * loss
            chance = (1 - distance / 2).detach()
            logit = head.confidence_head(state.detach(), embedded.detach())[0]
            sums["confidence"] = sums["confidence"] + weight * F.binary_cross_entropy_with_logits(logit, chance)
            sums["weight"] = sums["weight"] + weight
    return sums


@pytest.mark.parametrize("options", [{}, {"markov_head_type": "gated"}, {"markov_head_type": "rnn"}, {"kl": 0.7}])
@pytest.mark.parametrize("layout", [True, False])
def test_the_loss_is_the_published_one(layout: bool, options: dict[str, Any]) -> None:
    if options.get("markov_head_type") == "rnn" and not layout:
        return
    training = make_training(sample_from_anchor=layout, num_anchors=6, confidence=1.0, **options)
    scatter(training)
    batch = make_batch()
    parts, plain = training.loss(batch), plain_parts(training, batch)
    torch.testing.assert_close(parts.weight, plain["weight"])
    names = ["markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight", "fc.weight"]
    weights = dict(training.module.named_parameters())
    chosen = [weights[name] for name in names]
    ours = torch.autograd.grad(parts.total, chosen)
    theirs = torch.autograd.grad(plain["total"] + plain["confidence"], chosen)
    for name, mine, other in zip(names, ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5, msg=name)


def test_the_confidence_loss_moves_the_block_only_when_told_to() -> None:
    for moves in (False, True):
        training = make_training(ce=0.0, l1=0.0, kl=1e-9, confidence_moves_block=moves, num_anchors=6)
        scatter(training)
        training.loss(make_batch()).total.backward()
        assert training.module.confidence_head is not None
        assert training.module.confidence_head.proj.weight.grad.abs().max() > 1e-3
        assert (training.module.fc.weight.grad.abs().max() > 1e-6) == moves


def test_documents_without_answers_cost_nothing_and_stay_finite() -> None:
    training = make_training(num_anchors=6)
    batch = make_batch((4,))
    parts = training.loss(batch)
    assert float(parts.weight) == 0.0
    parts.total.backward()
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in training.module.parameters())


def test_measures_count_what_counts() -> None:
    training = make_training(num_anchors=6)
    measures = training.loss(make_batch()).measures
    drafts = training.num_speculative_tokens
    for name in ("accuracy", "acceptance", "confidence_off", "greedy_confidence_off"):
        assert {f"{name}/{j}" for j in range(drafts)} <= measures.keys()
    counts = [float(measures[f"accuracy/{j}"][1]) for j in range(drafts)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 6


def test_calibration_learns_what_the_confidence_head_misses() -> None:
    """The two lines move although nothing else does, and end where chances hold on average."""
    training = make_training(num_anchors=12)
    scatter(training)
    batch = make_batch((40, 40))
    chosen = training.module.calibration
    assert chosen is not None
    optimizer = torch.optim.Adam([chosen], lr=0.1)
    first = None
    for _ in range(60):
        parts = training.loss(batch)
        first = first or parts.measures
        optimizer.zero_grad()
        parts.total.backward()
        optimizer.step()
    for name in ("confidence_off", "greedy_confidence_off"):
        before, after = (abs(float(found[f"{name}/0"][0])) for found in (first or {}, parts.measures))
        assert after < 0.2 * before


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sample_from_anchor": False},
        {"markov_head_type": "rnn"},
        {"confidence": 0.0},
        {"markov_rank": 0, "confidence_with_markov": False},
    ],
)
def test_what_is_saved_is_what_is_read(options: dict[str, Any], tmp_path: Path) -> None:
    training = make_training(**options)
    scatter(training)
    if training.module.calibration is not None:
        training.module.calibration.data.normal_()
    training.save(tmp_path)
    facts, tables = target_parts()
    loaded = load_dspark(tmp_path, facts, tables, device=CPU, dtype=torch.float32)
    assert loaded.description.config == training.options.serial
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DSparkDraftModel"]
    assert config["dflash_config"]["projector_type"] == "dspark"
    names = load_file(tmp_path / "model.safetensors").keys()
    assert "calibration" not in names
    assert not [name for name in names if "embed_tokens" in name or "lm_head" in name]
    for name, weight in training.module.state_dict().items():
        if name.startswith(("markov_head.", "confidence_head.")):
            part = loaded.markov if name.startswith("markov") else loaded.confidence
            assert part is not None
            ours = part.state_dict()[name.partition(".")[2]]
            torch.testing.assert_close(ours, weight[: len(ours)].bfloat16().float())
    if training.module.calibration is not None:
        line = loaded.description.calibration.stacked(CPU)
        torch.testing.assert_close(line[:, 0] - 1, training.module.calibration[:, 0], rtol=0, atol=1e-4)
        torch.testing.assert_close(line[:, 1], training.module.calibration[:, 1], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        {"markov_rank": -1},
        {"markov_head_type": "lstm"},
        {"markov_rank": 0},
        {"markov_rank": 0, "confidence": 0.0},
        {"ce": 0.0, "l1": 0.0},
        {"l1": -1.0},
        {"markov_rate": 0.0},
        {"markov_head_type": "rnn", "sample_from_anchor": False},
        {"block_size": 0},
    ],
)
def test_impossible_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"task\.head\.\w+="):
        DSparkTrainingOptions(**options)


def test_tables_learn_faster() -> None:
    factors = make_training().rate_factors()
    assert factors == {"markov_head.markov_w1.weight": 5.0, "markov_head.markov_w2.weight": 5.0, "calibration": 10.0}
    assert make_training(markov_rank=0, confidence_with_markov=False).rate_factors() == {"calibration": 10.0}
