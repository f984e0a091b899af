"""Worked examples that every sampler must reproduce: numbers that were computed by hand or by enumeration."""

import dataclasses

import pytest
import torch

from specflow.core.draft import VerifyInputs
from specflow.core.request import FinishReason, Request
from specflow.core.sampling_params import SamplingParams
from specflow.engine.stops import append_tokens
from specflow.errors import ConfigError
from specflow.kernels.noise import DRAFT, TARGET, gumbel_argmax, gumbel_noise
from specflow.samplers.base import Sampler
from specflow.samplers.block import BlockOptions, BlockSampler, prefix_weights
from specflow.samplers.coupled import CoupledOptions, CoupledSampler
from specflow.samplers.rejection import draft_log_probs, log_difference, padded_rows, residual_logits
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.samplers.synthetic import SyntheticOptions, SyntheticSampler, conditional_rates
from specflow.samplers.typical import TypicalOptions, TypicalSampler
from specflow.testing.table_model import TableModel
from tests.proposers.helpers import make_limits
from tests.samplers.helpers import P, Q, bound, draw_drafts, first_tokens, make_inputs, total_variation

MANY = 100_000
DISTINCT = torch.arange(5).unsqueeze(1)  # one request per token


def lossless_samplers() -> list[Sampler]:
    return [StandardSampler(StandardOptions()), CoupledSampler(CoupledOptions()), BlockSampler(BlockOptions())]


each_sampler = pytest.mark.parametrize("sampler", lossless_samplers(), ids=lambda sampler: sampler.name)


def synthetic(num_drafts: int, **options: object) -> SyntheticSampler:
    sampler = SyntheticSampler(SyntheticOptions(**options))  # type: ignore[arg-type]
    sampler.configure(make_limits(num_drafts, 5))
    return sampler


def acceptance(p: torch.Tensor, q: torch.Tensor | None) -> torch.Tensor:
    """min(1, p/q) of every token, as the samplers compute it."""
    law = None if q is None else q.log().repeat(5, 1, 1)
    inputs = make_inputs(DISTINCT, draft_logits=law)
    log_p, log_q = draft_log_probs(p.log().repeat(10, 1), padded_rows(inputs, 10), inputs)
    return torch.exp((log_p - log_q).clamp(max=0)).squeeze(1)


def residual(p: torch.Tensor, q: torch.Tensor | None, draft: int = 0) -> torch.Tensor:
    """The law of the token after a rejected draft."""
    law = None if q is None else q.log().view(1, 1, -1)
    inputs = make_inputs(torch.tensor([[draft]]), draft_logits=law)
    return torch.softmax(residual_logits(p.log().unsqueeze(0), inputs, torch.tensor([0])), -1)[0]


# -- 1 to 9: laws --------------------------------------------------------------------------------------------------
def test_acceptance_per_token() -> None:
    assert torch.allclose(acceptance(P, Q), torch.tensor([0.7142857, 1, 1, 1, 0.5]), atol=1e-6)
    assert torch.allclose((acceptance(P, Q) * Q).sum(), torch.tensor(0.79), atol=1e-6)
    assert torch.allclose(0.5 * (P - Q).abs().sum(), torch.tensor(0.21), atol=1e-6)


def test_residual() -> None:
    expected = torch.tensor([0, 0.4761905, 0.4761905, 0.0476190, 0])
    assert torch.allclose(residual(P, Q), expected, atol=1e-6)
    double = residual(P.double(), Q.double())
    emitted = torch.minimum(P.double(), Q.double()) + (P - Q).double().clamp(min=0).sum() * double
    assert torch.allclose(emitted, P.double() / P.double().sum(), atol=1e-7)


@pytest.mark.parametrize(("coin", "accepted"), [(0.70, 1), (0.72, 0)])
def test_coin(monkeypatch: pytest.MonkeyPatch, coin: float, accepted: int) -> None:
    monkeypatch.setattr("specflow.samplers.standard.coins", lambda inputs: torch.full((1, 1), coin))
    inputs = make_inputs(torch.tensor([[0]]), draft_logits=Q.log().view(1, 1, -1))
    assert int(StandardSampler(StandardOptions()).verify(P.log().repeat(2, 1), inputs).num_accepted) == accepted


def test_one_hot_draft() -> None:
    assert torch.allclose(acceptance(P, None), P, atol=1e-6)
    assert torch.allclose(residual(P, None), torch.tensor([0, 0.6, 0.3, 0.08, 0.02]), atol=1e-6)


def test_temperature_one_half() -> None:
    p, q = ((law**2) / (law**2).sum() for law in (P, Q))
    assert torch.allclose(p, torch.tensor([0.686436, 0.247117, 0.0617792, 0.00439319, 0.000274574]), atol=1e-6)
    assert torch.allclose(q, torch.tensor([0.917947, 0.0749344, 0.00468340, 0.00168602, 0.000749344]), atol=1e-6)
    accepted = acceptance(p, q)
    assert abs(float(accepted[0]) - 0.747795) < 1e-5
    assert abs(float((accepted * q).sum()) - 0.768014) < 1e-5


def test_top_p_on_the_target_only() -> None:
    # The example says 0.8, which is the sum of the first two in exact arithmetic: just below, rounding has no say.
    model = TableModel(P.log().repeat(5, 1), Q.log().repeat(5, 1), SamplingParams(temperature=1.0, top_p=0.79))
    p = torch.softmax(model.processed()[0], -1)
    assert torch.allclose(p, torch.tensor([0.625, 0.375, 0, 0, 0]), atol=1e-6)
    accepted = acceptance(p, Q)
    assert torch.allclose(accepted, torch.tensor([0.892857, 1, 0, 0, 0]), atol=1e-6)
    assert abs(float((accepted * Q).sum()) - 0.825) < 1e-6
    assert torch.allclose(residual(p, Q), torch.tensor([0.0, 1, 0, 0, 0]), atol=1e-6)


def test_accepted_lengths_of_three_equal_positions() -> None:
    """P(a=j) and the mean length for i.i.d. acceptance of 0.79."""
    seeds = torch.arange(MANY)
    drafts = torch.stack([draw_drafts(Q, seeds, 10 + place) for place in range(3)], 1)
    inputs = make_inputs(drafts, draft_logits=Q.log().expand(MANY, 3, -1), seeds=seeds)
    verdict = StandardSampler(StandardOptions()).verify(P.log().repeat(4 * MANY, 1), inputs)
    law = torch.tensor([0.21, 0.1659, 0.131061, 0.493039])
    assert total_variation(verdict.num_accepted.numpy(), law) < bound(4, MANY)
    assert abs(float(verdict.num_emitted.double().mean()) - 2.907139) < 0.02


# -- 10 to 18: edges, for every lossless sampler -------------------------------------------------------------------
def one_hot_rows(*ids: int, vocab: int = 10) -> torch.Tensor:
    return torch.nn.functional.one_hot(torch.tensor(ids), vocab).float()


@each_sampler
def test_greedy(sampler: Sampler) -> None:
    rows = one_hot_rows(5, 7, 9, 2)
    verdict = sampler.verify(rows, make_inputs(torch.tensor([[5, 7, 8]]), temperature=0.0))
    assert verdict.token_ids.tolist() == [[5, 7, 9, -1]]
    assert (int(verdict.num_accepted), 3 - int(verdict.num_accepted)) == (2, 1)
    full = sampler.verify(rows, make_inputs(torch.tensor([[5, 7, 9]]), temperature=0.0))
    assert full.token_ids.tolist() == [[5, 7, 9, 2]]
    none = sampler.verify(rows, make_inputs(torch.tensor([[-1, 7, 9]]), temperature=0.0))
    assert none.token_ids.tolist() == [[5, -1, -1, -1]]


@each_sampler
@pytest.mark.parametrize("law", [None, Q], ids=["one_hot", "probabilistic"])
def test_placeholder_draws_from_p(sampler: Sampler, law: torch.Tensor | None) -> None:
    drafts = torch.full((MANY, 1), -1)
    logits = None if law is None else law.log().repeat(MANY, 1, 1)
    verdict = sampler.verify(P.log().repeat(2 * MANY, 1), make_inputs(drafts, draft_logits=logits))
    assert int(verdict.num_accepted.sum()) == 0
    assert total_variation(first_tokens(verdict), P) < bound(5, MANY)


@each_sampler
def test_tie_takes_the_lowest_id(sampler: Sampler) -> None:
    inputs = make_inputs(torch.zeros(1, 0, dtype=torch.int64), temperature=0.0)
    assert sampler.verify(torch.tensor([[1.0, 3, 3, 0]]), inputs).token_ids.tolist() == [[1]]
    wide = torch.zeros(1, 20_000)
    wide[0, [8191, 8192]] = 3.0  # the two sides of a kernel's block border
    assert sampler.verify(wide, inputs).token_ids.tolist() == [[8191]]


def test_log_sum_exp_by_blocks() -> None:
    """What a kernel that sees one block at a time must combine: maxima, scaled sums, the total."""
    blocks = [torch.tensor([1.0, 2, 3]), torch.tensor([float("-inf"), 0.5])]
    most = torch.stack([block.max() for block in blocks])
    sums = torch.stack([torch.exp(block - top).sum() for block, top in zip(blocks, most, strict=True)])
    assert torch.allclose(sums, torch.tensor([1.5032147, 1]))
    total = most.max() + torch.log((sums * torch.exp(most - most.max())).sum())
    assert torch.allclose(total, torch.tensor(3.4607735))
    assert torch.allclose(total, torch.logsumexp(torch.cat(blocks), 0))


@each_sampler
def test_equal_laws_accept_everything(sampler: Sampler) -> None:
    """Row 16: for all coins and for all drafts of a run; and a coupled drafter agrees exactly."""
    seeds = torch.arange(20_000)
    rounds = torch.zeros_like(seeds)
    noise = gumbel_noise(seeds, torch.full_like(seeds, 10), sampler.draft_domain, 5)
    drafts = gumbel_argmax(P.log().expand(len(seeds), -1), noise).unsqueeze(1)
    inputs = dataclasses.replace(
        make_inputs(drafts, draft_logits=P.log().repeat(len(seeds), 1, 1), seeds=seeds), rounds=rounds
    )
    verdict = sampler.verify(P.log().repeat(2 * len(seeds), 1), inputs)
    assert float(verdict.num_accepted.double().mean()) > 0.9999


def test_forced_rejection_of_equal_laws_draws_from_p() -> None:
    assert torch.allclose(residual(P, P), P, atol=1e-6)
    certain = torch.tensor([0.0, 1.0, 0.0])
    assert torch.allclose(residual(certain, None, draft=1), certain)  # p(d) = 1 leaves nothing over


@each_sampler
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_all_nan_row(sampler: Sampler, temperature: float) -> None:
    inputs = make_inputs(torch.tensor([[3]]), draft_logits=torch.zeros(1, 1, 6), temperature=temperature)
    verdict = sampler.verify(torch.full((2, 6), float("nan")), inputs)
    kept = verdict.token_ids[0, : int(verdict.num_emitted)]
    assert ((kept >= 0) & (kept < 6)).all()


@each_sampler
@pytest.mark.parametrize("law", [None, Q], ids=["one_hot", "probabilistic"])
def test_single_allowed_token(sampler: Sampler, law: torch.Tensor | None) -> None:
    rows = torch.full((10, 5), float("-inf"))
    rows[:, 3] = 0.0
    logits = None if law is None else law.log().repeat(5, 1, 1)
    verdict = sampler.verify(rows, make_inputs(DISTINCT, draft_logits=logits))
    assert verdict.num_accepted.tolist() == [0, 0, 0, 1, 0]
    assert set(first_tokens(verdict).tolist()) == {3}


# -- 19, 20: what the engine keeps of a run ------------------------------------------------------------------------
def running(**sampling: object) -> Request:
    options = SamplingParams(**sampling)  # type: ignore[arg-type]
    return Request("r", [1, 2], options, seed=0, stop_ids=frozenset({9}), output_ids=[3, 3, 3])


def test_max_tokens_cuts_a_run() -> None:
    request = running(max_tokens=5)
    assert append_tokens(request, [4, 5, 6, 7], 100, None) == 2
    assert request.finish_reason is FinishReason.LENGTH


def test_eos_inside_a_run_drops_the_bonus() -> None:
    request = running(max_tokens=50)
    assert append_tokens(request, [4, 9, 6, 7, 8], 100, None) == 2
    assert request.finish_reason is FinishReason.STOP


# -- couplings (2.2) and numerics (2.8) ----------------------------------------------------------------------------
def coupled_rate(domain: int) -> float:
    seeds = torch.arange(MANY) + 5
    drafts = gumbel_argmax(Q.log().expand(MANY, -1), gumbel_noise(seeds, torch.full_like(seeds, 10), domain, 5))
    verdict = CoupledSampler(CoupledOptions()).verify(
        P.log().repeat(2 * MANY, 1), make_inputs(drafts.unsqueeze(1), seeds=seeds)
    )
    assert total_variation(first_tokens(verdict), P) < bound(5, MANY)
    return float(verdict.num_accepted.double().mean())


def test_gumbel_coupling_accepts_nearly_as_much_as_rejection() -> None:
    """sum_x 1 / sum_y max(p_y/p_x, q_y/q_x) = 0.77593; beta is 0.79; independent noise would give sum p q = 0.4189."""
    ratios = torch.maximum(P / P.unsqueeze(1), Q / Q.unsqueeze(1)).sum(1)
    assert abs(float((1 / ratios).sum()) - 0.77593) < 1e-5
    assert abs(coupled_rate(TARGET) - 0.77593) < 4 * (0.1739 / MANY) ** 0.5
    assert abs(coupled_rate(DRAFT) - 0.4189) < 4 * (0.2434 / MANY) ** 0.5


@pytest.mark.parametrize(
    ("log_p", "log_q", "expected"), [(-3.0, -5.0, -3.145413), (-0.5, -0.7, -2.207772), (-100.0, -101.0, -100.45867)]
)
def test_log_difference(log_p: float, log_q: float, expected: float) -> None:
    found = float(log_difference(torch.tensor(log_p), torch.tensor(log_q)))
    assert abs(found - expected) < 2e-5


def test_log_difference_of_nothing() -> None:
    none = float("-inf")
    p, q = torch.tensor([none, none, -1.0, -2.0]), torch.tensor([none, -1.0, -1.0, none])
    assert log_difference(p, q).tolist() == [none, none, none, -2.0]


# -- block verification (5.1) --------------------------------------------------------------------------------------
BLOCK_P, BLOCK_Q = torch.tensor([1 / 3, 2 / 3]), torch.tensor([2 / 3, 1 / 3])


@pytest.mark.parametrize(
    ("drafts", "weights", "chances"),
    [
        ((0, 0), (0.5, 0.25), (0.0, 0.25)),
        ((0, 1), (0.5, 1.0), (0.0, 1.0)),
        ((1, 0), (1.0, 0.5), (1.0, 0.5)),
        ((1, 1), (1.0, 1.0), (1.0, 1.0)),
    ],
)
def test_block_weights_and_chances(
    monkeypatch: pytest.MonkeyPatch, drafts: tuple[int, int], weights: tuple[float, ...], chances: tuple[float, ...]
) -> None:
    ids = torch.tensor([drafts])
    found = prefix_weights((BLOCK_P[ids] / BLOCK_Q[ids]).log()).exp()
    assert torch.allclose(found, torch.tensor([[1.0, *weights]]))
    inputs = make_inputs(ids, draft_logits=BLOCK_Q.log().expand(1, 2, -1))
    for place, chance in enumerate(chances):
        for coin in (chance - 1e-3, chance + 1e-3):
            coins = torch.full((1, 2), 2.0)  # the other place always fails
            coins[0, place] = coin
            monkeypatch.setattr("specflow.samplers.block.coins", lambda inputs, coins=coins: coins)
            verdict = BlockSampler(BlockOptions()).verify(BLOCK_P.log().repeat(3, 1), inputs)
            assert int(verdict.num_accepted) == (place + 1 if coin <= chance else 0)


@pytest.mark.parametrize(("sampler", "mean"), [(lossless_samplers()[0], 10 / 9), (lossless_samplers()[2], 11 / 9)])
def test_block_accepts_more(sampler: Sampler, mean: float) -> None:
    seeds = torch.arange(MANY)
    drafts = torch.stack([draw_drafts(BLOCK_Q, seeds, 10 + place) for place in range(2)], 1)
    inputs = make_inputs(drafts, draft_logits=BLOCK_Q.log().expand(MANY, 2, -1), seeds=seeds)
    accepted = sampler.verify(BLOCK_P.log().repeat(3 * MANY, 1), inputs).num_accepted.double()
    assert abs(float(accepted.mean()) - mean) < 4 * float(accepted.std()) / MANY**0.5


def test_block_of_one_hot_drafts_has_the_law_of_standard() -> None:
    """P(tau >= i) is the product of the p(d)."""
    drafts = torch.tensor([[0, 1, 0]]).repeat(MANY, 1)
    accepted = BlockSampler(BlockOptions()).verify(P.log().repeat(4 * MANY, 1), make_inputs(drafts)).num_accepted
    at_least = torch.tensor([1.0, 0.5, 0.15, 0.075, 0.0])
    assert total_variation(accepted.numpy(), at_least[:-1] - at_least[1:]) < bound(4, MANY)


# -- synthetic (4) -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "num_drafts", "unconditional", "conditional", "mean"),
    [
        ({"synthetic_acceptance_length": 1.0}, 3, (0, 0, 0), (0, 0, 0), 1.0),
        ({"synthetic_acceptance_length": 2.5}, 3, (1, 0.5, 0), (1, 0.5, 0), 2.5),
        ({"synthetic_acceptance_length": 3.0}, 4, (1, 1, 0, 0), (1, 1, 0, 0), 3.0),
        ({"synthetic_acceptance_length": 4.0}, 3, (1, 1, 1), (1, 1, 1), 4.0),
        ({"synthetic_acceptance_length": 1.25}, 2, (0.25, 0), (0.25, 0), 1.25),
        ({"synthetic_acceptance_length": 3.3}, 5, (1, 1, 0.2999999999999998, 0, 0), None, 3.3),
        ({"synthetic_acceptance_length": 6.0}, 5, (1,) * 5, (1,) * 5, 6.0),
        ({"synthetic_acceptance_length": 1.6}, 1, (0.6000000000000001,), None, 1.6),
        ({"synthetic_acceptance_rates": (0.8, 0.6, 0.3)}, 3, None, (0.8, 0.7499999999999999, 0.5), 2.7),
        ({"synthetic_acceptance_rates": (0.9, 0.9, 0.45)}, 3, None, (0.9, 1.0, 0.5), 3.25),
        ({"synthetic_acceptance_rates": (0.5, 0.0, 0.0)}, 3, None, (0.5, 0, 0), 1.5),
        ({"synthetic_acceptance_rates": (0.75, 0.5, 0.25, 0.0)}, 4, None, (0.75, 2 / 3, 0.5, 0), 2.5),
    ],
)
def test_synthetic_rates(
    options: dict, num_drafts: int, unconditional: tuple | None, conditional: tuple | None, mean: float
) -> None:
    rates = SyntheticOptions(**options).rates(num_drafts)
    assert rates == tuple(unconditional or options["synthetic_acceptance_rates"])
    assert conditional_rates(rates) == pytest.approx(conditional or rates, abs=1e-12)
    assert 1 + sum(rates) == pytest.approx(mean)
    drafts = torch.zeros(20_000, num_drafts, dtype=torch.int64)
    verdict = synthetic(num_drafts, **options).verify(torch.zeros(20_000 * (num_drafts + 1), 5), make_inputs(drafts))
    lengths = verdict.num_emitted.double()
    assert abs(float(lengths.mean()) - mean) <= 4 * float(lengths.std()) / 20_000**0.5 + 1e-9


def test_synthetic_length_has_the_smallest_variance() -> None:
    def variance(**options: object) -> float:
        drafts = torch.zeros(40_000, 3, dtype=torch.int64)
        sampler = synthetic(3, **options)
        return float(sampler.verify(torch.zeros(160_000, 5), make_inputs(drafts)).num_emitted.double().var())

    assert abs(variance(synthetic_acceptance_length=2.5) - 0.25) < 0.02
    assert abs(variance(synthetic_acceptance_rates=(0.5, 0.5, 0.5)) - 2.25) < 0.06
    assert abs(variance(synthetic_acceptance_rates=(0.75, 0.45, 0.3)) - 1.35) < 0.06


@pytest.mark.parametrize(
    ("options", "num_drafts", "message"),
    [
        ({"synthetic_acceptance_rates": (0.5, 0.6)}, 2, "must not increase"),
        ({"synthetic_acceptance_rates": (1.2, 0.0)}, 2, r"in \[0, 1\]"),
        ({"synthetic_acceptance_rates": (0.5,)}, 2, r"1 entries.*2 tokens"),
        ({"synthetic_acceptance_rates": ()}, 2, "empty"),
        ({}, 2, "neither is set"),
        ({"synthetic_acceptance_rates": (0.5, 0.2), "synthetic_acceptance_length": 1.5}, 2, "both are set"),
        ({"synthetic_acceptance_length": 3.5}, 2, r"\[1, 3\]"),
        ({"synthetic_acceptance_length": 0.9}, 2, r"\[1, K\+1\]"),
        ({"synthetic_acceptance_length": float("nan")}, 2, r"\[1, K\+1\]"),
    ],
)
def test_synthetic_refusals(options: dict, num_drafts: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticSampler(SyntheticOptions(**options)).check_num_drafts(num_drafts)


@pytest.mark.parametrize(
    ("rate", "law", "distance"), [(0.9, (0.63, 0.227619, 0.092619, 0.031762, 0.018), 0.138), (0.3, None, 0.294)]
)
def test_synthetic_is_not_lossless(rate: float, law: tuple[float, ...] | None, distance: float) -> None:
    seeds = torch.arange(MANY)
    inputs = make_inputs(draw_drafts(Q, seeds, 10).unsqueeze(1), draft_logits=Q.log().repeat(MANY, 1, 1), seeds=seeds)
    verdict = synthetic(1, synthetic_acceptance_rates=(rate,)).verify(P.log().repeat(2 * MANY, 1), inputs)
    assert abs(total_variation(first_tokens(verdict), P) - distance) < bound(5, MANY)
    if law is not None:
        assert total_variation(first_tokens(verdict), torch.tensor(law)) < bound(5, MANY)
    assert not SyntheticSampler.lossless


def test_synthetic_greedy_emits_drafts_or_the_argmax() -> None:
    rows = one_hot_rows(5, 7, 9)
    drafts = torch.tensor([[1, 2]])
    kept = synthetic(2, synthetic_acceptance_length=3.0).verify(rows, make_inputs(drafts, temperature=0.0))
    assert kept.token_ids.tolist() == [[1, 2, 9]]
    refused = synthetic(2, synthetic_acceptance_length=1.0).verify(rows, make_inputs(drafts, temperature=0.0))
    assert refused.token_ids.tolist() == [[5, -1, -1]]
    absent = synthetic(2, synthetic_acceptance_length=3.0).verify(
        rows[:1], make_inputs(torch.tensor([[-1, -1]]), num_drafts=torch.tensor([0]), temperature=0.0)
    )
    assert absent.token_ids.tolist() == [[5, -1, -1]]


# -- typical (5.3) -------------------------------------------------------------------------------------------------
def accepted_by_typical(law: torch.Tensor, **options: float) -> list[int]:
    inputs = make_inputs(torch.arange(len(law)).unsqueeze(1))
    verdict = TypicalSampler(TypicalOptions(**options)).verify(law.log().repeat(2 * len(law), 1), inputs)
    return verdict.num_accepted.nonzero().squeeze(1).tolist()


def test_typical_acceptance() -> None:
    """The threshold is min(0.09, 0.3 exp(-H)); H = 1.143 nats on the example, 0.3 exp(-H) = 0.0957."""
    entropy = float(-(P * P.log()).sum())
    assert min(0.09, 0.3 * torch.exp(torch.tensor(-entropy))) == 0.09
    assert accepted_by_typical(P) == [0, 1, 2]
    assert accepted_by_typical(P, posterior_threshold=0.2) == [0, 1, 2]  # now 0.0957 decides
    assert accepted_by_typical(P, posterior_threshold=0.2, posterior_alpha=0.5) == [0, 1]
    flat = torch.full((20,), 0.05)
    assert accepted_by_typical(flat) == list(range(20))  # 0.3 / 20 = 0.015


def test_typical_is_sharper_than_the_law_and_greedy_when_greedy() -> None:
    sampler = TypicalSampler(TypicalOptions())
    drafts = torch.zeros(20_000, 1, dtype=torch.int64)
    assert set(first_tokens(sampler.verify(P.log().repeat(40_000, 1), make_inputs(drafts))).tolist()) == {0}
    refused = sampler.verify(P.log().repeat(40_000, 1), make_inputs(drafts + 4))
    assert total_variation(first_tokens(refused), P) < bound(5, 20_000)
    verdict = sampler.verify(one_hot_rows(5, 7), make_inputs(torch.tensor([[6]]), temperature=0.0))
    assert verdict.token_ids.tolist() == [[5, -1]]
    assert not sampler.lossless


@pytest.mark.parametrize("options", [{"posterior_threshold": 1.5}, {"posterior_alpha": -0.1}])
def test_typical_refusals(options: dict) -> None:
    with pytest.raises(ConfigError, match=r"must be in \[0, 1\]"):
        TypicalOptions(**options)


# -- composition of a batch ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("fp64", [False, True])
@pytest.mark.parametrize("name", ["standard", "coupled", "block"])
def test_a_request_does_not_depend_on_its_neighbours(name: str, fp64: bool) -> None:
    """Ragged drafts, mixed temperatures, shuffled rows: the tokens of a request stay the same; so with float64."""
    makers = {"standard": (StandardSampler, StandardOptions), "coupled": (CoupledSampler, CoupledOptions)}
    kind, options = makers.get(name, (BlockSampler, BlockOptions))
    sampler = kind(options(use_fp64_gumbel=fp64))  # type: ignore[arg-type]
    assert sampler.describe()["gumbel"] == ("float64" if fp64 else "float32")
    generator = torch.Generator().manual_seed(2)
    count, width, vocab = 9, 3, 33
    lengths = torch.arange(count) % (width + 1)
    logits = [torch.randn(int(length) + 1, vocab, generator=generator) for length in lengths]
    drafts = torch.randint(vocab, (count, width), generator=generator)
    law = torch.randn(count, width, vocab, generator=generator)
    temperature = (torch.arange(count) % 2).float()

    def verify(order: list[int]) -> list[list[int]]:
        ids = drafts[order].masked_fill(torch.arange(width) >= lengths[order].unsqueeze(1), -1)
        inputs = make_inputs(ids, num_drafts=lengths[order], draft_logits=law[order], seeds=torch.tensor(order) + 1)
        inputs = dataclasses.replace(inputs, temperature=temperature[order], rounds=torch.tensor(order))
        return sampler.verify(torch.cat([logits[index] for index in order]), inputs).token_ids.tolist()

    together = verify(list(range(count)))
    shuffled = torch.randperm(count, generator=generator).tolist()
    assert [together[index] for index in shuffled] == verify(shuffled)
    for index in range(count):
        assert verify([index]) == [together[index]]


def test_types() -> None:
    """No verdict depends on the drafts' width alone, and all tensors are int64."""
    for sampler in lossless_samplers():
        inputs: VerifyInputs = make_inputs(torch.zeros(2, 0, dtype=torch.int64))
        verdict = sampler.verify(torch.zeros(2, 7), inputs)
        assert verdict.token_ids.shape == (2, 1)
        assert {verdict.token_ids.dtype, verdict.num_emitted.dtype, verdict.num_accepted.dtype} == {torch.int64}
