"""Rejection kernels emit the torch path's tokens, whatever is in the logits; compiled where there is a GPU."""

from dataclasses import replace

import pytest
import torch

from tests.kernels.rejection_cases import DEVICE, make_case, reorder, same

pytest.importorskip("triton")

from specflow.core.limits import EngineLimits
from specflow.errors import ConfigError
from specflow.kernels.rejection import reference
from specflow.kernels.rejection.pipeline import RejectionPipeline
from specflow.kernels.rejection.workspace import LaunchShape
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.samplers.triton_pipeline import pipeline_for

# Triton's interpreter computes with numpy, which warns of -inf - -inf where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = LaunchShape(stats_block=2048, sample_block=1024, chunk=256)
LARGE = LaunchShape(stats_block=8192, sample_block=4096)
INF = float("inf")


def limits() -> EngineLimits:
    return EngineLimits(
        max_num_seqs=4, max_model_len=64, max_num_batched_tokens=64, block_size=16, num_blocks=9,
        num_speculative_tokens=3, lookahead_tokens=4, vocab_size=300, device=DEVICE, dtype=torch.float32,
    )  # fmt: skip


def plain(logits, inputs, fp64: bool = False):
    return StandardSampler(StandardOptions(use_fp64_gumbel=fp64)).verify(logits, inputs)


def kernels(logits, inputs, shape: LaunchShape = SMALL, **options):
    return RejectionPipeline(shape=shape, **options).verify(logits, inputs)


def agree(logits, inputs, shape: LaunchShape = SMALL) -> None:
    assert same(kernels(logits, inputs, shape), plain(logits, inputs))


@pytest.mark.parametrize("with_law", [False, True])
@pytest.mark.parametrize("vocab", [5, 1023, 1024, 8193])
@pytest.mark.parametrize("batch", [1, 3, 9])
def test_tokens_equal_the_torch_path(batch: int, vocab: int, with_law: bool) -> None:
    shape = SMALL if vocab < 8000 else LARGE
    agree(*make_case(batch, 3, vocab, seed=batch + vocab, with_law=with_law), shape)


@pytest.mark.parametrize("with_law", [False, True])
def test_a_real_vocabulary(with_law: bool) -> None:
    agree(*make_case(2, 2, 32_000, seed=5, with_law=with_law, heat=0.9), LARGE)


@pytest.mark.slow
@pytest.mark.parametrize("with_law", [False, True])
@pytest.mark.parametrize("num_drafts", [1, 7, 15])
def test_more_drafts(num_drafts: int, with_law: bool) -> None:
    for seed in range(5):
        agree(*make_case(9, num_drafts, 4099, seed=seed, with_law=with_law))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("with_law", [False, True])
def test_half_precision_logits(dtype: torch.dtype, with_law: bool) -> None:
    logits, inputs = make_case(5, 3, 1500, seed=2, dtype=dtype, with_law=with_law)
    exact = inputs if inputs.draft_logits is None else replace(inputs, draft_logits=inputs.draft_logits.float())
    assert same(kernels(logits, inputs), plain(logits.float(), exact))


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_no_drafts_at_all(heat: float) -> None:
    agree(*make_case(4, 0, 1300, seed=3, heat=heat))


def test_all_greedy() -> None:
    agree(*make_case(9, 3, 2050, seed=4, heat=0.0))


@pytest.mark.parametrize("heat", [None, 0.0, 1.0])
@pytest.mark.parametrize("with_law", [False, True])
def test_masked_logits_and_a_masked_block(heat: float | None, with_law: bool) -> None:
    logits, inputs = make_case(3, 3, 3000, seed=6, heat=heat, with_law=with_law)
    logits[torch.rand(logits.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE) < 0.5] = -INF
    logits[:, 1024:2048] = -INF
    logits[1] = -INF
    logits[1, 2500] = 0.0
    agree(logits, inputs)


@pytest.mark.parametrize("heat", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), -INF, INF])
def test_rows_of_one_odd_value(value: float, heat: float) -> None:
    logits, inputs = make_case(5, 2, 1200, seed=7, heat=heat)
    logits[::2] = value
    agree(logits, inputs)
    verdict = kernels(logits, inputs)
    emitted = verdict.token_ids[verdict.token_ids != -1]
    assert ((emitted >= 0) & (emitted < 1200)).all()
    assert (verdict.num_emitted >= 1).all()


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_single_odd_values(heat: float) -> None:
    logits, inputs = make_case(6, 2, 1200, seed=8, heat=heat)
    logits[::2, 100:400] = float("nan")
    logits[1, 777] = INF
    logits[1, 1100] = INF
    agree(logits, inputs)


@pytest.mark.parametrize("place", [slice(0, 1200), slice(3, 4)])
@pytest.mark.parametrize("value", [float("nan"), INF, -INF])
def test_a_draft_law_that_is_no_law(value: float, place: slice) -> None:
    logits, inputs = make_case(5, 2, 1200, seed=9, heat=1.0, with_law=True)
    assert inputs.draft_logits is not None
    inputs.draft_logits[:, :, place] = value
    agree(logits, inputs)


def test_ties_take_the_lowest_id_across_blocks() -> None:
    logits, inputs = make_case(3, 2, 3000, seed=10, heat=0.0)
    logits[:] = 1.0
    logits[:, [700, 1500, 2900]] = 3.0
    logits[0, 1023:1025] = 9.0
    agree(logits, inputs)
    assert int(kernels(logits, inputs).token_ids[0, 0]) == 1023


def test_an_empty_residual_is_drawn_from_p() -> None:
    """p equals q and the draft has no mass under either: rejected, and nothing is left of p - q."""
    logits, inputs = make_case(4, 1, 1200, seed=11, heat=1.0, with_law=True)
    inputs.num_drafts[:] = 1
    inputs = replace(inputs, cu_rows=2 * torch.arange(5, device=DEVICE))
    logits = 0.1 * logits[:1].repeat(8, 1)  # flat, so that the four requests draw different tokens
    logits[:, :600] = -INF
    inputs.draft_ids[:] = 3
    inputs = replace(inputs, draft_logits=logits[::2].unsqueeze(1).clone())
    agree(logits, inputs)
    tokens = kernels(logits, inputs).token_ids[:, 0]
    assert (tokens >= 600).all()
    assert len(set(tokens.tolist())) > 1


def test_low_temperature_skips_blocks_without_changing_tokens() -> None:
    """Blocks whose best logit lies too far below the row's best are not read; the tokens stay."""
    logits, inputs = make_case(4, 3, 4000, seed=12, heat=1.0)
    logits *= 8
    logits[:, 1024:] -= 40
    agree(logits, inputs)


def test_order_and_padding_do_not_matter() -> None:
    logits, inputs = make_case(9, 3, 1500, seed=13, with_law=True, padded=True)
    order = [4, 0, 8, 2, 6, 1, 7, 3, 5]
    verdict = kernels(logits, inputs)
    assert torch.equal(kernels(*reorder(logits, inputs, order)).token_ids, verdict.token_ids[order])
    assert same(verdict, plain(logits, inputs))
    alone = kernels(*reorder(logits, inputs, [5]))
    assert torch.equal(alone.token_ids[0], verdict.token_ids[5])


def test_block_sizes_do_not_matter() -> None:
    case = make_case(5, 3, 3000, seed=14)
    other = LaunchShape(stats_block=2048, sample_block=2048, chunk=1024)
    assert same(kernels(*case, shape=SMALL), kernels(*case, shape=other))


def test_float64_noise() -> None:
    case = make_case(5, 3, 1300, seed=15, with_law=True)
    assert same(kernels(*case, noise_dtype=torch.float64), plain(*case, fp64=True))


def test_temperature_inside() -> None:
    logits, inputs = make_case(9, 3, 1300, seed=16)
    heat = torch.where(inputs.temperature == 0, 1.0, inputs.temperature)
    scaled = logits * (1 / heat).repeat_interleave(inputs.cu_rows.diff()).unsqueeze(1)
    assert same(kernels(logits, inputs, scale=True), plain(scaled, inputs))


def test_draft_logits_by_slot() -> None:
    logits, inputs = make_case(4, 3, 1300, seed=17, with_law=True, heat=1.0)
    assert inputs.draft_logits is not None
    slots = torch.tensor([7, 2, 5, 0], device=DEVICE)
    cache = torch.zeros(8, 3, 1300, device=DEVICE)
    cache[slots] = inputs.draft_logits
    pipeline = RejectionPipeline(shape=SMALL)
    assert same(pipeline.verify(logits, replace(inputs, draft_logits=cache), slots), plain(logits, inputs))


def test_buffers_are_reused() -> None:
    pipeline = RejectionPipeline(shape=SMALL)
    for seed in range(3):
        case = make_case(3, 3, 1300, seed=seed, with_law=True)
        assert same(pipeline.verify(*case), plain(*case))
    assert len(pipeline.workspaces) == 1


def test_an_empty_batch() -> None:
    logits, inputs = make_case(1, 3, 50)
    none = {n: getattr(inputs, n)[:0] for n in ("draft_ids", "num_drafts", "positions", "temperature", "seeds")}
    verdict = kernels(logits[:0], replace(inputs, cu_rows=inputs.cu_rows[:1], **none))
    assert verdict.token_ids.shape == (0, 4)
    assert verdict.num_emitted.shape == (0,)


def test_the_sampler_uses_the_kernels() -> None:
    logits, inputs = make_case(3, 2, 300, seed=18)
    sampler = StandardSampler(StandardOptions(kernels="triton"))
    sampler.configure(limits())
    assert "triton kernels" in sampler.describe()["method"]
    assert same(sampler.verify(logits, inputs), plain(logits, inputs))
    sampler = StandardSampler(StandardOptions(kernels="torch"))
    sampler.configure(limits())
    assert "torch reference" in sampler.describe()["method"]


def test_kernels_without_a_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match=r"sampler\.kernels=triton cannot run on the device cpu"):
        pipeline_for("triton", torch.device("cpu"), torch.float32)
    assert pipeline_for("auto", torch.device("cpu"), torch.float32) is None


def test_a_subclass_with_its_own_rule_keeps_it() -> None:
    class Stubborn(StandardSampler):
        def judge(self, logits, rows, inputs):
            return super().judge(logits, rows, inputs)

    sampler = Stubborn(StandardOptions(kernels="triton"))
    sampler.configure(limits())
    assert "torch reference" in sampler.describe()["method"]


def test_columns_that_are_not_contiguous() -> None:
    logits, inputs = make_case(3, 2, 300, seed=19)
    assert same(kernels(logits.T.contiguous().T, inputs), plain(logits, inputs))


def test_reference_pipeline_equals_the_sampler() -> None:
    for seed in range(20):
        case = make_case(7, 4, 300, seed=seed, with_law=seed % 2 == 0)
        assert same(reference.verify(*case, block=128), plain(*case))
