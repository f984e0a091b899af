"""The Triton pipeline inside the engine: the tokens of the torch path, from draft laws read where they are stored."""

from pathlib import Path

import pytest

from specflow.core.draft import Verdict, VerifyInputs
from specflow.core.sampling_params import SamplingParams
from specflow.kernels.triton_choice import triton_available
from specflow.proposers.draft_model import DraftModelOptions, DraftModelProposer
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.testing.conformance import assert_idle, assert_same
from tests.engine.helpers import PROMPTS, make_engine
from tests.models import tiny_llama

pytestmark = pytest.mark.skipif(not triton_available(), reason="triton is not installed")


class Watched(StandardSampler):
    """Notes in which rows of the store the laws were."""

    def verify(self, logits, inputs: VerifyInputs) -> Verdict:  # type: ignore[no-untyped-def]
        if inputs.draft_slots is not None:
            assert inputs.draft_logits is not None
            self.rows.append(inputs.draft_slots.tolist())
            self.stored = len(inputs.draft_logits)
        return super().verify(logits, inputs)


def test_engine_emits_the_torch_paths_tokens(tmp_path: Path) -> None:
    """Six requests through four slots, so that rows of a batch are not the rows of the store."""
    target = tiny_llama(tmp_path / "target", seed=2, vocab=8, layers=2, initializer_range=0.15)
    draft = tiny_llama(tmp_path / "draft", seed=3, vocab=8, layers=1, initializer_range=0.15)
    prompts = [[1 + (3 * row + step) % 7 for step in range(2 + row)] for row in range(6)]
    sampling = [
        SamplingParams(max_tokens=4 + 3 * row, temperature=(0.0, 0.7, 1.0)[row % 3], seed=row, ignore_eos=True)
        for row in range(6)
    ]
    outputs, watched = [], Watched(StandardOptions(kernels="triton"))
    watched.rows = []  # type: ignore[attr-defined]
    for sampler in (StandardSampler(StandardOptions(kernels="torch")), watched):
        proposer = DraftModelProposer(
            DraftModelOptions(path=str(draft), num_speculative_tokens=3, draft_sample_method="probabilistic")
        )
        engine = make_engine(target, proposer, sampler, max_num_seqs=4)
        outputs.append(engine.generate(prompts, sampling, request_ids=[f"r{row}" for row in range(6)]))
        assert_idle(engine)
    assert_same(*outputs)
    rows = watched.rows  # type: ignore[attr-defined]
    assert watched.stored == 5  # type: ignore[attr-defined]
    assert any(row != list(range(len(row))) for row in rows)
    assert 0 < sum(output.accepted for output in outputs[0]) < sum(output.drafted for output in outputs[0])


def test_torch_path_gets_laws_in_request_order(llama_folder: Path) -> None:
    seen = []

    class Plain(StandardSampler):
        def verify(self, logits, inputs: VerifyInputs) -> Verdict:  # type: ignore[no-untyped-def]
            seen.append((inputs.draft_slots, None if inputs.draft_logits is None else len(inputs.draft_logits)))
            return super().verify(logits, inputs)

    proposer = DraftModelProposer(
        DraftModelOptions(path=str(llama_folder), num_speculative_tokens=2, draft_sample_method="probabilistic")
    )
    engine = make_engine(llama_folder, proposer, Plain(StandardOptions()))
    engine.generate(PROMPTS, SamplingParams(max_tokens=6, temperature=1.0, seed=1, ignore_eos=True))
    assert (None, len(PROMPTS)) in seen
    assert all(slots is None for slots, _ in seen)
