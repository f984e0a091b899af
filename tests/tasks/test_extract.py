"""`task=extract`: the right states, whole files, and nothing lost or done twice however a run ends."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors import safe_open

from specflow.capture import manifest as manifest_module
from specflow.capture.checks import CaptureError
from specflow.capture.collector import CapturingScheduler, CapturingTarget, Collector
from specflow.capture.manifest import Manifest, file_name, read_entries
from specflow.capture.reading import Extraction
from specflow.core.layer_numbers import from_vllm, to_vllm
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.errors import ConfigError, PromptError, StorageError
from specflow.options import build_options
from specflow.plugins.component import Kind
from specflow.proposers.base import Proposer
from specflow.targets.hf import HfTarget
from specflow.tasks.base import TaskContext
from specflow.tasks.extract import ExtractOptions, ExtractTask
from specflow.tasks.extract_report import ExtractProgress
from specflow.testing.conformance import assert_idle
from specflow.testing.proposers import NoiseProposer
from specflow.tracking.events import RunFinished
from specflow.workloads.base import Prompt
from tests.engine.helpers import PROMPTS, layer_outputs, make_engine, oracle_engine, reference_model
from tests.tasks.helpers import make_context, texts

TOLERANCE = {"rtol": 1e-4, "atol": 2e-4}
WORDS = texts("the rain in spain", "a rose is a rose is a rose", "to be or not to be", "x")


def reference_states(folder: Path, ids: list[int], layers: tuple[int, ...]) -> torch.Tensor:
    """[T, L, E] from transformers."""
    every = layer_outputs(folder, ids)
    return torch.stack([every[layer] for layer in layers], dim=1)


def capturing_engine(
    folder: Path, layers: tuple[int, ...], prompt: bool, generated: bool, inner: Engine | None = None, **scheduler: Any
) -> tuple[Engine, Collector]:
    """An engine made as the task makes it; `inner` gives the proposer."""
    base = inner or make_engine(folder, **scheduler)
    collector = Collector(layers, prompt, generated)
    parts = (base.proposer, base.sampler, CapturingScheduler(base.scheduler, collector), base.backend)
    return Engine(CapturingTarget(base.target, collector), *parts), collector


def run(
    folder: Path, tmp: Path, prompts: list[Prompt] | None = None, proposer: Proposer | None = None, **options: Any
) -> RunFinished:
    sampling = {key.removeprefix("s_"): options.pop(key) for key in list(options) if key.startswith("s_")}
    context = make_context(folder, tmp, proposer, prompts or WORDS, **sampling)
    if proposer is not None:
        context.config["proposer"] = {"name": proposer.name}  # type: ignore[index]
    return run_in(context, tmp, **options)


def run_in(context: TaskContext, tmp: Path, **options: Any) -> RunFinished:
    values = {"layers": (-1, 1, 3), "batch_size": 2, "num_writer_threads": 2, "output": str(tmp / "states"), **options}
    return ExtractTask(ExtractOptions(**values)).run(context)


def tokens_of(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return list(AutoTokenizer.from_pretrained(folder)(text)["input_ids"])


# -- the right numbers ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["llama_folder", "qwen3_folder"])
def test_states_of_prompts_equal_transformers(model: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    folder = request.getfixturevalue(model)
    finished = run(folder, tmp_path, layers=(3, -1, 0, 2))
    extraction = Extraction(tmp_path / "states")
    assert sorted(extraction.entries) == [prompt.id for prompt in WORDS]
    for prompt in WORDS:
        record = extraction.read(prompt.id)
        ids = tokens_of(folder, prompt.turns[0])
        assert record.token_ids.tolist() == ids
        assert record.token_ids.dtype == torch.int64
        assert record.hidden_states.dtype == torch.float32
        torch.testing.assert_close(record.hidden_states, reference_states(folder, ids, (3, -1, 0, 2)), **TOLERANCE)
    assert finished.metrics["extract.tokens"] == sum(len(record.token_ids) for record in extraction)


def test_layer_numbers_against_transformers_and_vllm(llama_folder: Path, tmp_path: Path) -> None:
    """vLLM's id i is the residual stream after i layers: entry i of transformers' tuple, whose last entry is normed."""
    vllm_ids = [0, 1, 2, 3]
    ours = tuple(map(from_vllm, vllm_ids))
    assert ours == (-1, 0, 1, 2)
    assert [to_vllm(layer) for layer in ours] == vllm_ids
    run(llama_folder, tmp_path, WORDS[:1], layers=(*ours, 3))
    record = Extraction(tmp_path / "states").read("p0")
    with torch.no_grad():
        model = reference_model(llama_folder)
        theirs = model(record.token_ids.unsqueeze(0), output_hidden_states=True).hidden_states
        for index, layer_id in enumerate(vllm_ids):
            torch.testing.assert_close(record.hidden_states[:, index], theirs[layer_id][0], **TOLERANCE)
        torch.testing.assert_close(model.model.norm(record.hidden_states[:, 4]), theirs[4][0], **TOLERANCE)
    assert not torch.allclose(record.hidden_states[:, 4], theirs[4][0], **TOLERANCE)
    document = (Path(__file__).parents[2] / "docs" / "hidden_states.md").read_text()
    assert "| after decoder layer l | l | l + 1 | `hidden_states[l + 1]` |" in document


def test_the_proven_fused_layers_give_the_same_states(llama_folder: Path, tmp_path: Path) -> None:
    from specflow.targets.hf import HfOptions

    context = make_context(llama_folder, tmp_path, prompts=WORDS)
    build = context.build
    target = HfTarget(HfOptions(path=str(llama_folder), dtype="float32"))
    changed = dataclasses.replace(context, build=lambda kind: target if kind is Kind.TARGET else build(kind))
    run_in(changed, tmp_path, layers=(0, 3))
    record = Extraction(tmp_path / "states").read("p1")
    expected = reference_states(llama_folder, record.token_ids.tolist(), (0, 3))
    torch.testing.assert_close(record.hidden_states, expected, **TOLERANCE)


@pytest.mark.parametrize(
    "scheduler",
    [
        {},
        {"max_num_batched_tokens": 8},  # chunks of eight tokens, shared
        {"long_prefill_token_threshold": 3},
        {"max_num_seqs": 1},
        {"max_num_seqs": 4, "num_kv_blocks": 26, "max_model_len": 80},  # pre-emption
    ],
    ids=["whole", "chunked", "long", "one", "pre-empted"],
)
@pytest.mark.parametrize(("prompt", "generated"), [(True, True), (False, True), (True, False)])
def test_chunks_batches_and_preemption_change_nothing(
    llama_folder: Path, scheduler: dict[str, Any], prompt: bool, generated: bool
) -> None:
    engine, collector = capturing_engine(llama_folder, (-1, 2), prompt, generated, **scheduler)
    prompts = [[*one, *range(20, 36)] for one in PROMPTS]
    length = 50 if "num_kv_blocks" in scheduler else 12
    outputs = engine.generate(prompts, SamplingParams(max_tokens=length if generated else 1, ignore_eos=True))
    if "num_kv_blocks" in scheduler and generated:
        assert engine.scheduler.num_preemptions > 0  # type: ignore[attr-defined]
    check_outputs(llama_folder, collector, outputs, (-1, 2), prompt, generated)
    assert_idle(engine)


def check_outputs(
    folder: Path, collector: Collector, outputs: Any, layers: tuple[int, ...], prompt: bool, generated: bool
) -> None:
    for output in outputs:
        every = [*output.prompt_ids, *output.token_ids]
        first = 0 if prompt else len(output.prompt_ids)
        end = len(every) - 1 if generated else len(output.prompt_ids)
        found = collector.take(output.request_id, output.prompt_ids, output.token_ids, 64, torch.float32)
        assert found.token_ids.tolist() == every[first:end]
        expected = reference_states(folder, every[:end], layers)[first:]
        torch.testing.assert_close(found.hidden_states, expected, **TOLERANCE)


@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_speculation_keeps_what_was_accepted(llama_folder: Path, wrong_at: int | None) -> None:
    inner, names = oracle_engine(llama_folder, PROMPTS, 4, wrong_at)
    engine, collector = capturing_engine(llama_folder, (0, 3), True, True, inner)
    sampling = [SamplingParams(max_tokens=20 + index, ignore_eos=index % 2 == 0) for index in range(len(PROMPTS))]
    outputs = engine.generate(PROMPTS, sampling, request_ids=names)
    assert any(output.drafted for output in outputs)
    check_outputs(llama_folder, collector, outputs, (0, 3), True, True)


def test_a_stop_inside_an_accepted_run_cuts_the_states_too(llama_folder: Path) -> None:
    free = make_engine(llama_folder).generate([PROMPTS[0]], SamplingParams(max_tokens=20, ignore_eos=True))[0]
    inner, names = oracle_engine(llama_folder, [PROMPTS[0]], 6)
    engine, collector = capturing_engine(llama_folder, (3,), True, True, inner)
    stop = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=[free.token_ids[4]])
    outputs = engine.generate([PROMPTS[0]], stop, request_ids=names)
    assert len(outputs[0].token_ids) <= 5
    check_outputs(llama_folder, collector, outputs, (3,), True, True)


def test_an_aborted_request_leaves_no_states(llama_folder: Path) -> None:
    engine, collector = capturing_engine(llama_folder, (1,), True, True)
    steps: list[Any] = []

    def on_step(record: Any) -> None:
        steps.append(record)
        if len(steps) == 3:
            engine.abort("b")

    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = engine.generate(PROMPTS[:2], sampling, request_ids=["a", "b"], on_step=on_step)
    assert str(outputs[1].finish_reason) == "abort"
    collector.drop("b")
    check_outputs(llama_folder, collector, outputs[:1], (1,), True, True)
    assert collector._rows == {}


def test_the_target_looks_as_before_to_a_proposer(llama_folder: Path) -> None:
    engine, _ = capturing_engine(llama_folder, (0, 1), True, False)
    target = engine.target
    assert target.facts.num_layers == 4
    assert target.model.config.num_hidden_layers == 4  # type: ignore[attr-defined]
    assert target.describe() == target._inner.describe()  # type: ignore[attr-defined]


# -- files ---------------------------------------------------------------------------------------------------------
def test_files_manifest_and_summary(llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [Prompt("set/0", ("the rain",), False), Prompt("plain-1", ("in spain falls",), False)]
    finished = run(llama_folder, tmp_path, prompts, layers=(1, 2))
    folder = tmp_path / "states"
    lines = [json.loads(line) for line in (folder / "manifest.jsonl").read_text().splitlines()]
    assert {line["request_id"] for line in lines} == {"set/0", "plain-1"}
    entry = next(line for line in lines if line["request_id"] == "set/0")
    assert entry["file"].startswith("set_0-")
    assert entry["hidden_states"] == [*entry["token_ids"], 2, 64]
    assert entry["layers"] == [1, 2]
    assert entry["dtype"] == "float32"
    assert (folder / entry["file"]).stat().st_size == entry["bytes"]
    with safe_open(folder / "plain-1.safetensors", "pt") as file:
        assert set(file.keys()) == {"hidden_states", "token_ids"}
        assert file.metadata()["request_id"] == "plain-1"
    assert sorted(path.suffix for path in folder.iterdir() if path.is_file() and path.name != ".lock") == [
        ".json",
        ".jsonl",
        ".safetensors",
        ".safetensors",
    ]
    settings = json.loads((folder / "extract.json").read_text())
    assert settings["target_hash"] == entry["target"]
    assert finished.metrics["extract.requests"] == 2
    shown = capsys.readouterr().out
    for word in ("2 saved", "tokens/s", "bytes", "folder", "states"):
        assert word in shown


def test_generated_tokens_and_a_proposer(llama_folder: Path, tmp_path: Path) -> None:
    run(
        llama_folder, tmp_path, proposer=NoiseProposer(2, 384), generated_tokens=True, s_max_tokens=6, s_ignore_eos=True
    )
    for record, prompt in zip(map(Extraction(tmp_path / "states").read, ("p0", "p1")), WORDS, strict=False):
        ids = tokens_of(llama_folder, prompt.turns[0])
        assert record.token_ids.tolist()[: len(ids)] == ids
        assert len(record.token_ids) == len(ids) + 5
        expected = reference_states(llama_folder, record.token_ids.tolist(), (-1, 1, 3))
        torch.testing.assert_close(record.hidden_states, expected, **TOLERANCE)


def test_notes_tell_what_was_left_out(llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = [Prompt("p", ("one", "two", "three"), False)]
    run(llama_folder, tmp_path, prompts, proposer=NoiseProposer(2, 384))
    shown = " ".join(capsys.readouterr().out.split())
    assert "2 later turns" in shown
    assert "no proposer ran" in shown


@pytest.mark.parametrize("name", ["a/b", "..", ".hidden", "ä", "x" * 400, "a b", "", "con:1"])
def test_every_id_gets_a_file_name(name: str) -> None:
    found = file_name(name)
    assert found.isascii()
    assert "/" not in found
    assert not found.startswith(".")
    assert len(found) < 160
    assert file_name("a/b") != file_name("a_b")


def test_bfloat16_stays_bfloat16(tmp_path: Path) -> None:
    from specflow.capture.collector import Captured
    from specflow.capture.writer import AsyncWriter

    states = torch.randn(5, 2, 8).to(torch.bfloat16)
    manifest = Manifest(tmp_path, {"a": 1}, resume=True)
    with AsyncWriter(manifest, (0, 1), "hash", 1) as writer:
        writer.submit(Captured("r", (1, 2, 3, 4, 5), 0, torch.arange(5), states))
    manifest.close()
    assert torch.equal(Extraction(tmp_path).read("r").hidden_states, states)


# -- ends before the end ---------------------------------------------------------------------------------------------
def test_resuming_does_only_what_is_missing(llama_folder: Path, tmp_path: Path) -> None:
    run(llama_folder, tmp_path, WORDS[:2])
    folder = tmp_path / "states"
    before = {path: path.stat().st_mtime_ns for path in folder.glob("*.safetensors")}
    finished = run(llama_folder, tmp_path)
    assert finished.metrics["extract.requests"] == 2
    assert finished.metrics["extract.requests_already_there"] == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert run(llama_folder, tmp_path).metrics["extract.requests"] == 0
    assert len((folder / "manifest.jsonl").read_text().splitlines()) == 4


def test_what_a_kill_leaves_is_cleared_up(llama_folder: Path, tmp_path: Path) -> None:
    run(llama_folder, tmp_path)
    folder = tmp_path / "states"
    manifest = folder / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(b"".join(lines[:2]) + lines[2][:30])  # torn, and the fourth never written
    (folder / "p9.safetensors.partial").write_bytes(b"half")
    gone = json.loads(lines[0])["file"]
    (folder / gone).unlink()
    assert run(llama_folder, tmp_path).metrics["extract.requests"] == 3
    assert len(Extraction(folder)) == 4
    assert len(list(Extraction(folder))) == 4
    assert len(manifest.read_text().splitlines()) == 4
    assert not list(folder.glob("*.partial"))


def test_a_damaged_line_is_named(llama_folder: Path, tmp_path: Path) -> None:
    run(llama_folder, tmp_path)
    path = tmp_path / "states" / "manifest.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{}", *lines[1:]]) + "\n")
    with pytest.raises(StorageError, match=r"manifest.jsonl:2 is damaged"):
        run(llama_folder, tmp_path)


SCRIPT = """
import sys, threading, time
from pathlib import Path
sys.path[:0] = [{root!r}]
import torch
torch.set_num_threads(1)
from specflow.capture import writer
from tests.tasks.helpers import make_context, texts
from tests.tasks.test_extract import run_in
inner = writer.write_atomically
def slow(path, content):
    time.sleep(0.05)
    inner(path, content)
writer.write_atomically = slow
prompts = texts(*(f"prompt number {{i}} of many" for i in range(40)))
run_in(make_context(Path({model!r}), Path({tmp!r}), prompts=prompts), Path({tmp!r}), num_writer_threads=1)
"""


def test_after_kill_9_nothing_is_lost_and_nothing_done_twice(llama_folder: Path, tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    script = SCRIPT.format(root=root, model=str(llama_folder), tmp=str(tmp_path))
    manifest = tmp_path / "states" / "manifest.jsonl"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, cwd=root)
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if manifest.exists() and manifest.read_bytes().count(b"\n") >= 5:
                break
            time.sleep(0.01)
        assert process.poll() is None, "it ended before it could be killed"
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    done = set(read_entries(tmp_path / "states"))
    assert 5 <= len(done) < 40
    kept = {name: (tmp_path / "states" / file_name(name)).stat().st_mtime_ns for name in done}
    prompts = texts(*(f"prompt number {i} of many" for i in range(40)))
    finished = run(llama_folder, tmp_path, prompts)
    assert finished.metrics["extract.requests"] == 40 - len(done)
    assert {name: (tmp_path / "states" / file_name(name)).stat().st_mtime_ns for name in done} == kept
    assert sorted(record.entry.request_id for record in Extraction(tmp_path / "states")) == sorted(
        p.id for p in prompts
    )
    assert len(manifest.read_text().splitlines()) == 40


class FullDisk:
    """fsync fails from the n-th call on, as it does when the disk is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int, number: int = errno.ENOSPC) -> None:
        self.calls, real = 0, os.fsync

        def fsync(descriptor: int) -> None:
            self.calls += 1
            if self.calls > after:
                raise OSError(number, os.strerror(number))
            real(descriptor)

        monkeypatch.setattr(manifest_module.os, "fsync", fsync)


@pytest.mark.parametrize("after", [1, 4, 5, 6])  # the settings; then a file and a manifest line per request
def test_a_full_disk_names_the_folder_and_keeps_what_is_done(llama_folder: Path, tmp_path: Path, after: int) -> None:
    folder = tmp_path / "states"
    with pytest.MonkeyPatch.context() as patch:
        FullDisk(patch, after)
        with pytest.raises(StorageError, match="the disk is full") as caught:
            run(llama_folder, tmp_path, num_writer_threads=1)
    assert str(folder) in str(caught.value)
    done = (after - 1) // 2
    assert f"{done} requests finished so far are kept" in str(caught.value)
    assert len(list(Extraction(folder))) == done
    assert not list(folder.glob("*.partial"))
    assert run(llama_folder, tmp_path).metrics["extract.requests"] == 4 - done
    assert len(list(Extraction(folder))) == 4


def test_other_disk_errors_and_unwritable_folders(llama_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        run(llama_folder, tmp_path, output=str(tmp_path / "file" / "states"))
    FullDisk(monkeypatch, 1, errno.EIO)
    with pytest.raises(StorageError, match=r"cannot write \(Input/output error\)"):
        run(llama_folder, tmp_path)


def test_two_writers_of_one_folder_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    first = Manifest(tmp_path / "states", {}, resume=True)
    with pytest.raises(StorageError, match="another process is extracting"):
        run(llama_folder, tmp_path)
    first.close()


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"layers": (-1, 1)}, "layers: [-1, 1, 3] there, [-1, 1] now"),
        ({"generated_tokens": True}, "generated_tokens: False there, True now"),
    ],
)
def test_other_settings_are_refused(llama_folder: Path, tmp_path: Path, options: dict[str, Any], named: str) -> None:
    run(llama_folder, tmp_path)
    with pytest.raises(ConfigError, match="other settings") as caught:
        run(llama_folder, tmp_path, **options)
    assert named in str(caught.value)


def test_another_target_prompt_or_no_resume_is_refused(llama_folder: Path, qwen3_folder: Path, tmp_path: Path) -> None:
    run(llama_folder, tmp_path)
    with pytest.raises(ConfigError, match="target_hash"):
        run(qwen3_folder, tmp_path)
    with pytest.raises(ConfigError, match="'p0' was saved with another prompt"):
        run(llama_folder, tmp_path, texts("something else"))
    with pytest.raises(ConfigError, match=r"task\.resume=false"):
        run(llama_folder, tmp_path, resume=False)


# -- states that cannot be right ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda states: states * 0, "layer 1 are all zero"),
        (lambda states: states * 0 + 2.5, "layer 1 are all 2.5"),
        (lambda states: states.index_fill(0, torch.tensor([1]), float("nan")), "layer 1 hold NaN or infinity"),
        (lambda states: states.index_fill(1, torch.tensor([3]), float("inf")), "layer 1 hold NaN or infinity"),
        (lambda states: states[:1].expand_as(states), "layer 1 are the same at every position"),
    ],
)
def test_dead_states_stop_the_run_with_the_request(
    llama_folder: Path, tmp_path: Path, monkeypatch: Any, spoil: Any, message: str
) -> None:
    forward = HfTarget.forward

    def spoilt(self: HfTarget, batch: Any) -> Any:
        output = forward(self, batch)
        with torch.inference_mode():
            output.hidden[1] = spoil(output.hidden[1])
        return output

    monkeypatch.setattr(HfTarget, "forward", spoilt)
    with pytest.raises(CaptureError, match=message) as caught:
        run(llama_folder, tmp_path, batch_size=1)
    assert "request 'p0'" in str(caught.value)
    assert len(Extraction(tmp_path / "states")) == 0


def test_a_changed_file_is_noticed_on_reading(llama_folder: Path, tmp_path: Path) -> None:
    run(llama_folder, tmp_path)
    path = tmp_path / "states" / "p1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(StorageError, match="SHA-256 differs"):
        Extraction(tmp_path / "states").read("p1")
    with pytest.raises(StorageError, match="holds no extraction"):
        Extraction(tmp_path)


# -- options -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "task.layers must be set"),
        ({"layers": [1, 1]}, "must be different numbers"),
        ({"layers": [-2]}, "must be different numbers of -1 or more"),
        ({"layers": [1], "prompt_tokens": False}, "save nothing"),
        ({"layers": [1], "batch_size": 0}, "task.batch_size=0 must be 1 or more"),
        ({"layers": [1], "num_writer_threads": 0}, "must be 1 or more"),
        ({"layers": [1], "output": ""}, "task.output must be a folder"),
        ({"layer": [1]}, "Did you mean layers"),
    ],
)
def test_options(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_options(ExtractOptions, values, "task")


def test_what_only_the_engine_knows_is_refused(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.layers=\[4\].*layers are 0 to 3.*one less"):
        run(llama_folder, tmp_path, layers=(4,))
    with pytest.raises(ConfigError, match=r"task.batch_size=9 is above scheduler.max_num_seqs=4"):
        run(llama_folder, tmp_path, batch_size=9)
    with pytest.raises(ConfigError, match=r"sampling.max_tokens=1 leaves"):
        run(llama_folder, tmp_path, generated_tokens=True, s_max_tokens=1)
    with pytest.raises(PromptError, match=r"1 of 2 prompts are longer .* 'p1' with"):
        run(llama_folder, tmp_path, texts("short", "long " * 200))


def test_prompts_may_fill_the_context(llama_folder: Path, tmp_path: Path) -> None:
    text = "xz" * 64
    assert len(tokens_of(llama_folder, text)) == 128
    run(llama_folder, tmp_path, texts(text), layers=(1,))
    assert Extraction(tmp_path / "states").entries["p0"].token_ids == (128,)


def test_the_bar_waits_two_seconds(monkeypatch: Any) -> None:
    console = Console(force_terminal=True, width=100, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with ExtractProgress(4, console) as progress:
        now[0] += 1
        progress.step(50)
        assert progress._display is None
        now[0] += 4
        progress.finish()
        progress.step(50)
        assert progress._display is not None
    shown = console.export_text()
    assert "1/4" in shown
    assert "20 tok/s" in shown
