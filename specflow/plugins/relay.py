"""Calling hooks one implementation at a time, so that every result and error has a name."""

import errno
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pluggy

from specflow.errors import PluginError, SpecflowError, StorageError
from specflow.plugins.source import Source

__all__ = ["LifeCycle", "call_each", "is_disk_full"]


def call_each(
    manager: pluggy.PluginManager, hook: str, arguments: Mapping[str, Any], only: Any = None
) -> Iterator[Any]:
    """Results of a hook's implementations in pluggy's order (the last registered first); `only` of one plugin."""
    for implementation in _implementations(manager, hook):
        if only is None or implementation.plugin is only:
            yield _call(implementation, arguments)


def _implementations(manager: pluggy.PluginManager, hook: str) -> list[pluggy.HookImpl]:
    return getattr(manager.hook, hook).get_hookimpls()[::-1]


def _call(implementation: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
    return implementation.function(*(arguments[name] for name in implementation.argnames))


class LifeCycle:
    """The life-cycle hooks as methods with keyword arguments; return values of listeners are ignored.

    A listener that raises stops the run with a `PluginError` that names its plugin and version. Only for
    `specflow_run_finished` are the others still called, so that each can close its files; then the error is raised.
    """

    def __init__(self, manager: pluggy.PluginManager, source_of: Callable[[Any], Source]) -> None:
        self._manager = manager
        self._source_of = source_of

    def __getattr__(self, hook: str) -> Callable[..., None]:
        if hook.startswith("_") or not hasattr(self._manager.hook, hook):
            raise AttributeError(f"there is no hook {hook!r}")

        def call(**arguments: Any) -> None:
            self._notify(hook, arguments)

        return call

    def _notify(self, hook: str, arguments: Mapping[str, Any]) -> None:
        first: SpecflowError | None = None
        for implementation in _implementations(self._manager, hook):
            try:
                _call(implementation, arguments)
            except Exception as error:
                named = self._named(error, hook, implementation.plugin)
                if hook != "specflow_run_finished":
                    raise named from error
                if first is None:
                    first, named.__cause__ = named, error
                else:
                    first.add_note(str(named))
        if first is not None:
            raise first

    def _named(self, error: Exception, hook: str, plugin: Any) -> SpecflowError:
        if isinstance(error, SpecflowError):
            return error
        source = self._source_of(plugin)
        if is_disk_full(error):
            return StorageError(f"the disk is full: {source} could not save ({error}).")
        return PluginError(f"plugin {source} failed in {hook}: {type(error).__name__}: {error}")


def is_disk_full(error: BaseException) -> bool:
    """True when the error, or one that caused it, says that no space (or quota) is left."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        seen = seen.__cause__ or seen.__context__
    return False
