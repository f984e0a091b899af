"""`task=tune`: which drafting method at which length is the fastest for a target and a workload, or none at all.

Every method is run once per batch size at its largest length. From that pass come acceptance by position and the costs
of steps; from those the speed at every length. The most promising cells are then measured like any benchmark, each as
a run of its own below this one, against plain decoding in the same conditions.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from specflow.errors import ConfigError, SpecflowError
from specflow.metrics.summary import PLAIN, BenchSummary
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry
from specflow.report import wording
from specflow.report.overview import Overview, write_overview
from specflow.report.records import read_record, run_folders
from specflow.report.table import WIDTH
from specflow.runner import PartOfSweep, check, execute
from specflow.tasks.base import Task, TaskContext
from specflow.tasks.baselines import Baselines
from specflow.tracking.base import Tracker
from specflow.tracking.events import RunFinished
from specflow.tuning.candidates import Composition, chosen_methods
from specflow.tuning.exploring import Explorer
from specflow.tuning.options import TuneOptions
from specflow.tuning.prediction import Cell
from specflow.tuning.recommended import command_of, file_name, yaml_of
from specflow.tuning.selection import Budget, next_cells
from specflow.tuning.summary import TuneSummary, recommend
from specflow.tuning.view import draw_tuning, render_tuning

__all__ = ["TuneTask"]

JOBS = "finalists"
# Not the run's folder itself: the config.yaml in there would stand for the primary configuration.
CONFIGS = "recommended"


class TuneTask(Task):
    """Explores, predicts, measures the finalists, recommends."""

    name = "tune"
    needs = (Kind.TARGET, Kind.PROPOSER, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND, Kind.WORKLOAD)

    def __init__(self, options: TuneOptions) -> None:
        self.options = options

    def check(self, config: Mapping[str, Any], registry: Registry) -> None:
        """See `Task.check`."""
        if (config.get("engine") or {}).get("name", "specflow") != "specflow":
            raise ConfigError(f"task=tune measures specflow's own engine, not engine={config['engine']['name']}.")
        if (config.get(Kind.SCHEDULER) or {}).get("name") == "adaptive":
            raise ConfigError("task=tune compares fixed lengths: use scheduler=continuous with it.")
        if (config.get(Kind.WORKLOAD) or {}).get("request_rate") is not None:
            raise ConfigError(
                "task=tune compares throughput, which arrivals would set: use workload.request_rate=null."
            )
        if config.get(Kind.TRACKING) is not None:
            chosen_methods(config, self.options, registry)

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. Writes tune.json, tune.csv, tune.png, the finalists' page and
        recommended/experiment/recommended.yaml."""
        assert context.registry is not None
        composition = Composition(context.config, self.options)
        methods, unusable = chosen_methods(context.config, self.options, context.registry)
        budget = Budget(0, self.options.share)
        explorer = Explorer(context, composition, budget)
        explorer.explore(methods)
        explorer.unusable = unusable | explorer.unusable
        budget.exhaustive = self._exhaustive(explorer)
        finals = Finals(context, composition, explorer)
        for batch_size in self.options.batch_sizes:
            finals.measure(batch_size)
        explorer.kept.drop()
        summary = self._summary(context, composition, explorer)
        _write(summary, composition, context.output_dir)
        finals.write_page()
        console = Console()
        render_tuning(summary, console if console.is_terminal else Console(width=WIDTH))
        folder = wording.short_path(context.output_dir / CONFIGS, context.facts.get("launch_dir"))
        console.print(f"or: python -m specflow --config-dir {folder} +experiment=recommended", soft_wrap=True)
        return RunFinished("finished", None, summary.to_metrics(), summary)

    def _exhaustive(self, explorer: Explorer) -> int:
        """Passes of a sweep over every method, length and batch size, plain decoding measured once per batch size."""
        cells = sum(len(lengths) for lengths in explorer.lengths.values()) + 1
        return cells * len(self.options.batch_sizes) * self.options.repeats

    def _summary(self, context: TaskContext, composition: Composition, explorer: Explorer) -> TuneSummary:
        found = [recommend(explorer.cells, batch_size) for batch_size in self.options.batch_sizes]
        words = context.facts.get("overrides", "")
        target = explorer.really_ran.get("target", {}).get("target", str(context.config[Kind.TARGET]["name"]))
        return TuneSummary(
            name=f"tuning of {target} on {context.config[Kind.WORKLOAD]['name']}",
            cells=explorer.cells,
            recommendations=found,
            acceptance={
                f"{seen.method} K={seen.num_speculative_tokens}, batch {seen.batch_size}": seen.survival
                for seen in explorer.explorations
                if seen.num_speculative_tokens
            },
            costs={method: costs.describe() for method, costs in explorer.costs.items()},
            unusable=explorer.unusable,
            exhaustive=explorer.budget.exhaustive,
            used=explorer.budget.used,
            commands={one.best.batch_size: command_of(one, composition, words) for one in found},
            really_ran=explorer.really_ran,
        )


@dataclass
class Finals:
    """Runs of the finalists, each with a folder and a tracker's run of its own below those of the tuning."""

    context: TaskContext
    composition: Composition
    explorer: Explorer
    number: int = 0  # of the next run

    def measure(self, batch_size: int) -> None:
        """Measure the most promising cell of a batch size, then the one that is it after that, within the budget.

        Where there is nothing to measure, plain decoding is.
        """
        options, budget = self.composition.options, self.explorer.budget
        waiting = len(options.batch_sizes) - options.batch_sizes.index(batch_size)
        end, done = budget.used + budget.left / waiting, 0
        # There is no answer without a first one, whatever it takes.
        while done < options.finalists and (not done or budget.used + options.repeats <= end):
            chosen = next_cells(self.explorer.cells, batch_size, 1, options.margin)
            if not chosen:
                break
            self._measure(chosen[0])
            done += 1
        if not done:
            plain = next(one for one in self.explorer.cells
                         if one.batch_size == batch_size and not one.num_speculative_tokens)  # fmt: skip
            self._measure(plain)

    def _measure(self, cell: Cell) -> None:
        assert self.context.registry is not None
        title = f"{cell.label}, batch {cell.batch_size}"
        folder = self.context.output_dir / JOBS / f"{self.number}-{title.replace(',', '').replace(' ', '-')}"
        self.number += 1
        baselines = Baselines(self.context.output_dir / "baselines", folder.name)
        part = PartOfSweep(title, baselines, self.explorer.kept)
        try:
            with self.context.registry.listeners_set_aside() as listeners:
                parent = next((one.nesting_id() for one in listeners if isinstance(one, Tracker)), None)
                config = self.composition.bench(cell.method, cell.num_speculative_tokens, cell.batch_size, parent)
                finished = execute(check(config, self.context.registry), folder, self.context.facts, part)
        except SpecflowError as error:
            self._replace(cell, replace(cell, reason=str(error).splitlines()[0]))
            self.explorer.kept.drop()
            return
        assert isinstance(finished.summary, BenchSummary)
        self._take(cell, finished.summary)

    def _take(self, cell: Cell, summary: BenchSummary) -> None:
        """Keep what a finalist's run measured, of plain decoding as well."""
        reused = "plain decoding" in summary.really_ran.get("run", {})
        for series in summary.series:
            if series.is_plain and reused and cell.num_speculative_tokens:
                continue
            self.explorer.budget.used += len(series.repeats)
            length = 0 if series.is_plain else cell.num_speculative_tokens
            own = next(one for one in self.explorer.cells if (one.method, one.num_speculative_tokens, one.batch_size)
                       == (PLAIN if series.is_plain else cell.method, length, cell.batch_size))  # fmt: skip
            spread = series.tokens_per_second_range if len(series.repeats) > 1 else None
            speedup = 1.0 if series.is_plain else series.speedup
            self._replace(own, replace(own, measured=series.tokens_per_second, measured_range=spread, speedup=speedup))

    def _replace(self, old: Cell, new: Cell) -> None:
        self.explorer.cells[self.explorer.cells.index(old)] = new

    def write_page(self) -> None:
        """The page, table and plots of a sweep, over the finalists."""
        folder = self.context.output_dir / JOBS
        records = [replace(read_record(one), folder=str(one.relative_to(self.context.output_dir)))
                   for one in run_folders(folder)]  # fmt: skip
        if records:
            words = self.context.facts.get("overrides", "")
            overview = Overview(f"{len(records)} finalists of a tuning", records, f"python -m specflow {words}")
            write_overview(overview, self.context.output_dir)


def _write(summary: TuneSummary, composition: Composition, folder: Path) -> None:
    text = json.dumps(summary.to_dict(), indent=1, ensure_ascii=False)
    (folder / "tune.json").write_text(text, encoding="utf-8")
    (folder / "tune.csv").write_text(summary.to_csv(), encoding="utf-8")
    picture = draw_tuning(summary.cells)
    if picture is not None:
        (folder / "tune.png").write_bytes(picture)
    experiments = folder / CONFIGS / "experiment"
    experiments.mkdir(parents=True, exist_ok=True)
    for index, one in enumerate(summary.recommendations):
        file = experiments / f"{file_name(one, first=not index)}.yaml"
        file.write_text(yaml_of(one, composition), encoding="utf-8")
