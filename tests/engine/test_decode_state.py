"""What decode steps know of each request: on the device, apart from the host's memory as on a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specflow.core.limits import EngineLimits
from specflow.core.request import Request
from specflow.core.sampling_params import SamplingParams
from specflow.engine import buffers
from specflow.engine.decode_state import DecodeState
from tests.engine.helpers import PROMPTS, make_engine

LIMITS = EngineLimits(
    max_num_seqs=3,
    max_model_len=32,
    max_num_batched_tokens=32,
    block_size=4,
    num_blocks=32,
    num_speculative_tokens=2,
    lookahead_tokens=0,
    vocab_size=64,
    device=torch.device("cpu"),
    dtype=torch.float32,
)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers whose device side is memory of its own, as everywhere but on a CPU."""
    make = buffers.HostBuffer.__init__

    def init(self: Any, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> None:
        make(self, shape, device, dtype)
        self.device, self._same = torch.zeros(shape, dtype=dtype), False

    monkeypatch.setattr(buffers.HostBuffer, "__init__", init)


@pytest.mark.usefixtures("apart")
def test_padded_rows_are_idle_from_the_start() -> None:
    """A graph is captured before any request has come: nobody stands before position 0."""
    rows = DecodeState(LIMITS, 4).rows(4)
    assert rows.slots.tolist() == [3] * 4
    assert rows.num_tokens.tolist() == [1] * 4
    assert not rows.active.any()


@pytest.mark.usefixtures("apart")
def test_requests_are_found_by_their_slots() -> None:
    state = DecodeState(LIMITS, 4)
    sampling = SamplingParams(temperature=0.5, top_k=7, top_p=0.9, min_p=0.25)
    first = Request("a", [1, 2, 3], sampling, seed=2**60 + 1, slot=2, output_ids=[4], num_drafts=2, steps=1)
    second = replace(first, request_id="b", slot=0, seed=5, speculate=False, num_drafts=1)
    state.load([first, second], [10, 4])
    state.seat([2, 0])
    rows = state.rows(4)
    assert rows.slots.tolist() == [2, 0, 3, 3]
    assert rows.num_tokens.tolist() == [4, 4, 1, 1]
    assert rows.active.tolist() == [True, False, False, False]  # the second one has reached its limit
    assert rows.num_drafts.tolist() == [2, 0, 0, 0]
    assert rows.seeds.tolist()[:2] == [2**60 + 1, 5]
    assert rows.speculates.tolist()[:2] == [1, 0]
    assert rows.filters.top_k.tolist()[:2] == [7, 7]
    assert rows.temperature.tolist() == [0.5, 0.5, 0.0, 0.0]
    state.store("num_tokens", rows.slots, torch.tensor([6, 4, 1, 1]))
    assert state.rows(2).num_tokens.tolist() == [6, 4]
    state.vacate()
    assert state.rows(2).slots.tolist() == [3, 3]


@pytest.mark.usefixtures("apart")
def test_the_loop_takes_nothing_from_the_host_s_memory(llama_folder: Any) -> None:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    found = [make_engine(llama_folder, run_ahead=ahead).generate(PROMPTS, sampling) for ahead in (False, True)]
    assert [one.token_ids for one in found[0]] == [one.token_ids for one in found[1]]
