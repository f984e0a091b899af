"""One run: check every option, start the listeners, do the task, and always say how it ended."""

import errno
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from specflow.composition import plain_config
from specflow.errors import ConfigError, ProposerError, SpecflowError, StorageError
from specflow.interrupts import interruptible
from specflow.options import build_options, show
from specflow.plugins.blame import owner_of
from specflow.plugins.component import Kind
from specflow.plugins.registry import RegisteredComponent, Registry
from specflow.plugins.relay import is_disk_full
from specflow.sweep.kept_targets import KeptTarget
from specflow.sweep.objective import objective
from specflow.sweep.options import SweepOptions
from specflow.tasks.base import Task, TaskContext
from specflow.tracking.events import RunFinished, RunStarted
from specflow.tracking.facts import collect_facts
from specflow.training.processes import helper_process
from specflow.words import did_you_mean, valid_names

if TYPE_CHECKING:  # it imports torch, which a listing need not
    from specflow.tasks.baselines import Baselines

__all__ = ["CrashError", "PartOfSweep", "Plan", "check", "execute", "is_tracked", "objective", "refuse", "run"]

ERROR_LOG = "error.log"
OWN_ENGINE = "specflow"
_TOP_LEVEL = (*map(str, Kind), "sampling", "seed", "objective", "sweep")


class CrashError(SpecflowError):
    """A fault of the program or of a plugin's code; its traceback lies in the run's folder."""


@dataclass(frozen=True)
class Plan:
    """A run whose options are all valid; nothing is loaded yet."""

    config: Mapping[str, Any]
    registry: Registry
    task: Task
    components: Mapping[Kind, RegisteredComponent]

    def build(self, kind: Kind) -> Any:
        """A fresh component of the composition, or None for an absent proposer."""
        if kind not in self.components:
            return None
        return self.components[kind].build(self.config[kind])

    @property
    def name(self) -> str:
        """Short name of the run, for instance "ngram on bundled"."""
        task = self.components[Kind.TASK].component.name
        if Kind.TARGET not in self.task.needs:
            return task
        method = self.components[Kind.PROPOSER].component.name if Kind.PROPOSER in self.components else "plain"
        name = f"{method} on {self.components[Kind.TARGET].component.name}"
        elsewhere = _other_engine(self.config)
        name += f" by {elsewhere}" if elsewhere else ""
        return name if task == "bench" else f"{task}: {name}"


@dataclass(frozen=True)
class PartOfSweep:
    """What a run has from the sweep it belongs to."""

    name: str  # of the run: what tells it from the others
    baselines: "Baselines | None" = None
    kept: KeptTarget | None = None


# -- checking ------------------------------------------------------------------------------------------------------
def check(config: Mapping[str, Any], registry: Registry) -> Plan:
    """Check the whole composition before anything is loaded. Raises `ConfigError` with every problem found.

    config: plain containers. A task that is not tracked (a listing) only needs its own options and its `needs`.
    """
    problems = [_unknown_top_level(key, value) for key, value in config.items() if key not in _TOP_LEVEL]
    task_component = _choose(config, registry, Kind.TASK)
    task: Task = task_component.build(config[Kind.TASK])
    kinds = list(Kind) if task.tracked else [Kind.TASK, *task.needs]
    if task.tracked:
        problems += _run_level_problems(config)
        problems += _foreign_engine(config, task)
    components: dict[Kind, RegisteredComponent] = {}
    for kind in kinds:
        if kind in (Kind.PROPOSER, Kind.ENGINE) and config.get(kind) is None:
            continue  # plain decoding; specflow's own engine
        try:
            components[kind] = _choose(config, registry, kind)
            if kind not in task.checks_itself:
                components[kind].check(config[kind])
        except ConfigError as error:
            problems.append(str(error))
    try:
        task.check(config, registry)
    except ConfigError as error:
        problems.append(str(error))
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))
    return Plan(config, registry, task, components)


def _choose(config: Mapping[str, Any], registry: Registry, kind: Kind) -> RegisteredComponent:
    node = config.get(kind)
    name = node.get("name") if isinstance(node, Mapping) else None
    if not isinstance(name, str):
        names = valid_names("", registry.components(kind))
        plus = "+" if kind is Kind.PROPOSER else ""
        raise ConfigError(f"{kind}={show(node)}: no {kind} is chosen. Write {plus}{kind}=NAME, one of: {names}.")
    return registry.get(kind, name)


def _unknown_top_level(key: str, value: Any) -> str:
    hint = did_you_mean(key, _TOP_LEVEL)
    return f"{key}={show(value)}: there is no {key!r} at the top level.{hint} Valid: {valid_names(key, _TOP_LEVEL)}."


def _other_engine(config: Mapping[str, Any]) -> str | None:
    """The name of another project's engine; None for our own."""
    name = (config.get(Kind.ENGINE) or {}).get("name", OWN_ENGINE)
    return None if name == OWN_ENGINE else str(name)


def _foreign_engine(config: Mapping[str, Any], task: Task) -> list[str]:
    engine = _other_engine(config)
    if engine is None or Kind.ENGINE in task.needs:
        return []
    return [f"engine={engine}: task={task.name} runs on specflow's own engine only. Leave engine={engine} out."]


def _run_level_problems(config: Mapping[str, Any]) -> list[str]:
    from specflow.core.sampling_params import SamplingParams  # here: listings need no sampling

    problems = []
    for name, schema in {"sampling": SamplingParams, "sweep": SweepOptions}.items():
        try:
            build_options(schema, config.get(name) or {}, name)
        except ConfigError as error:
            problems.append(str(error))
    seed, wanted = config.get("seed", 0), config.get("objective")
    if not isinstance(seed, int) or isinstance(seed, bool):
        problems.append(f"seed={show(seed)} is not valid: it must be int.")
    if wanted is not None and not isinstance(wanted, str):
        problems.append(f"objective={show(wanted)} is not valid: it must be the name of a metric, or null.")
    return problems


# -- running -------------------------------------------------------------------------------------------------------
def run(cfg: DictConfig, registry: Registry) -> float | None:
    """Hydra's job: check and execute one composition. Returns the objective of a sweep.

    Raises `SpecflowError` for everything that goes wrong, and `KeyboardInterrupt` when it was interrupted.
    """
    plan = check(plain_config(cfg), registry)
    hydra = HydraConfig.get()
    facts = collect_facts(registry.sources(), Path(hydra.runtime.cwd), hydra.overrides.task)
    with interruptible():
        finished = execute(plan, Path(hydra.runtime.output_dir), facts)
    return objective(finished.metrics, plan.config.get("objective"))


def is_tracked(config: Mapping[str, Any], registry: Registry) -> bool:
    """Whether the chosen task gets an output folder and listeners; True when the task cannot be told."""
    try:
        return bool(getattr(_choose(config, registry, Kind.TASK).load_factory(), "tracked", True))
    except SpecflowError:
        return True


def execute(plan: Plan, output_dir: Path, facts: Mapping[str, str], part: PartOfSweep | None = None) -> RunFinished:
    """Run a checked plan. Listeners hear of its start and of its end, however it ends."""
    context = _context(plan, output_dir, facts, part)
    if not plan.task.tracked:
        return _success(plan.task.run(context))
    _prepare(output_dir, plan.config)
    with _listeners(plan.registry, plan.components[Kind.TRACKING], plan.config, part):
        task = str(plan.components[Kind.TASK].component.name)
        event = RunStarted(task, part.name if part else plan.name, plan.config, output_dir, facts)
        try:
            plan.registry.hooks.specflow_run_started(event=event)
            finished = plan.task.run(context)
        except BaseException as error:
            raised = _for_user(error, output_dir, plan.registry)
            if isinstance(error, KeyboardInterrupt):
                raised.add_note(f"what had finished is kept in {output_dir}")
            _finish_after(plan.registry, _ended_by(raised), raised)
            raise raised from (error if raised is not error else error.__cause__)
        plan.registry.hooks.specflow_run_finished(event=finished)
    return _success(finished)


def refuse(
    config: Mapping[str, Any],
    registry: Registry,
    output_dir: Path,
    facts: Mapping[str, str],
    part: PartOfSweep,
    error: SpecflowError,
) -> None:
    """Leave a failed run in place of a job of a sweep whose options are not valid: it is listed with its reason."""
    try:
        tracking: RegisteredComponent | None = _choose(config, registry, Kind.TRACKING)
        assert tracking is not None
        tracking.check(config[Kind.TRACKING])
    except SpecflowError:
        tracking = None  # what is wrong may be the tracker: the run's folder says it all the same
    _prepare(output_dir, config)
    task = str((config.get(Kind.TASK) or {}).get("name"))
    with _listeners(registry, tracking, config, part):
        registry.hooks.specflow_run_started(event=RunStarted(task, part.name, config, output_dir, facts))
        registry.hooks.specflow_run_finished(event=RunFinished("failed", str(error)))


def _context(plan: Plan, output_dir: Path, facts: Mapping[str, str], part: PartOfSweep | None) -> TaskContext:
    build: Callable[[Kind], Any] = plan.build
    if part is not None and part.kept is not None and _other_engine(plan.config):
        part.kept.drop()  # the other engine needs the memory
    elif part is not None and part.kept is not None and plan.task.keeps_target:
        build = part.kept.building(plan.build, plan.config)
    baselines = part.baselines if part else None
    return TaskContext(plan.config, output_dir, build, plan.registry.hooks, facts, plan.registry, baselines)


def _success(finished: RunFinished) -> RunFinished:
    """A task may report a failure together with its results; the listeners had them, so now it is raised."""
    if finished.status == "killed":
        raise KeyboardInterrupt(finished.reason or "")
    if finished.status != "finished":
        raise SpecflowError(finished.reason or f"the run ended as {finished.status!r}.")
    return finished


def _ended_by(error: BaseException) -> RunFinished:
    if isinstance(error, Exception):
        return RunFinished("failed", str(error) or type(error).__name__)
    return RunFinished("killed", str(error) or "interrupted")


def _finish_after(registry: Registry, finished: RunFinished, error: BaseException) -> None:
    """Tell the listeners; what goes wrong there is added to the error that came first."""
    try:
        registry.hooks.specflow_run_finished(event=finished)
    except Exception as trouble:
        error.add_note(f"then, while closing: {trouble}")


@contextmanager
def _listeners(
    registry: Registry,
    tracking: RegisteredComponent | None,
    config: Mapping[str, Any],
    part: PartOfSweep | None,
) -> Iterator[None]:
    """Tracker, progress display and report, registered for the length of the run.

    pluggy calls the last registered first: the report is written before the tracker collects the folder. Of several
    processes of one training run only the first has any.
    """
    if helper_process():
        yield
        return
    trackers = [tracking.build(config[Kind.TRACKING])] if tracking is not None else []
    listeners = [*trackers, *(_displays() if part is None else _displays_in_sweep())]
    try:
        for listener in listeners:
            registry.register_listener(listener, tracking if listener in trackers else None)
        yield
    finally:
        for listener in listeners:
            registry.unregister_listener(listener)


def _displays() -> list[Any]:
    from specflow.report.listener import ReportWriter  # here: listings need neither
    from specflow.report.progress import ProgressDisplay

    return [ProgressDisplay(), ReportWriter()]


def _displays_in_sweep() -> list[Any]:
    """One line per run: the table of all runs comes at the end."""
    from specflow.report.listener import ReportWriter

    return [ReportWriter(brief=True)]


# -- the output folder ---------------------------------------------------------------------------------------------
def _prepare(output_dir: Path, config: Mapping[str, Any]) -> None:
    """Make the folder and save the resolved composition, which also proves that it can be written to."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "config.yaml").write_text(yaml.safe_dump(dict(config), sort_keys=False), encoding="utf-8")
    except OSError as error:
        raise storage_error(error, output_dir) from error


def storage_error(error: OSError, output_dir: Path | None) -> StorageError:
    """The failure to write results, with what to do about it."""
    what = "the disk is full" if is_disk_full(error) else f"cannot write results ({error.strerror or error})"
    where = error.filename or output_dir or "the run's folder"
    return StorageError(f"{what}: {where}\nFree space or rights there, or choose another folder: hydra.run.dir=FOLDER")


def _for_user(error: BaseException, output_dir: Path, registry: Registry) -> BaseException:
    """The same error if it is meant for the user; else one that is, with its plugin named and the traceback saved."""
    if isinstance(error, OSError) and (is_disk_full(error) or _denied_within(error, output_dir)):
        return storage_error(error, output_dir)
    if not isinstance(error, Exception):
        return error
    owner = owner_of(error, registry)
    if isinstance(error, ProposerError) and error.__cause__ is not None and owner is not None:
        named = ProposerError(f"{error}\n(plugin {owner}; {_save_traceback(error, output_dir)})")
        named.__cause__ = error.__cause__
        return named
    if isinstance(error, SpecflowError):
        return error
    plugin = f"plugin {owner}; " if owner is not None else ""
    return CrashError(f"unexpected {type(error).__name__}: {error}\n({plugin}{_save_traceback(error, output_dir)})")


def _save_traceback(error: Exception, output_dir: Path) -> str:
    """Save it in the run's folder; returns where it is."""
    log = output_dir / ERROR_LOG
    try:
        log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:
        return "its traceback could not be saved: set SPECFLOW_TRACEBACK=1 to see it"
    return f"traceback in {log}"


def _denied_within(error: OSError, output_dir: Path) -> bool:
    denied = error.errno in (errno.EACCES, errno.EPERM, errno.EROFS)
    return denied and str(error.filename or "").startswith(str(output_dir))
