"""Rejection kernels compiled, at the sizes they are for: tokens of the torch path, and the law they must follow."""

import itertools
from dataclasses import replace

import pytest
import torch

from tests.kernels.rejection_cases import DEVICE, make_case, same

pytest.importorskip("triton")

from specflow.core.draft import Verdict, VerifyInputs
from specflow.core.limits import EngineLimits
from specflow.kernels.noise import DRAFT, gumbel_argmax, gumbel_noise
from specflow.kernels.rejection.block_stats import block_stats_kernel
from specflow.kernels.rejection.finish import finish_kernel
from specflow.kernels.rejection.masses import masses_kernel
from specflow.kernels.rejection.pipeline import RejectionPipeline
from specflow.kernels.rejection.reject import reject_kernel
from specflow.kernels.rejection.workspace import LaunchShape
from specflow.samplers.standard import StandardOptions, StandardSampler

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")]

P = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
Q = torch.tensor([0.7, 0.2, 0.05, 0.03, 0.02])


def plain(logits: torch.Tensor, inputs: VerifyInputs, fp64: bool = False) -> Verdict:
    law = None if inputs.draft_logits is None else inputs.draft_logits.float()
    return StandardSampler(StandardOptions(use_fp64_gumbel=fp64)).verify(logits, replace(inputs, draft_logits=law))


@pytest.mark.parametrize("with_law", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("batch", "k", "vocab"), [(1, 3, 151_936), (1, 15, 256_000), (8, 7, 151_936), (64, 3, 256_000), (64, 15, 151_936)]
)
def test_tokens_equal_the_torch_path(batch: int, k: int, vocab: int, dtype: torch.dtype, with_law: bool) -> None:
    for seed in range(3):
        case = make_case(batch, k, vocab, seed=seed, dtype=dtype, with_law=with_law)
        assert same(RejectionPipeline().verify(*case), plain(*case))


@pytest.mark.parametrize(
    "shape",
    [LaunchShape(overlap=False), LaunchShape(block=2048, stats_warps=1), LaunchShape(block=8192, masses_warps=8)],
)
@pytest.mark.parametrize("with_law", [False, True])
def test_launch_shapes_do_not_matter(shape: LaunchShape, with_law: bool) -> None:
    """Several calls in a row, so that a kernel that starts too early would read what the call before has left."""
    pipeline = RejectionPipeline(shape=shape)
    cases = [make_case(16, 7, 151_936, seed=seed, dtype=torch.bfloat16, with_law=with_law) for seed in range(6)]
    verdicts = [pipeline.verify(*case) for case in cases]
    assert all(same(verdict, plain(*case)) for verdict, case in zip(verdicts, cases, strict=True))


@pytest.mark.parametrize("draft_laws", [False, True])
def test_no_step_compiles_after_warming_up(draft_laws: bool) -> None:
    """Whatever the batch size, odd ones with unaligned slices included."""
    limits = EngineLimits(
        max_num_seqs=9, max_model_len=64, max_num_batched_tokens=64, block_size=16, num_blocks=9,
        num_speculative_tokens=3, lookahead_tokens=4, vocab_size=3000, device=DEVICE, dtype=torch.bfloat16,
    )  # fmt: skip
    pipeline = RejectionPipeline()
    pipeline.warm_up(limits, draft_laws=draft_laws)
    kernels = (block_stats_kernel, reject_kernel, masses_kernel, finish_kernel)
    before = [_variants(kernel) for kernel in kernels]
    for batch, k, heat in itertools.product((1, 3, 8, 9), (0, 3), (0.0, 1.0, None)):
        logits, inputs = make_case(batch, k, 3000, dtype=torch.bfloat16, heat=heat, with_law=draft_laws)
        law = None if inputs.draft_logits is None else inputs.draft_logits.float()
        inputs = replace(inputs, draft_logits=law)
        pipeline.verify(logits, replace(inputs, scaled=False))
        pipeline.verify(logits.float(), inputs)
    assert [_variants(kernel) for kernel in kernels] == before


def _variants(kernel) -> int:
    return sum(len(caches[0]) for caches in kernel.device_caches.values())


def test_float64_noise() -> None:
    case = make_case(8, 3, 151_936, with_law=True)
    assert same(RejectionPipeline(noise_dtype=torch.float64).verify(*case), plain(*case, fp64=True))


def test_a_captured_call_replays_with_new_contents() -> None:
    logits, inputs = make_case(8, 3, 32_000, heat=1.0)
    pipeline = RejectionPipeline()
    pipeline.verify(logits, inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        verdict = pipeline.verify(logits, inputs)
    for seed in range(20):
        inputs.seeds.fill_(seed)
        logits.copy_(logits.roll(1, 0))
        graph.replay()
        assert same(verdict, plain(logits, inputs))


@pytest.mark.parametrize("with_law", [False, True])
def test_the_law_is_kept(with_law: bool) -> None:
    """100,000 first tokens; total variation below what a right sampler exceeds once in a million (note 7.2)."""
    batch, vocab, rounds = 4000, 9000, 25
    ids = torch.tensor([5, 1023, 4096, 8191, 8999])
    p, q = (torch.full((vocab,), float("-inf")).scatter(0, ids, law.log()).to(DEVICE) for law in (P, Q))
    counts = torch.zeros(vocab, device=DEVICE)
    pipeline = RejectionPipeline()
    ints = torch.arange(batch + 1, device=DEVICE)
    for index in range(rounds):
        seeds, positions = ints[:-1] + index * batch, torch.full((batch,), 10, device=DEVICE)
        noise = gumbel_noise(seeds, positions, DRAFT, vocab)
        drafts = gumbel_argmax(q.expand(batch, -1), noise) if with_law else ints[:-1] * 0 + 5
        inputs = VerifyInputs(
            cu_rows=2 * ints, draft_ids=drafts.unsqueeze(1), num_drafts=ints[:-1] * 0 + 1, positions=positions,
            temperature=torch.ones(batch, device=DEVICE), seeds=seeds, rounds=ints[:-1] * 0,
            draft_logits=q.expand(batch, 1, -1) if with_law else None, all_greedy=False,
        )  # fmt: skip
        first = pipeline.verify(p.expand(2 * batch, -1).contiguous(), inputs).token_ids[:, 0]
        counts += torch.bincount(first, minlength=vocab)
    observed = counts[ids.to(DEVICE)].cpu() / (batch * rounds)
    assert 0.5 * float((observed - P).abs().sum()) < 0.01185
    assert float(counts.sum()) == batch * rounds
