"""Loading entry points, each in its own error boundary: a broken package neither stops the program nor vanishes."""

import os
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from specflow import __version__
from specflow.errors import PluginError
from specflow.plugins import builtin
from specflow.plugins.hookspecs import PROJECT
from specflow.plugins.registry import Problem, Registry, Source

__all__ = ["ONLY_VARIABLE", "STRICT_VARIABLE", "fill_registry"]

ONLY_VARIABLE = "SPECFLOW_PLUGINS"  # names of plugins or distributions to load, comma-separated; empty: none
STRICT_VARIABLE = "SPECFLOW_STRICT_PLUGINS"  # 1: any problem is an error


def fill_registry(registry: Registry, strict: bool, only: str | None) -> Registry:
    """Add the built-in plugin and the installed ones; print one warning per problem, or raise when `strict`.

    The built-in plugin is added directly, so that a source tree that was never installed works; its own entry point
    is then skipped. `only` (default: the environment variable `SPECFLOW_PLUGINS`) limits which others load.
    """
    registry.add(builtin, Source("builtin", "specflow", __version__))
    wanted = _wanted(os.environ.get(ONLY_VARIABLE) if only is None else only)
    owners: dict[str, Source] = {}
    for point in _stable(entry_points(group=PROJECT)):
        source = _source(point)
        if point.value == builtin.__name__ or not _is_wanted(source, wanted):
            continue
        if point.name in owners:
            message = f"the entry point name {point.name!r} is also used by {owners[point.name]}; both are loaded."
            registry.record(Problem(source, message, failed=False))
        owners.setdefault(point.name, source)
        _load(registry, point, source)
    problems = registry.problems
    if problems and (strict or os.environ.get(STRICT_VARIABLE) == "1"):
        raise PluginError("\n".join(map(str, problems)))
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    return registry


def _load(registry: Registry, point: EntryPoint, source: Source) -> None:
    try:
        plugin = point.load()
    except (Exception, SystemExit) as error:
        message = f"cannot be imported: {type(error).__name__}: {error}"
        registry.record(Problem(source, message, failed=True))
    else:
        registry.add(plugin, source)


def _stable(points: Iterable[EntryPoint]) -> list[EntryPoint]:
    """The same order on every machine: installation order is none of our business."""
    return sorted(points, key=lambda point: (str(_source(point).distribution), point.name))


def _source(point: EntryPoint) -> Source:
    if point.dist is None:
        return Source(point.name, "unknown", "unknown")
    return Source(point.name, point.dist.name, point.dist.version)


def _wanted(names: str | None) -> set[str] | None:
    return None if names is None else {name.strip() for name in names.split(",") if name.strip()}


def _is_wanted(source: Source, wanted: set[str] | None) -> bool:
    return wanted is None or bool({source.plugin_name, source.distribution} & wanted)
