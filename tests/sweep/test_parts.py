"""Parts of a sweep: its folder, its jobs on disk, the kept target, what is told to the tracker at the end."""

import fcntl
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specflow.errors import ConfigError, StorageError
from specflow.plugins.component import Kind
from specflow.sweep.folder import SWEEP_FILE, SweepFolder, open_folder
from specflow.sweep.jobs import Job, finished_jobs, job_key, put_aside, write_job
from specflow.sweep.kept_targets import KeptTarget
from specflow.sweep.objective import lower_is_better
from specflow.sweep.summary import summarise_sweep
from specflow.tracking.base import SweepTracker, TrackedRun
from specflow.tracking.events import SweepFinished
from tests.report import runs, scenario

WORDS = ("+proposer=ngram,suffix",)


# -- the folder ----------------------------------------------------------------------------------------------------
def opened(root: Path, name: str, *words: str, resume: bool = False) -> SweepFolder:
    with open_folder(root / name, f"{root}/${{now:%H}}-sweep", words or WORDS, resume) as folder:
        return folder


def test_resume_finds_the_newest_sweep_of_the_same_words(tmp_path: Path) -> None:
    for name in ("1", "2"):
        opened(tmp_path, name).started += int(name)
    opened(tmp_path, "3", "+proposer=dflash")
    found = opened(tmp_path, "4", *WORDS, "sweep.resume=true", resume=True)
    assert (found.path, found.resumed) == (tmp_path / "2", True)
    assert not (tmp_path / "4").exists()


def test_a_copy_of_the_record_is_no_sweep(tmp_path: Path) -> None:
    opened(tmp_path, "1")
    (tmp_path / "artifacts" / "abc").mkdir(parents=True)
    (tmp_path / "artifacts" / "abc" / SWEEP_FILE).write_text((tmp_path / "1" / SWEEP_FILE).read_text())
    assert opened(tmp_path, "2", resume=True).path == tmp_path / "1"


def test_resume_begins_anew_when_there_is_nothing(tmp_path: Path) -> None:
    found = opened(tmp_path, "1", resume=True)
    assert (found.path, found.resumed) == (tmp_path / "1", False)
    assert json.loads((tmp_path / "1" / SWEEP_FILE).read_text())["words"] == list(WORDS)


def test_a_folder_of_ones_own_is_not_used_twice_by_accident(tmp_path: Path) -> None:
    place = tmp_path / "mine"

    def once(*words: str, resume: bool) -> SweepFolder:
        with open_folder(place, str(place), words, resume) as folder:
            return folder

    once("a=1,2", resume=False)
    with pytest.raises(ConfigError, match=r"holds the sweep 'a=1,2' already: add sweep\.resume=true"):
        once("a=1,2", resume=False)
    with pytest.raises(ConfigError, match="choose another folder"):
        once("a=3", resume=True)
    assert once("a=1,2", "sweep.resume=true", resume=True).resumed


def test_only_one_process_runs_a_sweep(tmp_path: Path) -> None:
    opened(tmp_path, "1")
    with (tmp_path / "1" / ".sweep.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConfigError, match="another process runs the sweep"):
            opened(tmp_path, "2", resume=True)


def test_the_trackers_run_is_kept_for_later(tmp_path: Path) -> None:
    first = opened(tmp_path, "1")
    first.run_id = "abc"
    first.save("running")
    assert opened(tmp_path, "2", resume=True).run_id == "abc"


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    opened(tmp_path, "1")
    (tmp_path / "1" / SWEEP_FILE).write_text("{}")
    with pytest.raises(StorageError, match=r"sweep\.json cannot be read"):
        opened(tmp_path, "2", resume=True)


# -- jobs ----------------------------------------------------------------------------------------------------------
def job(config: dict[str, Any], status: str = "finished", **more: Any) -> Job:
    values = {"number": 0, "overrides": ("a=1",), "reason": None, "objective": 2.0, "started": 1.0, "finished": 2.0}
    return Job(job_key(config), status=status, **{**values, **more})


def test_a_job_is_what_it_does() -> None:
    one = runs.config("ngram", 3)
    assert job_key(one) == job_key({**one, "tracking": {"name": "none"}, "sweep": {"resume": True}})
    assert job_key(one) != job_key(runs.config("ngram", 5))
    assert job_key(one) != job_key({**one, "seed": 1})


def test_which_jobs_need_not_run_again(tmp_path: Path) -> None:
    """Finished by job.json; or the process died just before job.json, and everything else says that it finished."""
    configs = {name: runs.config("ngram", number + 1) for number, name in enumerate("abcdef")}
    summary = scenario.summary(("ngram",), (1,))
    folders = {
        "a": runs.write_run(tmp_path / "0-a", configs["a"], summary),
        "b": runs.write_run(tmp_path / "1-b", configs["b"], summary),
        "c": runs.write_run(tmp_path / "2-c", configs["c"], summary),
        "d": runs.write_run(tmp_path / "3-d", configs["d"], status="running"),
        "e": runs.write_run(tmp_path / "4-e", configs["e"], summary),
        "f": runs.write_run(tmp_path / "5-f", configs["f"], status="failed"),
    }
    write_job(job(configs["a"], objective=1.5), folders["a"])
    write_job(job(configs["b"], "failed"), folders["b"])
    tracked = {str(folders[name]): status for name, status in (("c", "finished"), ("d", "running"), ("e", "running"))}
    found = finished_jobs(tmp_path, tracked)
    assert found.keys() == {job_key(configs["a"]), job_key(configs["c"])}
    assert found[job_key(configs["a"])] == 1.5
    assert found[job_key(configs["c"])] == pytest.approx(summary.series[1].speedup)
    assert json.loads((folders["c"] / "job.json").read_text())["status"] == "finished"
    assert finished_jobs(tmp_path, None).keys() == {job_key(configs[name]) for name in "ace"}


def test_an_earlier_attempt_is_put_aside(tmp_path: Path) -> None:
    folder = tmp_path / "0-ngram"
    for attempt in (1, 2):
        (folder / ".hydra").mkdir(parents=True, exist_ok=True)
        (folder / "requests.jsonl").write_text(f"half a row {attempt}")
        aside = put_aside(folder)
        assert aside == tmp_path / "attempts" / f"0-ngram-{attempt}"
        assert (aside / "requests.jsonl").read_text() == f"half a row {attempt}"
        assert [file.name for file in folder.iterdir()] == [".hydra"]
    assert put_aside(folder) is None
    assert put_aside(tmp_path / "nowhere") is None


# -- the kept target -----------------------------------------------------------------------------------------------
class FakeTarget:
    """Counts what is done to it."""

    def __init__(self) -> None:
        self.loads = self.detaches = 0

    def load(self, backend: Any) -> None:
        self.loads += 1

    def detach(self) -> None:
        self.detaches += 1


class Stuck:
    """A target that cannot be detached."""

    load = FakeTarget.load

    def __init__(self) -> None:
        self.loads = 0


def build_target(kept: KeptTarget, config: dict[str, Any], kind: type = FakeTarget) -> Any:
    target = kept.building(lambda _: kind(), config)(Kind.TARGET)
    target.load(None)
    return target


def test_a_target_is_loaded_once() -> None:
    kept, config = KeptTarget(), runs.config("ngram")
    first = build_target(kept, config)
    assert build_target(kept, runs.config("suffix")) is first
    assert (first.loads, first.detaches) == (1, 1)
    other = build_target(kept, {**config, "target": {"name": "hf"}})
    assert other is not first
    assert build_target(kept, config) is not first, "one target at a time"
    kept.drop()
    assert build_target(kept, config) is not first


def test_what_cannot_be_detached_or_is_no_target_is_built_anew() -> None:
    kept, config = KeptTarget(), runs.config("ngram")
    assert build_target(kept, config, Stuck) is not build_target(kept, config, Stuck)
    build = kept.building(lambda kind: object(), config)
    assert build(Kind.SAMPLER) is not build(Kind.SAMPLER)


def test_a_load_that_failed_is_tried_again() -> None:
    class Unlucky(FakeTarget):
        def load(self, backend: Any) -> None:
            super().load(backend)
            if self.loads == 1:
                raise OSError("no")

    target = KeptTarget().building(lambda _: Unlucky(), runs.config("ngram"))(Kind.TARGET)
    with pytest.raises(OSError, match="no"):
        target.load(None)
    target.load(None)
    target.load(None)
    assert target.loads == 2


# -- the end -------------------------------------------------------------------------------------------------------
class FakeSweep(SweepTracker):
    """Remembers how it was ended."""

    run_id = "parent"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.event: SweepFinished | None = None

    def runs(self) -> list[TrackedRun]:
        return [
            TrackedRun("first", str(self.folder / "3-suffix"), "killed"),
            TrackedRun("again", str(self.folder / "3-suffix"), "finished"),
        ]

    def end_lost(self, run_id: str, reason: str) -> None:
        raise AssertionError("nothing is lost here")

    def finish(self, event: SweepFinished) -> None:
        self.event = event


def finish(folder: Path, wanted: str | None = None, ended_by: BaseException | None = None) -> tuple[Any, SweepFinished]:
    tracker = FakeSweep(folder)
    result = summarise_sweep(SweepFolder(folder, WORDS), tracker, "the command", wanted, ended_by)
    assert tracker.event is not None
    return result, tracker.event


def scored(folder: Path) -> Path:
    """A sweep whose jobs have objectives 10, 11, 12, 13."""
    runs.write_sweep(folder)
    for number, place in enumerate(sorted(folder.glob("[0-3]-*"))):
        write_job(replace(job(runs.config("ngram")), objective=10.0 + number), place)
    return folder


def test_the_parent_gets_the_best_job_the_table_and_every_failure(tmp_path: Path) -> None:
    """C63 and C64."""
    result, event = finish(scored(tmp_path))
    assert [one.name for one in result.failed] == ["name=eagle3 num_speculative_tokens=3"]
    assert event.status == "failed"
    assert event.reason == "1 of 5 jobs did not finish"
    assert event.metrics == {"jobs": 5.0, "finished_jobs": 4.0, "best_objective": 13.0}
    assert event.tags["best_run"] == "name=suffix num_speculative_tokens=5"
    assert event.tags["best_run_id"] == "again", "the last attempt"
    assert event.tags["failed.0"].startswith("name=eagle3 num_speculative_tokens=3: no head is bundled")
    assert "batch 1: suffix K=5" in event.tags["mlflow.note.content"]
    names = {file.name for file in event.files}
    assert {"results.html", "results.csv", "results.json", "throughput_by_length.png"} <= names
    assert "sweep.json" not in names, "a copy of it would be taken for a sweep"
    assert json.loads((tmp_path / "sweep.json").read_text())["status"] == "failed"


def test_of_times_the_least_is_the_best(tmp_path: Path) -> None:
    assert lower_is_better("ngram/batch_1/ttft_p50_seconds")
    assert not lower_is_better("ngram/batch_1/tokens_per_second")
    assert not lower_is_better(None)
    _, event = finish(scored(tmp_path), wanted="ngram/batch_1/ttft_p50_seconds")
    assert event.metrics["best_objective"] == 10.0


@pytest.mark.parametrize(
    ("ended_by", "status"), [(KeyboardInterrupt("SIGTERM"), "killed"), (ConfigError("wrong"), "failed")]
)
def test_a_sweep_that_was_ended_says_so(tmp_path: Path, ended_by: BaseException, status: str) -> None:
    _, event = finish(scored(tmp_path), ended_by=ended_by)
    assert (event.status, event.reason) == (status, str(ended_by))


def test_a_sweep_without_jobs_has_no_page(tmp_path: Path) -> None:
    result, event = finish(tmp_path)
    assert result.page is None
    assert event.status == "failed"
    assert event.files == []
