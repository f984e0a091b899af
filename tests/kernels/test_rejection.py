"""Rejection kernels emit the torch path's tokens, whatever is in the logits; compiled where there is a GPU."""

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.kernels.rejection_cases import DEVICE, make_case, reorder, same

pytest.importorskip("triton")

from specflow.core.limits import EngineLimits
from specflow.errors import ConfigError
from specflow.kernels import noise
from specflow.kernels.rejection import pipeline as pipeline_module
from specflow.kernels.rejection import reference
from specflow.kernels.rejection.pipeline import RejectionPipeline
from specflow.kernels.rejection.workspace import LaunchShape
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.samplers.triton_pipeline import pipeline_for

# Triton's interpreter computes with numpy, which warns of -inf - -inf where a GPU does not.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL = LaunchShape(block=1024)
LARGE = LaunchShape(block=8192)
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


@pytest.mark.slow
def test_residuals_all_over_the_vocabulary() -> None:
    """Flat laws and drafts that q overrates: most requests draw from [p - q]+."""
    rejected = 0
    for seed in range(6):
        logits, inputs = make_case(9, 2, 2500, seed=seed, heat=1.0, with_law=True)
        assert inputs.draft_logits is not None
        law = 0.2 * inputs.draft_logits
        law += 2 * torch.randn(law.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
        inputs = replace(inputs, draft_logits=law, draft_ids=law.argmax(-1))
        agree(0.2 * logits, inputs)
        rejected += int((plain(0.2 * logits, inputs).num_accepted < inputs.num_drafts).sum())
    assert rejected > 15


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


@pytest.mark.parametrize("with_law", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow), torch.float16])
def test_logits_at_the_limits_of_their_type(dtype: torch.dtype, with_law: bool) -> None:
    """Where a product with log2(e) overflows float32, and where infinity stands for a number that is not float32's."""
    logits, inputs = make_case(8, 2, 2600, seed=20, heat=1.0, dtype=dtype, with_law=with_law)
    most = torch.finfo(dtype).max
    logits[:] = torch.nan_to_num(logits)
    if not with_law:  # against a law of usual size, rows so low leave the noise no digit
        logits[0] = -most
        logits[0, [7, 2000]] = -most / 2
    logits[2, [40, 41, 1500]] = most
    logits[3, [9, 1100]] = INF
    logits[3, 600] = most
    logits[5] = -INF
    logits[5, 2100:2200] = -most
    logits[6, ::3] = float("nan")
    logits[6, 2050] = INF
    assert same(kernels(logits, inputs), reference.verify(logits, inputs, block=1024))


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


@pytest.mark.parametrize("with_law", [False, True])
def test_low_temperature_leaves_chunks_without_mass(with_law: bool) -> None:
    """Chunks whose sums of exponentials vanish beside the block's best logit can never win; the tokens stay."""
    logits, inputs = make_case(4, 3, 4000, seed=12, heat=1.0, with_law=with_law)
    logits *= 8
    logits[:, 1024:] -= 140
    agree(logits, inputs)


def test_a_nearly_certain_draft_is_left_out_of_its_chunk_before_it_is_summed() -> None:
    """Beside a draft of probability 0.9999 the other ids of its chunk must not drown in its mass."""
    logits, inputs = make_case(12, 1, 1200, seed=1, heat=1.0)
    logits = torch.full_like(logits[:1], -INF).repeat(24, 1)
    logits[:, 650] = 11.0
    logits[:, [520, 600, 1100]] = torch.tensor([0.0, 1.0, 0.5], device=DEVICE)
    seeds = torch.arange(1_000_000)
    coins = noise.uniform(seeds, torch.full_like(seeds, 10), noise.COIN)
    inputs = replace(
        inputs,
        cu_rows=2 * torch.arange(13, device=DEVICE),
        draft_ids=torch.full_like(inputs.draft_ids, 650),
        num_drafts=torch.ones_like(inputs.num_drafts),
        positions=torch.full_like(inputs.positions, 10),
        seeds=seeds[coins > 0.99996][:12].to(DEVICE),
    )
    agree(logits, inputs)
    verdict = kernels(logits, inputs)
    assert not verdict.num_accepted.any()
    assert set(verdict.token_ids[:, 0].tolist()) == {520, 600, 1100}


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
    verdict = kernels(*case, shape=SMALL)
    for other in (LaunchShape(block=2048, stats_warps=1), LaunchShape(evict_first=False, masses_warps=1)):
        assert same(verdict, kernels(*case, shape=other))
    with pytest.raises(ValueError, match="block=3072"):
        LaunchShape(block=3072)


def test_float64_noise() -> None:
    case = make_case(5, 3, 1300, seed=15, with_law=True)
    assert same(kernels(*case, noise_dtype=torch.float64), plain(*case, fp64=True))


@pytest.mark.parametrize("with_law", [False, True])
@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16])
def test_temperature_inside(dtype: torch.dtype, with_law: bool) -> None:
    logits, inputs = make_case(9, 3, 1300, seed=16, dtype=dtype, with_law=with_law)
    logits[0, 3] = INF
    heat = torch.where(inputs.temperature == 0, 1.0, inputs.temperature)
    scaled = logits.float() * (1 / heat).repeat_interleave(inputs.cu_rows.diff()).unsqueeze(1)
    exact = inputs if inputs.draft_logits is None else replace(inputs, draft_logits=inputs.draft_logits.float())
    assert same(kernels(logits, replace(inputs, scaled=False)), plain(scaled, exact))
    assert not same(kernels(logits, inputs), plain(scaled, exact))


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
    assert sampler.applies_temperature
    assert same(sampler.verify(logits, inputs), plain(logits, inputs))
    sampler = StandardSampler(StandardOptions(kernels="torch"))
    sampler.configure(limits())
    assert "torch reference" in sampler.describe()["method"]
    assert not sampler.applies_temperature


@pytest.mark.parametrize("draft_laws", [False, True])
def test_warming_up_meets_every_variant_a_step_can_ask_for(monkeypatch: pytest.MonkeyPatch, draft_laws: bool) -> None:
    """Every combination of compile-time parameters and types of an ordinary call has been launched before it."""
    seen: list[tuple[object, ...]] = []
    launch = pipeline_module._run

    def recorded(kernel, grid, arguments, num_warps):
        names = [name for name in kernel.arg_names if name.isupper()]
        types = [arguments[name].dtype for name in ("logits", "draft_logits") if name in kernel.arg_names]
        seen.append((kernel.fn.__name__, num_warps, *types, *((name, arguments[name]) for name in names)))
        launch(kernel, grid, arguments, num_warps)

    monkeypatch.setattr(pipeline_module, "_run", recorded)
    pipeline = RejectionPipeline()
    sizes = replace(limits(), dtype=torch.bfloat16)
    pipeline.warm_up(sizes, draft_laws=draft_laws)
    warm = set(seen)
    seen.clear()
    for width, heat, scaled, batch in product((0, 3), (0.0, 1.0, None), (False, True), (1, 4)):
        dtype = torch.float32 if scaled and heat != 0.0 else torch.bfloat16
        logits, inputs = make_case(batch, width, sizes.vocab_size, dtype=dtype, heat=heat, with_law=draft_laws)
        if inputs.draft_logits is not None:
            inputs = replace(inputs, draft_logits=inputs.draft_logits.float())
        pipeline.verify(logits, replace(inputs, scaled=scaled))
    assert seen
    assert set(seen) <= warm


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
        assert same(reference.verify(*case, block=1024), plain(*case))
