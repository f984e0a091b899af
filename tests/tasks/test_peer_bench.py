"""`task=bench` on another engine: its answers against our plain decoding, its rows in the same table."""

import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from specflow import cli
from specflow.engine.outputs import RequestOutput
from specflow.errors import ConfigError
from specflow.metrics.acceptance import AcceptanceCounts
from specflow.peers.base import DecodingEngine, OnFinish, PeerPass, PeerRequest, PeerSession, PeerSetup
from specflow.plugins import Component, hookimpl
from specflow.plugins.registry import Registry, load_plugins
from specflow.report.records import read_record
from specflow.report.rows import rows_of
from tests.engine.helpers import make_engine
from tests.tasks.helpers import Recorder


@dataclasses.dataclass(frozen=True, kw_only=True)
class EchoOptions:
    """Options of the fake engine."""

    wrong: bool = False  # change a token of every drafted answer
    attempts: str = ""  # what `check` refuses


class Echo(DecodingEngine):
    """Answers with our own engine, so that right answers are known; counts two drafts and one accepted per token."""

    name = "echo"

    def __init__(self, options: EchoOptions) -> None:
        self.options = options

    def check(self, config: Mapping[str, Any], registry: Registry) -> None:
        if self.options.attempts:
            raise ConfigError(f"engine=echo: {self.options.attempts}")

    def caveats(self, config: Mapping[str, Any], registry: Registry) -> Sequence[str]:
        return ["it only echoes"]

    @contextmanager
    def open(self, setup: PeerSetup) -> Iterator[PeerSession]:
        yield _EchoSession(self.options, setup)


class _EchoSession(PeerSession):
    def __init__(self, options: EchoOptions, setup: PeerSetup) -> None:
        self._wrong = options.wrong and setup.speculate
        self._engine = make_engine(Path(setup.config["target"]["path"]))
        self._speculate = setup.speculate

    def run(self, requests: Sequence[PeerRequest], concurrency: int, on_finish: OnFinish) -> PeerPass:
        prompts = [list(one.prompt_ids) for one in requests]
        found: list[RequestOutput] = []
        answers = self._engine.generate(prompts, [one.sampling for one in requests], concurrency=concurrency)
        for request, output in zip(requests, answers, strict=True):
            ids = output.token_ids
            ids = (*ids[:2], (ids[2] + 1) % 300, *ids[3:]) if self._wrong else ids
            found.append(dataclasses.replace(output, request_id=request.request_id, token_ids=ids))
            on_finish(found[-1])
        counts = AcceptanceCounts()
        for output in found:
            counts.add_all([2] * len(output.token_ids), [1] * len(output.token_ids))
        return PeerPass(found, 2.0 if not self._speculate else 1.0, counts, peak_memory_bytes=77)

    def describe(self) -> Mapping[str, str]:
        return {"version": "9", "mode": "drafts" if self._speculate else "plain"}


class EchoPlugin:
    """The fake engine as a plugin brings it."""

    def __init__(self, folder: Path) -> None:
        (folder / "engine").mkdir(parents=True, exist_ok=True)
        (folder / "engine" / "echo.yaml").write_text('name: echo\nwrong: false\nattempts: ""\n')
        self._folder = folder

    @hookimpl
    def specflow_engines(self) -> Sequence[Component]:
        return [Component("echo", Echo, EchoOptions, "answers with our engine")]

    @hookimpl
    def specflow_config_dirs(self) -> Sequence[Path]:
        return [self._folder]


@pytest.fixture
def bench(llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> Any:
    """Runs the command in an empty folder; returns exit code, output, errors and summary.json."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts.jsonl").write_text(
        "\n".join(json.dumps({"prompt": text}) for text in ("a rose is a rose is a rose", "the rain in spain"))
    )
    registry = load_plugins(only="")
    base = [
        "tracking=none", "hydra.run.dir=out", "target=hf", f"target.path={llama_folder}", "target.dtype=float32",
        "target.prove=false", "workload=jsonl", "workload.path=prompts.jsonl", "sampling.max_tokens=8",
        "sampling.ignore_eos=true", "scheduler.max_model_len=64", "engine=echo",
    ]  # fmt: skip

    def call(*words: str) -> tuple[int, str, str, dict[str, Any]]:
        with registry.temporary(EchoPlugin(tmp_path / "echo_conf")):
            repeats = [] if any(word.startswith("task=") for word in words) else ["task.repeats=2"]
            code = cli.main([*base, *repeats, *words], registry)
        shown = capsys.readouterr()
        file = tmp_path / "out" / "summary.json"
        return code, shown.out, shown.err, json.loads(file.read_text()) if file.exists() else {}

    return call


def test_rows_metrics_and_verdict(bench: Any, tmp_path: Path) -> None:
    code, out, err, summary = bench("+proposer=ngram", "task.batch_sizes=[1,2]")
    assert (code, err) == (0, "")
    assert [(one["method"], one["batch_size"]) for one in summary["series"]] == [
        ("plain", 1), ("ngram", 1), ("plain", 2), ("ngram", 2),
    ]  # fmt: skip
    metrics = summary["metrics"]
    assert metrics["plain/batch_1/tokens_per_second"] == 8.0, "16 tokens in 2 seconds"
    assert metrics["ngram/batch_2/speedup"] == 2.0
    assert metrics["ngram/batch_1/mean_acceptance_length"] == 2.0
    assert metrics["ngram/batch_1/acceptance_rate"] == 0.5
    assert metrics["lossless"] == 1
    assert "plain/batch_1/acceptance_rate" not in metrics
    assert metrics["ngram/batch_1/peak_memory_bytes"] == 77
    assert summary["lossless"]["status"] == "verified"
    assert summary["lossless"]["compared_requests"] == 16, "plain decoding there is compared as well"
    assert "echo plain: 8 of 8 answers equal specflow's plain decoding token for token" in out.replace("\n", " ")
    assert "echo: it only echoes" in out
    assert summary["really_ran"]["engine"]["version"] == "9"
    assert summary["really_ran"]["proposer"]["mode"] == "drafts"
    rows = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == 2 * 2 * 2 * 2, "methods, batch sizes, repeats, requests; warm-ups are no results"
    assert {len(row["token_ids"]) for row in rows} == {8}


def test_rows_say_which_engine(bench: Any, tmp_path: Path) -> None:
    bench("+proposer=ngram", "task.batch_sizes=[1]")
    rows = rows_of([read_record(tmp_path / "out")])
    assert [row.engine for row in rows] == ["echo", "echo"]
    assert [row.label for row in rows] == ["echo plain", "echo ngram K=5"]
    assert json.loads((tmp_path / "out" / "run.json").read_text())["name"] == "ngram on hf by echo"


def test_another_answer_fails_the_run(bench: Any) -> None:
    code, out, err, summary = bench("+proposer=ngram", "task.batch_sizes=[1]", "engine.wrong=true")
    assert code == 1
    assert "FAILED" in err
    assert summary["lossless"]["status"] == "failed"
    assert summary["lossless"]["first_difference"]["position"] == 2
    assert summary["lossless"]["differences"] == 4, "the drafted answers of both repeats"
    assert "echo ngram: 0 of 4 answers equal" in out.replace("\n", " ")
    assert bench("+proposer=ngram", "task.batch_sizes=[1]", "engine.wrong=true", "task.require_lossless=false")[0] == 0


def test_a_lossy_sampler_is_not_compared(bench: Any) -> None:
    words = ["sampler=synthetic", "sampler.synthetic_acceptance_length=2", "engine.wrong=true"]
    code, _, _, summary = bench("+proposer=ngram", "task.batch_sizes=[1]", *words)
    assert code == 0
    assert summary["lossy"] is True
    assert summary["lossless"]["compared_requests"] == 4, "plain decoding only"


def test_sampled_answers_are_not_compared_token_by_token(bench: Any) -> None:
    summary = bench("task.batch_sizes=[1]", "sampling.temperature=1")[3]
    assert summary["lossless"]["status"] == "not_applicable"
    assert [one["method"] for one in summary["series"]] == ["plain"]


def test_a_requirement_holds_there_too(bench: Any) -> None:
    code, _, err, _ = bench("+proposer=ngram", "task.batch_sizes=[1]", "task.require_acceptance_length=2.5")
    assert code == 1
    assert "task.require_acceptance_length=2.5" in err


def test_a_conversation_is_the_same_for_every_engine(bench: Any, llama_folder: Path, tmp_path: Path) -> None:
    """A later turn holds the answers of our plain decoding, whoever is measured."""
    folder = tmp_path / "model"
    shutil.copytree(llama_folder, folder)
    template = "{% for message in messages %}{{ message.role }} {{ message.content }}\n{% endfor %}assistant"
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    (tmp_path / "chat.jsonl").write_text(json.dumps({"turns": ["a rose", "is a rose"]}))
    words = ["workload.path=chat.jsonl", "workload.chat=true", "engine.wrong=true", "task.require_lossless=false"]
    words += [f"target.path={folder}", "scheduler.max_model_len=200"]
    code, _, err, _ = bench("+proposer=ngram", "task.batch_sizes=[1]", *words)
    assert code == 0, err
    rows = [json.loads(line) for line in (tmp_path / "out" / "requests.jsonl").read_text().splitlines()]
    second = {row["prompt_tokens"] for row in rows if row["request_id"].endswith("turn-2")}
    assert len(second) == 1, "wrong answers of the engine itself are not in it"
    assert len(rows) == 2 * 2 * 2


# -- before anything is loaded --------------------------------------------------------------------------------------
def test_what_the_engine_refuses_is_one_error(bench: Any, tmp_path: Path) -> None:
    code, _, err, _ = bench("engine.attempts=nothing", "workload.request_rate=3", "task.batch_sizes=[1,99]")
    assert code == 2
    assert "engine=echo: nothing" in err
    assert "workload.request_rate=3" in err
    assert "scheduler.max_num_seqs=16" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("task", ["verify", "generate", "train"])
def test_other_tasks_run_on_our_engine_only(bench: Any, task: str) -> None:
    code, _, err, _ = bench("+proposer=ngram", f"task={task}")
    assert code == 2
    assert f"engine=echo: task={task} runs on specflow's own engine only" in err


def test_hooks_hear_of_series_and_requests(bench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    heard = Recorder()
    monkeypatch.setattr("specflow.runner._displays", lambda: [])
    from specflow.tasks import peer_bench

    original = peer_bench.PeerBench._measure
    monkeypatch.setattr(
        peer_bench.PeerBench,
        "_measure",
        lambda self, *args, **kwargs: original(
            dataclasses.replace(self, context=dataclasses.replace(self.context, hooks=heard)), *args, **kwargs
        ),
    )
    bench("+proposer=ngram", "task.batch_sizes=[2]")
    assert [one.warmup for one in heard.of("specflow_series_started")] == [True, False, False] * 2
    assert len(heard.of("specflow_request_finished")) == 2 * (1 + 2 * 2)


def test_a_sweep_gives_the_kept_target_back(llama_folder: Path, tmp_path: Path) -> None:
    """The target of the job before would take the memory that another engine asks for."""
    from specflow.runner import PartOfSweep, Plan, _context
    from specflow.sweep.kept_targets import KeptTarget

    dropped: list[bool] = []

    class Kept(KeptTarget):
        def drop(self) -> None:
            dropped.append(True)

    registry = load_plugins(only="")
    task = registry.get("task", "bench").build({"name": "bench"})
    for engine, expected in (("specflow", []), ("vllm", [True])):
        plan = Plan({"engine": {"name": engine}, "target": {}}, registry, task, {})
        _context(plan, tmp_path, {}, PartOfSweep("job", kept=Kept()))
        assert dropped == expected
