"""The method in the engine: the drafts are those of a block run at once, and a head that knows the text is right."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_helpers import COSTS, make_training, random_head, scatter, target_parts
from dspark_reference import greedy_drafts
from specflow_dspark import proposer as module
from specflow_dspark.checkpoint import load_dspark
from specflow_dspark.proposer import DSparkOptions, DSparkProposer
from torch import Tensor

from specflow.core.draft import Draft
from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError
from specflow.proposers.base import ProposeContext, Proposer
from specflow.testing.subject import PROMPTS, Subject, greedy
from specflow.testing.tiny_models import tiny_llama, tiny_target
from specflow.testing.wrappers import Wrapper


def subject(folder: Path, target: Path | None = None, **options: Any) -> Subject:
    def make(length: int) -> DSparkProposer:
        return DSparkProposer(DSparkOptions(path=str(folder), num_speculative_tokens=length, **options))

    return Subject(make, target or tiny_target(), num_drafts=5)


class Recorded(Wrapper):
    """Keeps the features of all positions and, per round, what was drafted behind them."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.known: dict[int, Tensor] = {}
        self.rounds: list[tuple[int, int, list[int], int, int]] = []

    def propose(self, context: ProposeContext) -> Draft:
        draft = self.inner.propose(context)
        features = context.features
        assert features is not None
        start, kept = int(features.start[0]), int(features.num_valid[0])
        layers = torch.stack([features.hidden[layer] for layer in sorted(features.hidden)], 1)
        for row in range(start, start + kept):
            self.known[int(features.positions[row])] = layers[row].clone()
        if int(context.max_drafts[0]):
            count = int(context.num_tokens[0])
            anchor = int(context.token_table[context.slots[0], count - 1])
            most, taken = int(context.max_drafts[0]), int(draft.num_drafts[0])
            self.rounds.append((count - 1, anchor, draft.token_ids[0].tolist(), most, taken))
        return draft


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_drafts_are_those_of_a_block_run_at_once(kind: str, tmp_path: Path) -> None:
    folder = random_head(tmp_path, markov_head_type=kind)
    engine = subject(folder, verify_costs=COSTS, round_cost=(1.0, 0.1)).engine(Recorded)
    engine.generate(PROMPTS[:1], greedy(12))
    recorded = engine.proposer
    assert isinstance(recorded, Recorded)
    loaded = load_dspark(folder, *target_parts(), device=torch.device("cpu"), dtype=torch.float32)
    line = loaded.description.calibration.stacked(torch.device("cpu"))[1]
    proposer = recorded.inner
    assert isinstance(proposer, DSparkProposer)
    lengths = set()
    for position, anchor, drafts, most, count in recorded.rounds:
        features = torch.stack([recorded.known[place] for place in range(position)])
        with torch.no_grad():
            expected, _, confidence = greedy_drafts(loaded, features, anchor, 5)
        assert drafts == expected.tolist()
        chances = torch.sigmoid(confidence * line[0] + line[1])
        rates = (1 + torch.cat([torch.zeros(1), chances.cumprod(0).cumsum(0)])) / (
            proposer._costs[1:7] + proposer._round_cost[0]
        )
        assert count == int(rates[: most + 1].argmax())  # one peak: the first draft that does not pay is the end
        lengths.add(count)
    assert len(lengths) > 1


def test_a_head_that_knows_what_follows_each_token_is_always_right(tmp_path: Path) -> None:
    """A target whose next token depends on the last one alone, and a Markov head that holds this table: a token before
    that is off by one, or a row, would draft wrongly."""
    target = tmp_path / "target"
    tiny_llama(target, vocab=64, layers=1)
    _make_a_bigram(target)
    training = make_training(target=target, mask_token_id=63, markov_rank=64, num_layers=1)
    facts, tables = target_parts(target)
    with torch.no_grad():
        for weight in training.module.parameters():
            weight.zero_()
        table = _next_logits(target)
        assert training.module.markov_head is not None
        training.module.markov_head.markov_w1.weight.copy_(torch.eye(64))
        training.module.markov_head.markov_w2.weight.copy_(table.T)
    training.save(tmp_path / "head")
    engine = subject(tmp_path / "head", target, prefix_selection="all").engine()
    outputs = engine.generate(PROMPTS, greedy(31))
    assert all(output.accepted == output.drafted > 0 for output in outputs)
    assert all(output.rounds == 5 for output in outputs)  # 1 + 5 rounds of 6 tokens
    assert facts.vocab_size == 64
    assert tables.head.shape[0] == 64


def _make_a_bigram(folder: Path) -> None:
    """Take attention and feed-forward out of a saved model: what remains reads the last token alone."""
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.zero_()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _next_logits(folder: Path) -> Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.arange(64).unsqueeze(1)).logits[:, 0]


def test_the_costs_of_the_target_are_measured_once_and_reported(tmp_path: Path) -> None:
    engine = subject(random_head(tmp_path)).engine()
    assert engine.proposer is not None
    facts = engine.proposer.describe()
    assert facts["prefix selection"] == "cost"
    assert facts["verify_costs"].startswith("[[1, ")
    assert facts["round_cost"].startswith("[")
    given = subject(tmp_path, verify_costs=((1, 2.0),), round_cost=(0.5, 0.1)).engine().proposer
    assert given is not None
    assert (given.describe()["verify_costs"], given.describe()["round_cost"]) == ("[[1, 2.0]]", "[0.5, 0.1]")


def test_dear_tokens_are_not_drafted_and_free_ones_all_are(tmp_path: Path) -> None:
    folder = random_head(tmp_path)
    free = subject(folder, verify_costs=((1, 1.0),), round_cost=(0.0, 0.0)).engine().generate(PROMPTS, greedy(12))
    dear = (
        subject(folder, verify_costs=((1, 1.0), (2, 9.0)), round_cost=(0.0, 0.0)).engine().generate(PROMPTS, greedy(12))
    )
    plain = subject(folder).plain(PROMPTS, greedy(12))
    assert [output.token_ids for output in free] == [output.token_ids for output in dear]
    assert [output.token_ids for output in free] == [output.token_ids for output in plain]
    assert not any(output.drafted for output in dear)
    assert all(output.drafted for output in free)


def test_a_greedy_and_a_sampled_request_are_calibrated_apart(tmp_path: Path) -> None:
    training = make_training()
    scatter(training)
    calibration = training.module.calibration
    assert calibration is not None
    calibration.data[0, 1] = -9.0  # a sampled draft is never trusted, a greedy one always
    calibration.data[1, 1] = 9.0
    calibration.data[:, 0] = -1.0
    training.save(tmp_path)
    engine = subject(tmp_path, prefix_selection="threshold", threshold=0.5).engine()
    sampled = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True, seed=1)
    first, second = engine.generate(PROMPTS[:2], [greedy(12), sampled])
    assert first.drafted > 0
    assert second.drafted == 0


def test_without_a_confidence_head_all_drafts_are_submitted(tmp_path: Path) -> None:
    folder = random_head(tmp_path, confidence=0.0)
    engine = subject(folder).engine()
    assert engine.proposer is not None
    assert engine.proposer.describe()["prefix selection"] == "all"
    with pytest.raises(ConfigError, match="prefix_selection=threshold needs a confidence head"):
        subject(folder, prefix_selection="threshold").engine()


def test_more_drafts_than_trained_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens=6"):
        replace(subject(random_head(tmp_path)), num_drafts=6).engine()


def test_no_path_means_the_head_of_the_package_or_says_how_to_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proposer = DSparkProposer(DSparkOptions())
    monkeypatch.setattr(module, "_BUNDLED", tmp_path / "none")
    with pytest.raises(ConfigError, match=r"proposer\.path must be given(.|\n)*\+experiment=zoo_dspark"):
        proposer.bundled_head()
    monkeypatch.setattr(module, "_BUNDLED", random_head(tmp_path / "head"))
    assert proposer.bundled_head() == str(tmp_path / "head")
