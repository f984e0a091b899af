"""Finding hooks that would never be called: misspelt, unmarked, or of a style that hosts here do not use."""

from collections.abc import Iterator
from typing import Any

import pluggy

from specflow.plugins import hookspecs
from specflow.plugins.source import Problem, Source
from specflow.words import did_you_mean

__all__ = ["check_hooks"]

_PREFIX = f"{hookspecs.PROJECT}_"


def check_hooks(manager: pluggy.PluginManager, plugin: Any, source: Source) -> list[Problem]:
    """Problems of a plugin's hook functions. pluggy itself would accept all of them and never call one."""
    return [Problem(source, message, failed=False) for message in _messages(manager, plugin)]


def _messages(manager: pluggy.PluginManager, plugin: Any) -> Iterator[str]:
    known = [name for name in vars(hookspecs) if name.startswith(_PREFIX)]
    for name in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, name)
        if options is None:
            if name.startswith(_PREFIX) and callable(getattr(plugin, name)):
                yield f"{name} is not marked with @hookimpl and is never called."
            continue
        hook = options.get("specname") or name
        if hook not in known:
            yield f"there is no hook {hook!r}; it is never called.{did_you_mean(hook, known)}"
        elif options.get("wrapper") or options.get("hookwrapper"):
            yield f"{name} is a wrapper; hooks are called one by one here, so it is never called as one."
