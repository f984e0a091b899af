"""`engine=vllm` with a fake vLLM in a real process of its own: what is sent, what comes back, how failures read."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.core.request import FinishReason
from specflow.core.sampling_params import SamplingParams
from specflow.engine.outputs import RequestOutput
from specflow.errors import ConfigError, SpecflowError
from specflow.peers import vllm_engine, vllm_process
from specflow.peers.base import PeerRequest, PeerSession, PeerSetup
from specflow.peers.vllm_engine import VllmEngine, counted
from specflow.peers.vllm_options import VllmOptions
from tests.peers.compositions import compose
from tests.peers.fake_vllm import write_fake_vllm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake vLLM for this interpreter; returns the folder of the run."""
    write_fake_vllm(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delenv(vllm_process.INTERPRETER, raising=False)
    out = tmp_path / "out"
    out.mkdir()
    return out


@contextmanager
def session(out: Path, *words: str, speculate: bool = False, **options: Any) -> Iterator[PeerSession]:
    config, registry = compose(*words)
    setup = PeerSetup(config, registry, speculate, torch.device("cpu"), out)
    with VllmEngine(VllmOptions(**options)).open(setup) as found:
        yield found


def requests(*first: int, max_tokens: int = 5) -> list[PeerRequest]:
    return [
        PeerRequest(f"r{index}", (start, 2), SamplingParams(max_tokens=max_tokens, seed=4))
        for index, start in enumerate(first)
    ]


def logged(out: Path, name: str, start: str) -> list[Any]:
    lines = (out / name).read_text().splitlines()
    return [json.loads(line.removeprefix(start)) for line in lines if line.startswith(start)]


def test_a_plain_pass(fake: Path) -> None:
    told: list[RequestOutput] = []
    with session(fake, "scheduler.max_num_seqs=3") as engine:
        done = engine.run(requests(1, 1, 1), 2, told.append)
        assert engine.describe()["version"] == "0.fake"
        assert "method" not in engine.describe()
    assert [one.request_id for one in done.outputs] == ["r0", "r1", "r2"]
    assert {one.request_id for one in told} == {"r0", "r1", "r2"}
    first = done.outputs[0]
    assert first.token_ids == (3, 4, 5, 6, 7)
    assert first.text == "<3><4><5><6><7>"
    assert first.finish_reason is FinishReason.LENGTH
    assert first.arrival <= first.token_times[0] <= first.token_times[-1] <= first.finished
    assert done.wall_seconds >= first.finished - first.arrival
    assert done.acceptance.num_rounds == 0
    arguments = logged(fake, "vllm-plain.log", "arguments ")[0]
    assert arguments["max_num_seqs"] == 3
    assert arguments["enable_prefix_caching"] is False
    assert arguments["disable_log_stats"] is False
    assert arguments["kv_cache_memory_bytes"] == 2 * 2**30
    assert "speculative_config" not in arguments
    assert max(logged(fake, "vllm-plain.log", "in flight ")) == 2


def test_variables_of_its_process(fake: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH")
    with session(fake, environment={"PYTHONPATH": str(tmp_path)}) as engine:
        assert engine.describe()["version"] == "0.fake"


def test_drafts_are_counted_pass_by_pass(fake: Path) -> None:
    with session(fake, "+proposer=ngram", speculate=True) as engine:
        engine.run(requests(1, max_tokens=4), 1, lambda _: None)
        done = engine.run(requests(1, 1, max_tokens=4), 1, lambda _: None)
        assert engine.describe()["method"] == "ngram"
    assert done.acceptance.num_rounds == 4, "of this pass alone"
    assert done.acceptance.acceptance_rate == pytest.approx(1 / 3)
    assert done.acceptance.mean_acceptance_length == 2
    assert len(set(done.outputs[0].token_times)) == 2, "tokens of one step arrive together"
    arguments = logged(fake, "vllm-drafts.log", "arguments ")[0]
    assert arguments["speculative_config"]["method"] == "ngram"


def test_sampling_options_reach_vllm(fake: Path) -> None:
    sampling = SamplingParams(
        max_tokens=2, temperature=0.5, top_k=3, stop=["x"], stop_token_ids=[7], seed=9, logit_bias={4: 1.5}, logprobs=2
    )
    with session(fake) as engine:
        engine.run([PeerRequest("a", (1,), sampling)], 1, lambda _: None)
    line = next(x for x in (fake / "vllm-plain.log").read_text().splitlines() if x.startswith("request "))
    sent = json.loads(line.split(" ", 2)[2])
    assert (sent["temperature"], sent["top_k"], sent["seed"]) == (0.5, 3, 9)
    assert (sent["stop"], sent["stop_token_ids"], sent["logit_bias"]) == (["x"], [7], {"4": 1.5})
    assert sent["bad_words"] is None
    assert sent["logprobs"] is None


def test_what_fails_there_is_told_with_its_log(fake: Path) -> None:
    failure = pytest.raises(SpecflowError, match=r"OSError: no such model(.|\n)*vllm-plain\.log")
    with failure, session(fake, "target=hf", "target.path=missing"):
        pass
    with session(fake) as engine, pytest.raises(SpecflowError, match=r"(?s)ValueError: unlucky.*first error: KeyError"):
        engine.run(requests(13), 1, lambda _: None)


def test_a_process_that_dies_is_no_endless_wait(fake: Path) -> None:
    with session(fake) as engine, pytest.raises(SpecflowError, match=r"its process ended \(exit code 5\)"):
        engine.run(requests(66), 1, lambda _: None)


def test_a_start_that_takes_too_long(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_process, "_CLOSE_SECONDS", 0.2)
    with pytest.raises(SpecflowError, match=r"engine\.start_timeout"), session(fake, start_timeout=0.01):
        pass


def test_a_session_leaves_no_process(fake: Path) -> None:
    with session(fake) as engine:
        process = engine._process._process  # type: ignore[attr-defined]
        assert process.poll() is None
    assert process.poll() is not None


# -- before anything is loaded --------------------------------------------------------------------------------------
def check(*words: str, **options: Any) -> None:
    config, registry = compose(*words)
    VllmEngine(VllmOptions(python=sys.executable, **options)).check(config, registry)


def test_options_that_vllm_lacks_are_refused_by_name(fake: Path) -> None:
    check("+proposer=ngram")
    with pytest.raises(ConfigError) as raised:
        check("+proposer=ngram", "sampler=coupled", "sampling.min_p=0.1")
    assert "engine=vllm: sampler=coupled" in str(raised.value)
    assert "engine=vllm: sampling.min_p=0.1" in str(raised.value)
    with pytest.raises(ConfigError, match="sampler=block"):
        check("+proposer=ngram", "sampler=block", "backend=cpu")


def test_an_interpreter_without_vllm_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "has_vllm", lambda python: False)
    with pytest.raises(ConfigError, match=r"has no vLLM(.|\n)*engine\.python="):
        check()
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="cannot be started"):
        vllm_process.has_vllm(str(tmp_path / "nothing"))


def test_which_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(vllm_process.INTERPRETER, raising=False)
    assert vllm_process.interpreter(None) == sys.executable
    monkeypatch.setenv(vllm_process.INTERPRETER, "/one/python")
    assert vllm_process.interpreter(None) == "/one/python"
    assert vllm_process.interpreter("/two/python") == "/two/python"


def test_differences_become_caveats() -> None:
    config, registry = compose("+proposer=suffix", "proposer.cache_path=x")
    found = VllmEngine(VllmOptions()).caveats(config, registry)
    assert any("proposer.cache_path=x" in text for text in found)
    assert any("cannot be emptied" in text for text in found)
    compositions = [compose("+proposer=dflash", f"backend={name}") for name in ("cpu", "cuda")]
    dflash = [VllmEngine(VllmOptions()).caveats(*one) for one in compositions]
    assert [any("key norm" in text for text in texts) for texts in dflash] == [True, False]


# -- counters -------------------------------------------------------------------------------------------------------
def counters(drafts: int, tokens: int, *per_position: int) -> dict[str, Any]:
    names = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    values = (drafts, tokens, sum(per_position))
    return dict(zip(names, values, strict=True)) | {"spec_decode_num_accepted_tokens_per_pos": list(per_position)}


def test_full_drafts_give_every_rate() -> None:
    found = counted(counters(10, 30, 8, 6, 3))
    assert found.per_position_unconditional == [0.8, 0.6, 0.3]
    assert found.per_position_conditional == [0.8, 0.75, 0.5]
    assert found.per_position_per_drafted == [0.8, 0.6, 0.3]
    assert found.mean_acceptance_length == 2.7


def test_short_drafts_leave_unknown_rates_out() -> None:
    found = counted(counters(10, 29, 8, 6, 3))
    assert found.per_position_unconditional == [0.8, 0.6, 0.3]
    assert found.per_position_conditional == [None] * 3
    assert found.per_position_per_drafted == [None] * 3
    assert found.acceptance_rate == 17 / 29


def test_no_drafts_at_all() -> None:
    found = counted(counters(0, 0, 0, 0, 0))
    assert found.num_positions == 0
    assert found.acceptance_rate is None
