"""Whose code raised: the plugin whose module is innermost in the traceback of an error."""

from collections.abc import Iterator, Sequence
from types import TracebackType

from specflow.plugins.registry import Registry
from specflow.plugins.source import Source

__all__ = ["owner_of"]


def owner_of(error: BaseException, registry: Registry) -> Source | None:
    """The plugin that raised the error, or what caused it; None when no frame is a plugin's, the built-in one apart."""
    owners = [(package, source) for package, source in registry.packages() if source.plugin_name != "builtin"]
    for one in _causes(error):
        for module in _modules(one.__traceback__):
            for package, source in owners:
                if module == package or module.startswith(f"{package}."):
                    return source
    return None


def _causes(error: BaseException) -> Sequence[BaseException]:
    """The error and what led to it, the first cause first."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.insert(0, one)
        one = one.__cause__ or one.__context__
    return chain


def _modules(traceback: TracebackType | None) -> Iterator[str]:
    """Modules of the frames, the innermost first."""
    found: list[str] = []
    while traceback is not None:
        found.insert(0, str(traceback.tb_frame.f_globals.get("__name__", "")))
        traceback = traceback.tb_next
    yield from found
