"""`task=plugins`: what can be chosen, where each part comes from, and what is wrong with a plugin."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from specflow.errors import PluginError
from specflow.plugins.component import ROLES, Kind
from specflow.plugins.registry import RegisteredComponent, Registry
from specflow.tasks.base import Task, TaskContext
from specflow.tracking.events import RunFinished

__all__ = ["PluginsOptions", "PluginsTask", "component_table", "has_config", "plugin_table"]


@dataclass(frozen=True, kw_only=True)
class PluginsOptions:
    """Options of `task=plugins`."""

    strict: bool = False  # exit with an error when any plugin has a problem


class PluginsTask(Task):
    """Lists every component with its plugin, version and configuration file; none of them is imported."""

    name = "plugins"
    needs: tuple[Kind, ...] = ()
    tracked = False

    def __init__(self, options: PluginsOptions) -> None:
        self.options = options

    def run(self, context: TaskContext) -> RunFinished:
        """Print the table, then every problem. Raises `PluginError` for problems when `strict`."""
        assert context.registry is not None
        problems = context.registry.problems
        console = Console()
        console.print(component_table(context.registry))
        console.print(plugin_table(context.registry))
        for problem in problems:
            console.print(f"{'failed' if problem.failed else 'warning'}: {problem}", markup=False, highlight=False)
        if problems and self.options.strict:
            raise PluginError(f"{len(problems)} problem(s) with plugins, and task.strict=true.")
        return RunFinished("finished", metrics={"plugin_problems": float(len(problems))})


def component_table(registry: Registry) -> Table:
    """One row per component, sorted by kind."""
    table = Table("kind", "name", "plugin", "distribution", "config", "summary", box=None, header_style="bold")
    folders = registry.config_dirs()
    for kind in Kind:
        for name, item in registry.components(kind).items():
            table.add_row(*_row(kind, name, item, folders))
    for role in ROLES:  # chosen by +proposer=NAME
        for name, item in registry.components(role).items():
            table.add_row(role, *_row(Kind.PROPOSER, name, item, folders)[1:])
    return table


def plugin_table(registry: Registry) -> Table:
    """One row per plugin with its hooks; one that could not be loaded stands there too."""
    table = Table("plugin", "distribution", "state", "hooks", box=None, header_style="bold")
    loaded = registry.sources()
    for source in loaded:
        hooks = ", ".join(name.removeprefix("specflow_") for name in registry.hooks_of(source))
        table.add_row(source.plugin_name, f"{source.distribution} {source.version}", "loaded", hooks)
    for source in dict.fromkeys(problem.source for problem in registry.problems if problem.source not in loaded):
        table.add_row(source.plugin_name, f"{source.distribution} {source.version}", "failed", "")
    return table


def _row(kind: Kind, name: str, item: RegisteredComponent, folders: Sequence[Path]) -> tuple[str, ...]:
    found = "yes" if has_config(kind, name, folders) else "no"
    return kind, name, item.plugin_name, f"{item.distribution} {item.version}", found, item.component.summary


def has_config(kind: Kind, name: str, folders: Sequence[Path]) -> bool:
    """Whether some folder of the search path has the file that `KIND=NAME` needs."""
    return any((folder / kind / f"{name}.yaml").is_file() for folder in folders)
