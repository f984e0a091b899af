"""Every hook a plugin can implement, on one page.

A plugin is a module (or object) named by an entry point of the group `specflow`, with functions marked by
`specflow.plugins.hookimpl`. The built-in components register through the same hooks.

    from specflow.plugins import Component, hookimpl

    @hookimpl
    def specflow_proposers():
        return [Component("mine", "my_package.mine:MyProposer", "my_package.mine:MyOptions", "one line")]

    @hookimpl
    def specflow_config_dirs():
        return [Path(__file__).parent / "conf"]          # holds proposer/mine.yaml with `name: mine`

`python -m specflow task=new-plugin task.package=specflow-mine` writes such a package; docs/plugins.md is the guide.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pluggy

from specflow.plugins.component import Component

if TYPE_CHECKING:
    from specflow.tracking.events import Point, RequestRow, RunFinished, RunStarted, Series, StepRecord

PROJECT = "specflow"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


# -- components: one hook per kind --------------------------------------------------------------------------------
@hookspec
def specflow_targets() -> Sequence[Component]:  # type: ignore[empty-body]
    """Target models: factories of `specflow.targets.base.Target`."""


@hookspec
def specflow_proposers() -> Sequence[Component]:  # type: ignore[empty-body]
    """Drafting methods: factories of `specflow.proposers.base.Proposer`."""


@hookspec
def specflow_samplers() -> Sequence[Component]:  # type: ignore[empty-body]
    """Verification methods: factories of `specflow.samplers.base.Sampler`."""


@hookspec
def specflow_schedulers() -> Sequence[Component]:  # type: ignore[empty-body]
    """Batching policies: factories of `specflow.schedulers.base.Scheduler`."""


@hookspec
def specflow_backends() -> Sequence[Component]:  # type: ignore[empty-body]
    """Devices: factories of `specflow.backends.base.Backend`."""


@hookspec
def specflow_engines() -> Sequence[Component]:  # type: ignore[empty-body]
    """Engines that `task=bench` can run a composition on: factories of `specflow.peers.base.DecodingEngine`."""


@hookspec
def specflow_workloads() -> Sequence[Component]:  # type: ignore[empty-body]
    """Prompt sets: factories of `specflow.workloads.base.Workload`."""


@hookspec
def specflow_tasks() -> Sequence[Component]:  # type: ignore[empty-body]
    """What one run does: factories of `specflow.tasks.base.Task`."""


@hookspec
def specflow_trackers() -> Sequence[Component]:  # type: ignore[empty-body]
    """Where results go: factories of `specflow.tracking.base.Tracker`, listeners of the life cycle below."""


@hookspec
def specflow_trainable_heads() -> Sequence[Component]:  # type: ignore[empty-body]
    """Heads that `task=train` trains: factories of `specflow.training.objective.TrainableHead`, each registered under
    the name of the proposer that runs the result."""


@hookspec
def specflow_vllm_methods() -> Sequence[Component]:  # type: ignore[empty-body]
    """What proposers become in vLLM's `speculative_config`, for `task=export` and `engine=vllm`: each registered under
    the name and with the options of its proposer; factories of `specflow.peers.vllm_methods.Writer`."""


# -- configuration ------------------------------------------------------------------------------------------------
@hookspec
def specflow_config_dirs() -> Sequence[Path]:  # type: ignore[empty-body]
    """Folders with Hydra config groups (`proposer/NAME.yaml`, …), so that `+proposer=NAME` finds a plugin's YAML."""


# -- life cycle: listeners only, return values are ignored ---------------------------------------------------------
@hookspec
def specflow_run_started(event: "RunStarted") -> None:
    """A run begins: its resolved config, names and machine facts are known, no weight is loaded yet."""


@hookspec
def specflow_series_started(series: "Series") -> None:
    """A series (one method at one batch size, or a warm-up) begins within the run."""


@hookspec
def specflow_step_finished(record: "StepRecord") -> None:
    """One engine step has been committed."""


@hookspec
def specflow_request_finished(row: "RequestRow") -> None:
    """One request has ended; its row is final."""


@hookspec
def specflow_points_measured(points: "Sequence[Point]") -> None:
    """A task measured something while it goes on: points of named curves, such as the loss of a training step."""


@hookspec
def specflow_run_finished(event: "RunFinished") -> None:
    """The run ended: finished, failed or killed, with the reason and whatever results there are."""
