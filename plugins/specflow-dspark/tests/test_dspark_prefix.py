"""How many drafts are submitted: the arithmetic, and that the choice leaves the sampled law alone."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from dspark_helpers import SIZES, make_training
from specflow_dspark.prefix import affordable, confident, cost_table, more_per_request
from specflow_dspark.proposer import DSparkOptions, DSparkProposer
from torch import Tensor

from specflow.core.sampling_params import SamplingParams
from specflow.proposers.base import ProposeContext
from specflow.proposers.block_drafter import BlockRows
from specflow.testing.proofs import LawProof, prove_law
from specflow.testing.subject import Subject
from specflow.testing.tiny_models import tiny_llama

STEEP = ((1, 1.0), (2, 1.8), (3, 1.9), (256, 12.0))  # the first draft is dear, further ones are cheap


def test_the_cost_table_is_the_convex_floor_of_the_points() -> None:
    table = cost_table([(1, 1.0), (2, 1.8), (4, 1.6), (8, 2.0), (16, 4.0)], 20)
    for tokens, cost in ((1, 1.0), (8, 2.0), (16, 4.0), (20, 5.0)):
        assert table[tokens] == pytest.approx(cost)
    assert table[2] == pytest.approx(1 + 1 / 7)  # on the line from 1 to 8: the hump before it is not believed
    assert (np.diff(table[1:], 2) >= -1e-12).all()
    assert (np.diff(table) >= 0).all()


def test_a_single_point_means_that_tokens_are_free() -> None:
    assert cost_table([(1, 2.0)], 3).tolist() == [2.0] * 4


def test_what_a_request_adds() -> None:
    table = cost_table([(1, 1.0), (16, 2.5)], 16)
    points = [(1, 1, 1.0), (4, 4, 1.3 + 0.6), (4, 16, 2.5 + 1.2)]
    assert more_per_request(points, table) == pytest.approx(0.3)
    assert more_per_request(points[:1], table) == 0.0


def brute_force(survival: np.ndarray, costs: np.ndarray) -> float:
    """The best rate that any choice of prefixes reaches."""
    count, length = survival.shape
    rates = []
    for lengths in itertools.product(range(length + 1), repeat=count):
        gain = count + sum(survival[row, :taken].sum() for row, taken in enumerate(lengths))
        rates.append(gain / costs[sum(lengths)])
    return max(rates)


def test_the_affordable_prefixes_are_the_best_ones() -> None:
    draws = np.random.default_rng(0)
    for _ in range(60):
        survival = draws.uniform(0.05, 1, (3, 4)).cumprod(1).astype(np.float32)
        points = [(1, 1.0), *((2**n, 1 + draws.uniform(0, 3)) for n in range(1, 5))]
        costs = cost_table(points, 15)[3:16]
        counts = affordable(torch.from_numpy(survival), torch.tensor(costs, dtype=torch.float32)).numpy()
        gain = 3 + sum(survival[row, :taken].sum() for row, taken in enumerate(counts))
        assert gain / costs[counts.sum()] == pytest.approx(brute_force(survival, costs), rel=1e-5)


def test_free_tokens_are_all_taken_and_dear_ones_are_not() -> None:
    survival = torch.tensor([[0.5, 0.4], [0.3, 0.0]])
    assert affordable(survival, torch.ones(5)).tolist() == [2, 1]  # 0 = may not be submitted
    assert affordable(survival, torch.arange(2.0, 7.0)).tolist() == [0, 0]


def test_equal_survival_takes_prefixes() -> None:
    counts = affordable(torch.ones(2, 3), torch.tensor([1.0, 1.1, 1.2, 1.3, 9.0, 9.1, 9.2]))
    assert counts.tolist() == [2, 1]


def test_a_draft_has_no_say_in_whether_it_is_submitted() -> None:
    """Survival of later drafts may change in any way: what is decided about earlier ones stays."""
    draws = torch.Generator().manual_seed(0)
    costs = torch.tensor(cost_table(STEEP, 12)[3:16], dtype=torch.float32)
    for _ in range(200):
        chances = torch.rand(3, 3, generator=draws)
        first = affordable(chances.cumprod(1), costs)
        row, place = (int(torch.randint(3, (), generator=draws)) for _ in range(2))
        changed = chances.clone()
        changed[row, place:] = torch.rand(3 - place, generator=draws)
        second = affordable(changed.cumprod(1), costs)
        # Draft `place` is the first whose chance changed: whether those before it are in stays.
        assert min(int(first[row]), place) == min(int(second[row]), place)


def test_threshold_cuts_at_the_first_doubtful_draft() -> None:
    chances = torch.tensor([[0.9, 0.2, 0.9], [0.1, 0.9, 0.9], [0.5, 0.5, 0.5]])
    assert confident(chances, 0.5).tolist() == [1, 0, 3]


# -- the law of what is sampled ------------------------------------------------------------------------------------
VOCAB = 8


class Anticipating(DSparkProposer):
    """The best length in hindsight: whether draft 1 is submitted depends on the chance of draft 2, and that on draft 1
    (the note of the paper's appendix)."""

    def count(self, context: ProposeContext, rows: BlockRows, drafts: Tensor, usable: Tensor) -> Tensor:
        survival = self.chances(context, rows, drafts).cumprod(1)
        gains = 1 + torch.cat([torch.zeros(len(drafts), 1), survival.cumsum(1)], 1)
        costs = torch.tensor([cost for _, cost in STEEP[:3]])[: gains.shape[1]]
        return torch.minimum((gains[:, : len(costs)] / costs).argmax(1), usable)


class OnesOwnChance(DSparkProposer):
    """Cuts before the first draft that the drafter itself thought unlikely."""

    def count(self, context: ProposeContext, rows: BlockRows, drafts: Tensor, usable: Tensor) -> Tensor:
        law = self._sampler.law()
        if law is None:
            return usable
        own = law.softmax(-1).gather(2, drafts.unsqueeze(2)).squeeze(2)
        return torch.minimum(confident(own, 0.2), usable)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of eight tokens, and a head whose chances depend on the token before alone."""
    folder, head = tmp_path_factory.mktemp("target"), tmp_path_factory.mktemp("head")
    tiny_llama(folder, vocab=VOCAB)
    training = make_training(target=folder, **SIZES | {"mask_token_id": VOCAB - 1, "markov_rank": 2})
    markov, confidence = training.module.markov_head, training.module.confidence_head
    assert markov is not None
    assert confidence is not None
    with torch.no_grad():
        markov.markov_w1.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).repeat(VOCAB // 2, 1))
        markov.markov_w2.weight.normal_(std=1.0, generator=torch.Generator().manual_seed(3))
        confidence.proj.weight.zero_()
        confidence.proj.weight[0, -2:] = torch.tensor([1.1, -4.0])
    training.save(head)
    return folder, head


def proof_of(
    kind: type[DSparkProposer], small: tuple[Path, Path], sampler: str = "standard", **options: object
) -> LawProof:
    """What three sampled tokens look like when up to two drafts are judged."""
    target, head = small
    given = {"path": str(head), "draft_sample_method": "probabilistic", "verify_costs": STEEP, "round_cost": (4.0, 0.0)}

    def make(length: int) -> DSparkProposer:
        return kind(DSparkOptions(**given | options, num_speculative_tokens=length))  # type: ignore[arg-type]

    subject = Subject(make, target, num_drafts=2)
    engine = subject.engine(max_num_seqs=64, max_num_batched_tokens=2048, sampler=sampler)
    sampling = SamplingParams(temperature=3.0)
    return prove_law(engine, [1, 2, 3], sampling, num_samples=1500, num_tokens=4, first_seed=1, alpha=1e-4)


@pytest.mark.parametrize("sampler", ["standard", "block"])
@pytest.mark.parametrize("selection", ["cost", "threshold"])
def test_the_choice_of_the_length_leaves_the_sampled_law_alone(
    selection: str, sampler: str, small: tuple[Path, Path]
) -> None:
    proof = proof_of(DSparkProposer, small, sampler, prefix_selection=selection)
    assert proof.passed, {name: gate.sentence() for name, gate in proof.gates.items()}
    assert 0 < proof.accepted < proof.drafted < 2 * 3 * proof.num_samples  # some were cut, some refused


@pytest.mark.parametrize("kind", [Anticipating, OnesOwnChance])
def test_a_length_that_looks_at_what_it_cuts_is_caught(kind: type[DSparkProposer], small: tuple[Path, Path]) -> None:
    proof = proof_of(kind, small)
    assert proof.drafted
    assert not proof.passed
