"""A quantised target: its own output counts, and a drafter in full precision agrees with it most of the time (C41)."""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.proposers.base import Proposer
from specflow.proposers.draft_model import DraftModelOptions, DraftModelProposer
from specflow.proposers.eagle3 import Eagle3Options, Eagle3Proposer
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.schedulers.continuous import ContinuousOptions, ContinuousScheduler
from specflow.targets.hf import HfOptions, HfTarget
from specflow.testing.conformance import assert_lossless
from tests.engine.helpers import generate_by_transformers
from tests.heads.eagle3_helpers import make_head, save_head

if TYPE_CHECKING:
    from specflow.backends.base import Backend

PROMPTS = [[(7 * i + 31 * j) % 383 + 1 for i in range(5 + j)] for j in range(8)]
GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)


class Int8Linear(nn.Module):
    """Weights in int8 with a scale per output; every row of activations is quantised by its own largest value.

    torch's own dynamic quantisation has one scale for all rows of a pass, so that the answer to a prompt depends on
    who is computed beside it: such a model has no plain output that speculation could keep.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("codes", (linear.weight.detach() / scale).round().to(torch.int8))
        self.register_buffer("scale", scale.squeeze(1))

    def forward(self, rows: Tensor) -> Tensor:
        scale = rows.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 127
        # Sums of products of codes stay below 2^24: exact in float32, in whatever order they are added.
        return ((rows / scale).round() @ self.codes.float().t()) * scale * self.scale


class Int8Target(HfTarget):
    """The decoder's linear layers in int8."""

    def load(self, backend: "Backend") -> None:
        super().load(backend)
        for module in list(self.model.model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear:
                    setattr(module, name, Int8Linear(child))


def int8_engine(folder: Path, proposer: Proposer) -> Engine:
    engine = Engine(
        Int8Target(HfOptions(path=str(folder), dtype="float32", prove=False, weight_layout="native")),
        proposer,
        StandardSampler(StandardOptions()),
        ContinuousScheduler(ContinuousOptions(max_num_seqs=8, block_size=4, max_model_len=128)),
        CpuBackend(CpuOptions()),
    )
    assert sum(isinstance(module, Int8Linear) for module in engine.target.model.modules()) == 4 * 7
    return engine


def test_a_full_precision_copy_as_draft_model(llama_folder: Path) -> None:
    """C41: lossless against the quantised target, which is not the unquantised one; most drafts are accepted."""
    proposer = DraftModelProposer(DraftModelOptions(path=str(llama_folder), num_speculative_tokens=3))
    engine = int8_engine(llama_folder, proposer)
    outputs = assert_lossless(engine, PROMPTS, GREEDY)
    rate = sum(output.accepted for output in outputs) / sum(output.drafted for output in outputs)
    assert 0.5 < rate < 1
    unquantised = [generate_by_transformers(llama_folder, prompt, 40) for prompt in PROMPTS]
    assert [list(output.token_ids) for output in outputs] != unquantised


def test_a_head_reads_states_of_a_quantised_target(llama_folder: Path, tmp_path: Path) -> None:
    """C41: the head is not quantised with it, and what it says of itself stands apart from the target's."""
    folder = save_head(tmp_path, make_head())
    engine = int8_engine(llama_folder, Eagle3Proposer(Eagle3Options(path=str(folder), dtype="bfloat16")))
    for output in assert_lossless(engine, PROMPTS, GREEDY):
        assert output.drafted > 0
    described = engine.describe()
    assert described["proposer"]["dtype"] == "bfloat16"
    assert described["target"]["dtype"] == "float32"
    assert {weight.dtype for weight in engine.proposer._head.parameters()} == {torch.bfloat16}
