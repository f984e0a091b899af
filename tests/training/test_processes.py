"""Several processes: the same run as one, up to the order of additions; one of them reports and saves."""

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.errors import ConfigError
from specflow.training.processes import Processes, helper_process
from tests.training.runs import checkpoint, curve, make_run, steps, train
from tests.training.test_training_run import wait_for_step, with_responses

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def whole(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run by one process. Read only."""
    output = tmp_path_factory.mktemp("whole") / "out"
    train(llama_folder, output)
    return output


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start(size: int, model: Path, output: Path, **options: Any) -> list[multiprocessing.Process]:
    """The processes of one run, with the variables that torchrun sets."""
    port = free_port()
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_run, args=(rank, size, port, model, output, options)) for rank in range(size)]
    for process in processes:
        process.start()
    return processes


def _run(rank: int, size: int, port: int, model: Path, output: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    run = make_run(model, output, **options)
    run.parts.processes = Processes.from_environment()
    try:
        run.run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    run.parts.processes.leave()


def join(processes: list[multiprocessing.Process]) -> list[int | None]:
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def assert_close(first: Path, second: Path) -> None:
    ours, theirs = checkpoint(first), checkpoint(second)
    assert ours[0] == theirs[0]
    for name, value in ours[1]["module"].items():
        torch.testing.assert_close(value, theirs[1]["module"][name], rtol=1e-3, atol=1e-4)
    for one, other in zip(curve(first), curve(second), strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_two_processes_do_what_one_does(whole: Path, llama_folder: Path, tmp_path: Path) -> None:
    """All stages, responses included, which the first process alone writes."""
    output = tmp_path / "out"
    assert join(start(2, llama_folder, output)) == [0, 0]
    rows = [sorted((folder / "responses.jsonl").read_text().splitlines()) for folder in (whole, output)]
    assert rows[0] == rows[1]
    assert_close(whole, output)
    assert json.loads((output / "training.json").read_text())["processes"] == 2


def test_a_signal_to_one_process_saves_for_all_and_another_number_goes_on(
    whole: Path, llama_folder: Path, tmp_path: Path
) -> None:
    output = with_responses(whole, tmp_path / "out")
    processes = start(2, llama_folder, output, stage="train")
    wait_for_step(output, 4)
    os.kill(processes[1].pid or 0, signal.SIGTERM)
    assert join(processes) == [130, 130]
    assert 4 <= max(steps(output)) < 24
    train(llama_folder, output)
    assert_close(whole, output)


def test_what_cannot_be_shared_is_refused(whole: Path, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(llama_folder, whole, packs_per_step=3)
    run.parts.target.load(run.parts.backend)
    run.parts.processes = Processes(0, 2, 0)
    with pytest.raises(ConfigError, match=r"task\.packs_per_step=3 cannot be shared by 2 processes"):
        run.parts.trainer(run.parts.online)
    run = make_run(llama_folder, whole, capture="hybrid")
    run.parts.target.load(run.parts.backend)
    run.parts.processes = Processes(0, 2, 0)
    with pytest.raises(ConfigError, match="hybrid works in one process"):
        run.parts.provider()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ConfigError, match="torchrun"):
        Processes.from_environment()


def test_a_helper_is_any_process_but_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert Processes.from_environment() == Processes(0, 1, 0)
    assert not helper_process()
    for rank, helps in (("0", False), ("1", True)):
        monkeypatch.setenv("WORLD_SIZE", "2")
        monkeypatch.setenv("RANK", rank)
        assert helper_process() is helps


@pytest.mark.slow
def test_torchrun(llama_folder: Path, tmp_path: Path) -> None:
    """The command of the documentation."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": f"p{index}", "prompt": f"x{index} ab"}) + "\n" for index in range(20)))
    words = [
        *("task=train", "+proposer=fake", "target=hf", f"target.path={llama_folder}", "target.prove=false"),
        *("workload=jsonl", f"workload.path={prompts}", "scheduler.max_model_len=128", "backend=cpu"),
        *("task.head.layer=1", "task.response_tokens=16", "task.held_out=0.3", "task.pack_length=96", "task.steps=8"),
        *("task.packs_per_step=2", "task.bf16=false", f"task.output={tmp_path / 'out'}", "task.evaluate_every=4"),
        *(f"tracking.uri=sqlite:///{tmp_path / 'm.db'}", f"hydra.run.dir={tmp_path / 'run'}"),
    ]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port"]
    command += [str(free_port()), "-m", "tests.training.run_train", str(tmp_path / "conf"), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("head saved in") == 1
    card = json.loads((tmp_path / "out" / "training.json").read_text())
    assert card["processes"] == 2
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tmp_path / 'm.db'}")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    assert len(runs) == 1
