"""`task=profile`: its numbers belong to the steps they are said to be of, and add up."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.engine.step_parts import PARTS, measure_parts, target_bytes
from specflow.errors import ConfigError
from specflow.metrics.definitions import meaning_of
from specflow.metrics.profile import ProfileSummary, StepProfile
from specflow.plugins.component import Kind
from specflow.proposers.ngram_gpu import NgramGpuOptions, NgramGpuProposer
from specflow.tasks.profile import ProfileOptions, ProfileTask
from tests.engine.helpers import PROMPTS, make_engine
from tests.tasks.helpers import make_context

QUICK: dict[str, Any] = {"batch_sizes": (1, 3), "context": 20, "steps": 4, "query_tokens": (1, 4), "repeats": 2}


def ngram_gpu() -> NgramGpuProposer:
    return NgramGpuProposer(NgramGpuOptions(num_speculative_tokens=3, prompt_lookup_max=2, prompt_lookup_min=1))


def profile(folder: Path, output: Path, run_ahead: bool, proposer: Any, **options: Any) -> ProfileSummary:
    context = make_context(folder, output, proposer)
    backend = CpuBackend(CpuOptions(run_ahead=run_ahead))
    build = context.build
    context = replace(context, build=lambda kind: backend if kind is Kind.BACKEND else build(kind))
    done = ProfileTask(ProfileOptions(**{**QUICK, **options})).run(context)
    assert done.status == "finished"
    assert done.metrics == done.summary.to_metrics()
    return done.summary


@pytest.mark.parametrize("run_ahead", [False, True])
def test_parts_and_costs(
    llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], run_ahead: bool
) -> None:
    summary = profile(llama_folder, tmp_path, run_ahead, ngram_gpu())
    found = [(one.method, one.batch_size, one.num_query_tokens) for one in summary.steps]
    assert found == [("plain", 1, 1), ("ngram_gpu", 1, 4), ("plain", 3, 1), ("ngram_gpu", 3, 4)]
    for one in summary.steps:
        assert 0 < one.parts["target"] < one.step_seconds
        assert one.parts["verify"] > 0
        assert (one.parts["draft"] > 0) is (one.method != "plain") or not run_ahead
        assert ("books" in one.parts) is run_ahead
        assert one.host_gap is not None
        assert one.host_gap >= 0
    assert [point.query_tokens for point in summary.cost_curve] == [1, 4]
    assert summary.copy_bandwidth > 1e8
    kept = json.loads((tmp_path / "profile.json").read_text())
    assert kept["steps"][1]["parts"] == dict(summary.steps[1].parts)
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    assert [name for name in summary.to_metrics() if meaning_of(name) is None] == []
    printed = capsys.readouterr().out
    assert "ngram_gpu" in printed
    assert ("run ahead without graphs" if run_ahead else "the host in the loop") in printed


def test_plain_decoding(llama_folder: Path, tmp_path: Path) -> None:
    summary = profile(llama_folder, tmp_path, False, None, batch_sizes=(2,))
    assert [one.method for one in summary.steps] == ["plain"]
    assert summary.name.startswith("plain on ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "task.context=0"),
        ({"batch_sizes": ()}, "task.batch_sizes"),
        ({"query_tokens": (2, 2)}, "task.query_tokens"),
        ({"batch_sizes": (5,)}, "scheduler.max_num_seqs=4"),
        ({"context": 120}, "context limit is 128"),
    ],
)
def test_what_does_not_fit(llama_folder: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        profile(llama_folder, tmp_path, False, None, **options)


def test_measuring_leaves_the_engine_as_it_was(llama_folder: Path) -> None:
    engine = make_engine(llama_folder, ngram_gpu(), run_ahead=True)
    names = ["a", "b", "c", "d"]
    before = engine.generate(PROMPTS, request_ids=names, sampling=_greedy())
    parts = measure_parts(engine, 2, 20, drafts=True, repeats=3)
    assert parts is not None
    assert set(parts) == set(PARTS)
    after = engine.generate(PROMPTS, request_ids=names, sampling=_greedy())
    assert [one.token_ids for one in before] == [one.token_ids for one in after]
    assert [one.drafted for one in before] == [one.drafted for one in after]
    assert measure_parts(engine, 8, 120, drafts=True) is None  # no room
    assert measure_parts(make_engine(llama_folder), 1, 20, drafts=False) is None  # not one piece


def _greedy() -> Any:
    from specflow.core.sampling_params import SamplingParams

    return SamplingParams(max_tokens=12, ignore_eos=True)


def test_least_bytes(llama_folder: Path) -> None:
    """Weights once, an embedding of its own apart, and the keys and values of the batch."""
    engine = make_engine(llama_folder)
    facts, tables = engine.target.facts, engine.target.token_tables()
    own = tables.embedding.numel() if tables.embedding.data_ptr() != tables.head.data_ptr() else 0
    weights = 4 * (facts.num_parameters - own)
    assert target_bytes(engine, 3, 10) == weights + 30 * facts.kv_bytes_per_token


def test_numbers_of_a_step() -> None:
    one = StepProfile("plain", 2, 1, 0.010, {"target": 0.006, "verify": 0.001, "draft": 0.0, "books": 0.001}, 6_000_000)
    assert one.host_gap == pytest.approx(0.002)
    assert one.target_bandwidth == pytest.approx(1e9)
    whole = replace(one, parts={})
    assert whole.host_gap is None
    assert whole.target_bandwidth is None
