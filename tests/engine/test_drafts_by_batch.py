"""K by batch size: what every round really proposed."""

import itertools
from pathlib import Path

import pytest

from specflow.core.sampling_params import SamplingParams
from specflow.tracking.events import StepRecord
from tests.engine.helpers import PROMPTS, oracle_engine, plain


@pytest.mark.parametrize("run_ahead", [False, True])
def test_rounds_propose_what_the_batch_size_says(llama_folder: Path, run_ahead: bool) -> None:
    """C71: four drafts alone, two beside another request, none with three or four; the output is plain decoding's."""
    ranges, most = ((1, 1, 4), (2, 2, 2), (3, 8, 0)), {1: 4, 2: 2, 3: 0, 4: 0}
    records: list[StepRecord] = []
    engine, names = oracle_engine(
        llama_folder, PROMPTS, 4, num_speculative_tokens_per_batch_size=ranges, run_ahead=run_ahead
    )
    lengths = [SamplingParams(max_tokens=count, ignore_eos=True) for count in (8, 16, 30, 60)]
    outputs = engine.generate(PROMPTS, lengths, request_ids=names, on_step=records.append)
    expected = plain(llama_folder, PROMPTS, lengths)
    assert [one.token_ids for one in outputs] == [one.token_ids for one in expected]
    decoding = [record for record in records if not record.num_prompt_tokens]
    assert {record.num_requests for record in decoding} == {1, 2, 3, 4}
    for before, record in itertools.pairwise(decoding):
        if before.num_requests == record.num_requests:  # drafts are made for the requests of the step before
            assert all(count <= most[record.num_requests] for count in record.drafted), record
    for size in (1, 2):
        alike = [record for record in decoding if record.num_requests == size]
        assert max(max(record.drafted, default=0) for record in alike) == most[size]
