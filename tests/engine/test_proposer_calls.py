"""What the engine tells a proposer about the requests it has drafted for."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specflow.core.sampling_params import SamplingParams
from specflow.proposers.base import PassCost, Requirements
from specflow.testing.proposers import OracleProposer
from tests.engine.helpers import PROMPTS, make_engine, plain

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
NAMES = ["a", "b", "c", "d"]


class Witness(OracleProposer):
    """Always right, and notes what is called: starts, the longest text it has seen, ends."""

    def __init__(self, sequences: dict[str, list[int]]) -> None:
        super().__init__(sequences, num_speculative_tokens=4)
        self.slots: dict[str, int] = {}
        self.seen: dict[str, int] = {}
        self.ends: list[tuple[str, list[int], int]] = []  # id, its tokens, how many of them `draft` had seen

    def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
        assert request_id not in self.slots
        self.slots[request_id] = slot

    def draft(self, tokens: np.ndarray, max_drafts: int, request_id: str) -> np.ndarray:
        self.seen[request_id] = len(tokens)
        return super().draft(tokens, max_drafts, request_id)

    def finish(self, request_id: str, slot: int, token_ids: Sequence[int]) -> None:
        assert self.slots.pop(request_id) == slot
        self.ends.append((request_id, list(token_ids), self.seen[request_id]))


@pytest.fixture
def texts(llama_folder: Path) -> dict[str, list[int]]:
    """Prompt and greedy continuation by request id."""
    outputs = plain(llama_folder, PROMPTS, GREEDY)
    return {name: [*out.prompt_ids, *out.token_ids] for name, out in zip(NAMES, outputs, strict=True)}


def test_the_end_brings_all_tokens(llama_folder: Path, texts: dict[str, list[int]]) -> None:
    witness = Witness(texts)
    make_engine(llama_folder, witness).generate(PROMPTS, GREEDY, request_ids=NAMES)
    assert {name: ids for name, ids, _ in witness.ends} == texts
    # No draft has seen the last step's tokens: that is why they come with the end.
    assert all(0 < len(ids) - seen <= 5 for _, ids, seen in witness.ends)
    assert not witness.slots


def test_a_pre_emption_brings_the_tokens_so_far(llama_folder: Path, texts: dict[str, list[int]]) -> None:
    witness = Witness(texts)
    engine = make_engine(llama_folder, witness, num_kv_blocks=36)
    engine.generate(PROMPTS, GREEDY, request_ids=NAMES)
    ends = witness.ends
    assert len(ends) == len(NAMES) + engine.scheduler.num_preemptions > len(NAMES)
    assert all(ids == texts[name][: len(ids)] for name, ids, _ in ends)
    last = {name: ids for name, ids, _ in ends}
    assert last == texts
    # Whoever was pre-empted had drafted after every token.
    assert all(len(ids) == seen for name, ids, seen in ends if ids != last[name])
    assert not witness.slots


def test_an_abort_brings_what_there_is(llama_folder: Path, texts: dict[str, list[int]]) -> None:
    witness = Witness(texts)
    engine = make_engine(llama_folder, witness)
    steps: list[int] = []

    def stop(_: object) -> None:
        steps.append(1)
        if len(steps) == 3:
            engine.abort("b")

    output = engine.generate(PROMPTS, GREEDY, request_ids=NAMES, on_step=stop)[1]
    assert len(output.token_ids) < 40
    assert ("b", [*output.prompt_ids, *output.token_ids]) in [(name, ids) for name, ids, _ in witness.ends]
    assert not witness.slots


class Calibrated(OracleProposer):
    """Asks what passes of the target cost."""

    told: Sequence[PassCost] | None = None

    def requirements(self) -> Requirements:
        return replace(super().requirements(), pass_costs=True)

    def calibrate(self, costs: Sequence[PassCost]) -> None:
        assert self.told is None
        self.told = costs


def test_a_proposer_that_asks_is_told_what_passes_cost(llama_folder: Path, texts: dict[str, list[int]]) -> None:
    """Of one request, up to what all with all drafts need, and of several; and the measuring leaves no trace."""
    proposer = Calibrated(texts, num_speculative_tokens=4)
    engine = make_engine(llama_folder, proposer, max_num_seqs=3)
    assert proposer.told is not None
    alone = [(1, tokens) for tokens in (1, 2, 4, 8, 15)]
    together = [(3, 3 * tokens) for tokens in (1, 2, 4, 5)]
    assert [(cost.requests, cost.tokens) for cost in proposer.told] == alone + together
    assert all(0 < cost.seconds < 10 for cost in proposer.told)
    outputs = engine.generate(PROMPTS, GREEDY, request_ids=NAMES)
    assert {name: [*out.prompt_ids, *out.token_ids] for name, out in zip(NAMES, outputs, strict=True)} == texts


def test_where_steps_have_fixed_shapes_drafts_cost_nothing(llama_folder: Path, texts: dict[str, list[int]]) -> None:
    proposer = Calibrated(texts, num_speculative_tokens=4)
    engine = make_engine(llama_folder, proposer, run_ahead=True)
    assert proposer.told is not None
    assert engine.loop is not None
    assert [(cost.requests, cost.tokens) for cost in proposer.told] == [(1, 5)]
