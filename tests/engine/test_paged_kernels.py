"""Paged attention by Triton inside the engine: the tokens of the torch path, for target and proposer."""

from pathlib import Path

import pytest

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.kernels.triton_choice import triton_available
from specflow.proposers.draft_model import DraftModelOptions, DraftModelProposer
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.schedulers.continuous import ContinuousOptions, ContinuousScheduler
from specflow.targets.hf import HfOptions, HfTarget
from specflow.testing.conformance import assert_idle, assert_same
from tests.engine.helpers import make_engine
from tests.models import tiny_llama

pytestmark = pytest.mark.skipif(not triton_available(), reason="triton is not installed")


def test_engine_emits_the_torch_paths_tokens(tmp_path: Path) -> None:
    """Prompts and blocks of several lengths in one step. A copy of the target drafts, and is always right."""
    folder = tiny_llama(tmp_path, layers=1)
    proposers = [DraftModelProposer(DraftModelOptions(path=str(folder), num_speculative_tokens=2)) for _ in range(2)]
    target = HfTarget(HfOptions(path=str(folder), dtype="float32", prove=False, attention="triton"))
    scheduler = ContinuousScheduler(
        ContinuousOptions(max_num_seqs=2, max_num_batched_tokens=16, block_size=4, max_model_len=64)
    )
    compiled = Engine(
        target, proposers[0], StandardSampler(StandardOptions(kernels="torch")), scheduler, CpuBackend(CpuOptions())
    )
    prompts, sampling = [[5, 9, 17, 3], [7], [11, 12, 13, 14, 15, 16]], SamplingParams(max_tokens=5, ignore_eos=True)
    names = ["a", "b", "c"]
    found = compiled.generate(prompts, sampling, request_ids=names)
    assert target.describe()["attention"] == "paged, Triton"
    assert proposers[0]._pages.decoder.kernels.name == "Triton"
    assert_idle(compiled)
    plain = make_engine(folder, proposers[1], max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    assert_same(found, plain.generate(prompts, sampling, request_ids=names))
    assert all(output.accepted == output.drafted for output in found)
    assert any(output.drafted for output in found)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_drafting_passes_of_several_requests(tmp_path: Path, run_ahead: bool) -> None:
    """Passes of one token per request, as on a GPU: each goes where it belongs, so the twin is always right."""
    folder = tiny_llama(tmp_path, layers=1)
    twin = DraftModelProposer(DraftModelOptions(path=str(folder), num_speculative_tokens=3))
    scheduler = ContinuousScheduler(
        ContinuousOptions(max_num_seqs=3, max_num_batched_tokens=32, block_size=4, max_model_len=32)
    )
    engine = Engine(
        HfTarget(HfOptions(path=str(folder), dtype="float32", prove=False, attention="triton")),
        twin,
        StandardSampler(StandardOptions(kernels="torch")),
        scheduler,
        CpuBackend(CpuOptions(run_ahead=run_ahead)),
    )
    twin._pages.steps = None  # the kernels written for a CPU alone
    prompts, sampling = [[5, 9, 17, 3], [7], [11, 12, 13, 14, 15, 16]], SamplingParams(max_tokens=9, ignore_eos=True)
    outputs = engine.generate(prompts, sampling)
    assert [(output.rounds, output.drafted, output.accepted) for output in outputs] == [(2, 6, 6)] * 3
