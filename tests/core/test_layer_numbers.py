"""One meaning of a layer's number, wherever its hidden states come from (user case C31)."""

from pathlib import Path

import pytest
import torch

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.capture.collector import CapturingScheduler, CapturingTarget, Collector
from specflow.core.draft import Draft
from specflow.core.layer_numbers import check_layers, from_vllm, to_vllm
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.errors import ConfigError
from specflow.proposers.base import ProposeContext, Proposer, Requirements
from specflow.proposers.feature_rows import feature_rows, features_of
from specflow.targets.base import Taps
from specflow.targets.hf import HfOptions, HfTarget
from specflow.training.documents import Document
from specflow.training.hidden_provider import OnlineProvider
from tests.engine.helpers import layer_outputs, make_engine

ASKED = (1, 2, 3)
PROMPT = [5, 9, 17, 3, 40, 41]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


class Peek(Proposer):
    """Keeps what a head would read of the target at every position that is committed; every draft is wrong."""

    name = "peek"
    num_speculative_tokens = 2

    def __init__(self) -> None:
        self.seen: dict[int, torch.Tensor] = {}

    def requirements(self) -> Requirements:
        return Requirements(taps=Taps(layers=ASKED))

    def propose(self, context: ProposeContext) -> Draft:
        rows = feature_rows(context, 4, self.num_speculative_tokens + 1, self.name)
        hidden = features_of(context, self.name).hidden
        for row, position in zip(rows.rows.tolist(), rows.attention.positions.tolist(), strict=True):
            self.seen[position] = torch.stack([hidden[layer][row] for layer in ASKED]).clone()
        count = len(context.host.slots)
        return Draft(torch.full((count, 2), 1), context.max_drafts.clamp(max=2))


def test_decoding_extraction_and_training_give_the_same_tensors(llama_folder: Path) -> None:
    """C31: all three are the documented layers, and not those one off."""
    peek = Peek()
    engine = make_engine(llama_folder, peek)
    output = engine.generate([PROMPT], GREEDY)[0]
    ids = [*PROMPT, *output.token_ids]
    every = layer_outputs(llama_folder, ids)
    wanted = torch.stack([every[layer] for layer in ASKED], 1)
    close = {"rtol": 1e-4, "atol": 2e-4}

    decoded = torch.stack([peek.seen[position] for position in sorted(peek.seen)])
    assert sorted(peek.seen) == list(range(len(decoded)))
    assert len(decoded) >= len(ids) - 3  # nothing is drafted for the last tokens
    torch.testing.assert_close(decoded, wanted[: len(decoded)], **close)

    collector = Collector(ASKED, True, True)
    parts = (engine.sampler, CapturingScheduler(engine.scheduler, collector), engine.backend)
    capturing = Engine(CapturingTarget(engine.target, collector), None, *parts)
    again = capturing.generate([PROMPT], GREEDY, request_ids=["r"])[0]
    extracted = collector.take("r", PROMPT, again.token_ids, 64, torch.float32).hidden_states
    torch.testing.assert_close(extracted, wanted[: len(extracted)], **close)
    assert len(extracted) == len(ids) - 1

    target = HfTarget(HfOptions(path=str(llama_folder), dtype="float32", prove=False))
    target.load(CpuBackend(CpuOptions()))
    online = OnlineProvider(target.model, Taps(layers=ASKED), torch.device("cpu"), 100)
    trained = online.states([Document("d", tuple(ids), len(PROMPT), 0.0)])[0].hidden
    torch.testing.assert_close(trained, wanted, **close)

    beside = torch.stack([every[layer - 1] for layer in ASKED], 1)
    assert (trained - beside).abs().max() > 0.1


def test_vllms_numbers_are_one_more() -> None:
    """C31: its 0 is the embedding output."""
    assert [to_vllm(layer) for layer in (-1, 0, 3)] == [0, 1, 4]
    assert all(from_vllm(to_vllm(layer)) == layer for layer in range(-1, 40))


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 30])
def test_layers_that_a_target_lacks_are_refused(num_layers: int) -> None:
    """C32: N and -N - 1 are no layers of a target of N."""
    check_layers(range(-1, num_layers), num_layers, "layers")
    for wrong in (num_layers, -num_layers - 1):
        with pytest.raises(ConfigError, match=rf"layers=\[{wrong}\]: the target has no layer {wrong}"):
            check_layers([wrong], num_layers, "layers")
