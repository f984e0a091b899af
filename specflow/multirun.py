"""Sweeps: every job of one command, then one page about all of them.

Jobs may run one after the other here, side by side in processes, or on other machines (`hydra/launcher=…`), so what
they share lies in files: the sweep's folder has one folder per job, plain decoding's measurements and, at the end, the
page.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig

from specflow.composition import Composer, Sample, plain_config
from specflow.errors import SpecflowError
from specflow.interrupts import interruptible
from specflow.options import build_options
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry, load_plugins
from specflow.runner import PartOfSweep, check, execute, is_tracked, objective, refuse
from specflow.sweep.folder import SweepFolder, open_folder, without_resume
from specflow.sweep.jobs import Job, finished_jobs, job_key, put_aside, write_job
from specflow.sweep.kept_targets import KeptTarget
from specflow.sweep.options import SweepOptions
from specflow.sweep.summary import SweepResult, summarise_sweep
from specflow.tasks.baselines import Baselines
from specflow.tracking.base import SweepTracker
from specflow.tracking.events import RunFinished, SweepStarted
from specflow.tracking.facts import collect_facts

if TYPE_CHECKING:
    from omegaconf import DictConfig

__all__ = ["SweepJob", "run_sweep"]

BASELINES = "baselines"  # folder of plain decoding's measurements
_KEPT = KeptTarget()  # of this process, which may run several jobs: those of a sweep here, a worker's of a pool


@dataclass
class SweepJob:
    """What Hydra calls for every job, in this process or in another one: it is sent there as plain data.

    A job that fails says so on stderr and in its folder and returns None, which every sweeper takes for a failed trial;
    the others go on.
    """

    folder: Path
    options: SweepOptions
    parent_run_id: str | None
    done: Mapping[str, float | None]  # objectives of jobs that an earlier attempt has finished
    jobs: int  # expected
    registry: Registry | None = None  # not sent along: another process loads its own
    report: Callable[[Exception], Any] | None = field(default=None)  # prints an error

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "registry": None}

    def __call__(self, cfg: "DictConfig") -> float | None:
        """Run one job and return its objective."""
        registry = self.registry or load_plugins()
        hydra = HydraConfig.get()
        words, number = without_resume(hydra.overrides.task), int(hydra.job.num)
        output_dir = Path(hydra.runtime.output_dir)
        title = " ".join(words) or "(nothing overridden)"
        config = plain_config(cfg)
        key = job_key(config)
        if key in self.done:
            self._say(f"job {number + 1}: {title}: finished before")
            return self.done[key]
        self._say(f"job {number + 1} of {self.jobs}: {title}" if number < self.jobs else f"job {number + 1}: {title}")
        put_aside(output_dir)
        facts = collect_facts(registry.sources(), Path(hydra.runtime.cwd), words)
        started, error, value = time.time(), None, None
        try:
            value = self._run(config, registry, output_dir, facts, title)
        except Exception as raised:
            error = raised
            _KEPT.drop()
            if self.report is not None:
                self.report(raised)
        status = "failed" if error else "finished"
        reason = str(error) or type(error).__name__ if error else None
        write_job(Job(key, number, words, status, reason, value, started, time.time()), output_dir)
        return value

    def _run(
        self, config: dict[str, Any], registry: Registry, output_dir: Path, facts: Mapping[str, str], title: str
    ) -> float | None:
        tracking = config.get(Kind.TRACKING)
        if self.parent_run_id and isinstance(tracking, dict) and tracking.get("parent_run_id", "") is None:
            tracking["parent_run_id"] = self.parent_run_id
        baselines = Baselines(self.folder / BASELINES, output_dir.name) if self.options.reuse_baseline else None
        part = PartOfSweep(title, baselines, _KEPT)
        try:
            plan = check(config, registry)
        except SpecflowError as error:
            refuse(config, registry, output_dir, facts, part, error)
            raise
        with interruptible():
            finished: RunFinished = execute(plan, output_dir, facts, part)
        return objective(finished.metrics, config.get("objective"))

    @staticmethod
    def _say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)


def run_sweep(
    compose: Composer, words: Sequence[str], config_name: str, registry: Registry, report: Callable[[Exception], Any]
) -> SweepResult | None:
    """Run every job of a command and summarise them; None for a task that leaves no runs.

    report: prints the error of a job when it fails. Raises `SpecflowError` when the sweep itself cannot run,
    `OSError` when its folder cannot be written, `KeyboardInterrupt` with what had finished being summarised.
    """
    sample = compose.sample(words, config_name)
    options = build_options(SweepOptions, sample.config.get("sweep") or {}, "sweep")
    if not is_tracked(sample.config, registry):
        compose.sweep(words, _untracked(registry), config_name)
        return None
    with open_folder(sample.folder, sample.folder_template, words, options.resume) as folder:
        tracker = _open_tracker(sample, folder, words, registry)
        if tracker is not None:
            folder.run_id = tracker.run_id
            folder.save("running")
        done = _resume(folder, tracker) if folder.resumed else {}
        _announce(folder, options, done)
        job = SweepJob(folder.path, options, tracker.run_id if tracker else None, done, sample.jobs, registry, report)
        interrupted: BaseException | None = None
        try:
            compose.sweep([*words, f"hydra.sweep.dir={_quoted(folder.path)}"], job, config_name)
        except BaseException as error:
            interrupted = error
        finally:
            _KEPT.drop()
        command = " ".join(["python -m specflow -m", *words])
        wanted = sample.config.get("objective")
        try:
            result = summarise_sweep(folder, tracker, command, wanted, interrupted)
        except SpecflowError as error:
            if interrupted is None:
                raise
            interrupted.add_note(f"then, while closing: {error}")
        if interrupted is not None:
            if not isinstance(interrupted, SpecflowError):
                interrupted.add_note(
                    f"what had finished is kept in {folder.path}; sweep.resume=true goes on from there"
                )
            raise interrupted
        return result


def _open_tracker(sample: Sample, folder: SweepFolder, words: Sequence[str], registry: Registry) -> SweepTracker | None:
    """The tracker's run above those of the jobs; None where the tracker has no such thing."""
    node = sample.config.get(Kind.TRACKING) or {}
    tracker = registry.get(Kind.TRACKING, str(node.get("name"))).build(node)
    open_sweep = getattr(tracker, "open_sweep", None)
    if open_sweep is None:
        return None
    facts = collect_facts(registry.sources(), Path.cwd(), words)
    name = f"sweep of {', '.join(sample.swept)}" if sample.swept else "sweep"
    return open_sweep(SweepStarted(name, folder.words, sample.config, folder.path, facts, folder.run_id))


def _resume(folder: SweepFolder, tracker: SweepTracker | None) -> dict[str, float | None]:
    """What an earlier attempt has finished. Runs it left open in the tracker are ended: their process is gone."""
    tracked: dict[str, str] | None = None
    if tracker is not None:
        runs = tracker.runs()
        tracked = {run.output_dir: run.status for run in runs}
        for run in runs:
            if run.status == "running":
                tracker.end_lost(run.run_id, "its process was killed; the sweep was resumed")
    return finished_jobs(folder.path, tracked)


def _announce(folder: SweepFolder, options: SweepOptions, done: Mapping[str, Any]) -> None:
    if folder.resumed:
        print(f"going on with {folder.path}: {len(done)} job(s) have finished before", file=sys.stderr)
    elif options.resume:
        print(
            f"sweep.resume=true: no sweep of this command was found, a new one begins in {folder.path}", file=sys.stderr
        )


def _untracked(registry: Registry) -> Callable[["DictConfig"], None]:
    def job(cfg: "DictConfig") -> None:
        execute(check(plain_config(cfg), registry), Path.cwd(), {})

    return job


def _quoted(path: Path) -> str:
    """A path as a value of Hydra's grammar."""
    text = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}'"
