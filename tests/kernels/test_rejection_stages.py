"""Every kernel of the pipeline against its own torch reference, and the noise against `specflow.kernels.noise`."""

import pytest
import torch

from tests.kernels.rejection_cases import DEVICE, make_case

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from specflow.kernels import noise  # noqa: E402
from specflow.kernels.rejection import device_noise, reference, rows  # noqa: E402
from specflow.kernels.rejection.pipeline import RejectionPipeline  # noqa: E402
from specflow.kernels.rejection.workspace import LaunchShape  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter

SHAPE = LaunchShape(block=2048, stats_warps=2, masses_warps=4)  # parts of two chunks, of one for the masses
VOCAB = 3900


@triton.jit
def noise_kernel(
    seeds, positions, out, coins, V: tl.constexpr, BLOCK: tl.constexpr, FP64: tl.constexpr, FAST: tl.constexpr
):
    row = tl.program_id(0)
    seed, position = tl.load(seeds + row), tl.load(positions + row)
    first, second = device_noise.noise_keys(seed, position, device_noise.TARGET)
    tokens = tl.arange(0, BLOCK)
    tl.store(out + row * V + tokens, device_noise.target_gumbel(first, second, tokens, FP64, FAST), mask=tokens < V)
    tl.store(coins + row, device_noise.coin(seed, position))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_the_samplers(dtype: torch.dtype) -> None:
    seeds = torch.tensor([0, 1, -5, 2**40 + 3, -(2**62)], device=DEVICE)
    positions = torch.tensor([0, 7, 4_000_000, 3, 2**33], device=DEVICE)
    out = torch.empty(5, 1000, dtype=dtype, device=DEVICE)
    coins = torch.empty(5, device=DEVICE)
    fast = DEVICE.type == "cuda" and torch.version.hip is None
    noise_kernel[(5,)](seeds, positions, out, coins, V=1000, BLOCK=1024, FP64=dtype == torch.float64, FAST=fast)
    expected = noise.gumbel_noise(seeds, positions, noise.TARGET, 1000, dtype)
    assert torch.allclose(out, expected, rtol=5e-7, atol=5e-7)
    assert torch.allclose(coins, noise.uniform(seeds, positions, noise.COIN), rtol=1e-7, atol=0)


def test_kinds_have_the_references_numbers() -> None:
    for name in ("DONE", "PLAIN", "ONE_HOT", "RESIDUAL"):
        assert getattr(rows, name).value == getattr(reference, name)


class Stages:
    """Buffers of one run beside what the references say, given the same inputs."""

    def __init__(self, with_law: bool, seed: int = 9) -> None:
        self.logits, self.inputs = make_case(7, 3, VOCAB, seed=seed, with_law=with_law)
        self.pipeline = RejectionPipeline(shape=SHAPE)
        self.verdict = self.pipeline.verify(self.logits, self.inputs)
        (self.space,) = self.pipeline.workspaces.values()
        self.stats = reference.block_stats(self.logits, self.inputs, SHAPE.part)
        self.decision = reference.reject(self.logits, self.inputs, self.stats)
        self.greedy = self.inputs.temperature == 0
        self.draws = self.decision.kind != reference.DONE
        self.law = reference.law_to_draw_from(self.logits, self.inputs, self.decision)

    def buffer(self, name: str) -> torch.Tensor:
        return self.space.tensors[name]


@pytest.fixture(params=[False, True], ids=["one-hot", "probabilistic"])
def stages(request: pytest.FixtureRequest) -> Stages:
    return Stages(request.param)


def test_block_statistics(stages: Stages) -> None:
    inputs, stats = stages.inputs, stages.stats
    steps = torch.arange(4, device=DEVICE)
    valid = torch.nn.functional.pad(inputs.draft_ids, (0, 1), value=-1) >= 0
    greedy = stages.greedy[:, None] & (steps <= inputs.num_drafts[:, None])
    judged = ~stages.greedy[:, None] & valid
    sampled = judged
    if inputs.draft_logits is None:  # the row that a token may be drawn from is read here and never again
        sampled = ~stages.greedy[:, None] & (steps <= inputs.num_drafts[:, None])
        chunks = stages.buffer("target_chunks")
        assert torch.allclose(chunks[sampled], stats.target_chunks[sampled], rtol=1e-5)
    assert greedy.any()
    assert judged.any()
    assert torch.equal(stages.buffer("target_max")[greedy | sampled], stats.target_max[greedy | sampled])
    assert torch.equal(stages.buffer("target_arg")[greedy].long(), stats.target_arg[greedy])
    assert torch.allclose(stages.buffer("target_sum")[sampled], stats.target_sum[sampled], rtol=1e-5)
    ids = torch.nn.functional.pad(inputs.draft_ids, (0, 1)).clamp(min=0)
    rows = reference.rows_of(inputs, len(stages.logits))
    assert torch.equal(stages.buffer("draft_logit")[judged], stages.logits[rows, ids][judged])
    if inputs.draft_logits is None:
        near = torch.nn.functional.pad(stages.logits, (0, -VOCAB % noise.CHUNK_IDS), value=float("-inf"))
        near = near[rows].scatter(2, ids.unsqueeze(2), float("-inf")).unflatten(2, (-1, noise.CHUNK_IDS))
        rest = near.logsumexp(3).gather(2, ids.unsqueeze(2) // noise.CHUNK_IDS).squeeze(2)
        assert torch.allclose(stages.buffer("draft_rest")[judged], rest[judged], rtol=1e-5, atol=1e-5)
    if inputs.draft_logits is not None and stats.draft_max is not None and stats.draft_sum is not None:
        scores = inputs.draft_logits.gather(2, ids[:, :3].unsqueeze(2)).squeeze(2)
        assert torch.equal(stages.buffer("draft_score")[:, :3][judged[:, :3]], scores[judged[:, :3]])
        assert torch.equal(stages.buffer("draft_max")[judged], stats.draft_max[judged])
        assert torch.allclose(stages.buffer("draft_sum")[judged], stats.draft_sum[judged], rtol=1e-5)


def test_rejection(stages: Stages) -> None:
    accepted, kind, token = stages.buffer("decision").long().unbind(1)
    expected = stages.decision
    assert torch.equal(accepted, expected.accepted)
    assert torch.equal(kind, expected.kind)
    assert torch.equal(token, expected.token)
    known = stages.draws & (kind != reference.PLAIN)
    assert torch.allclose(stages.buffer("norms")[known, 0], expected.norm_p[known], rtol=1e-6)
    assert torch.allclose(stages.buffer("norms")[known, 1], expected.norm_q[known], rtol=1e-6)


def test_masses() -> None:
    """Of [p - q]+ after a rejection and of p otherwise, up to one constant per request."""
    stages = Stages(with_law=True)
    expected = log_masses(*reference.masses(stages.law, SHAPE.law_part))
    mine = log_masses(stages.buffer("law_max"), stages.buffer("law_chunks"))
    residual = stages.decision.kind == reference.RESIDUAL
    assert residual.any()
    assert (stages.decision.kind == reference.PLAIN).any()
    expected = expected + torch.where(residual, stages.decision.norm_p, 0.0).unsqueeze(1)
    assert torch.allclose(mine[stages.draws], expected[stages.draws], rtol=1e-5, atol=1e-5)


def log_masses(top: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    return top.repeat_interleave(sums.shape[1] // top.shape[1], 1) + sums.log()


def test_draw_and_insert(stages: Stages) -> None:
    masses = reference.masses(stages.law, SHAPE.law_part)
    drawn = reference.draw(stages.law, stages.inputs, stages.decision, *masses)
    expected = reference.insert(stages.inputs, stages.decision, drawn)
    assert stages.draws.any()
    assert torch.equal(stages.verdict.token_ids, expected.token_ids)
    assert torch.equal(stages.verdict.num_emitted, expected.num_emitted)
    assert torch.equal(stages.verdict.num_accepted, expected.num_accepted)


def test_the_reference_draws_as_the_samplers_do(stages: Stages) -> None:
    masses = reference.masses(stages.law, SHAPE.law_part)
    for dtype in (torch.float32, torch.float64):
        drawn = reference.draw(stages.law, stages.inputs, stages.decision, *masses, dtype)
        positions = stages.inputs.positions + stages.decision.accepted
        assert torch.equal(drawn, noise.two_level_draw(stages.law, stages.inputs.seeds, positions, dtype))
