"""The target of one job, loaded, for the next job of the same process."""

import gc
import json
from collections.abc import Callable, Mapping
from typing import Any

from specflow.plugins.component import Kind

__all__ = ["KeptTarget"]


class KeptTarget:
    """At most one loaded target. It is used again when nothing about it changes and it can be detached from an engine.

    A target without `detach` is loaded by every job anew: it may hold on to its engine.
    """

    def __init__(self) -> None:
        self._key: str | None = None
        self._target: Any = None

    def building(self, build: Callable[[Kind], Any], config: Mapping[str, Any]) -> Callable[[Kind], Any]:
        """`build`, with the kept target in place of a new one where that is the same."""
        key = json.dumps([config.get(Kind.TARGET), config.get(Kind.BACKEND)], sort_keys=True, default=str)

        def build_or_keep(kind: Kind) -> Any:
            if kind is not Kind.TARGET:
                return build(kind)
            if key != self._key:
                self.drop()
                target = build(kind)
                if hasattr(target, "detach"):
                    self._key, self._target = key, _loaded_once(target)
                return target
            self._target.detach()  # its pages are given back before the next engine asks how much memory is free
            gc.collect()
            return self._target

        return build_or_keep

    def drop(self) -> None:
        """Forget it: a job failed with it, or the sweep is over."""
        self._key = self._target = None
        gc.collect()


def _loaded_once(target: Any) -> Any:
    """The target, whose `load` does nothing after it has worked."""
    load = target.load

    def once(backend: Any) -> None:
        load(backend)
        target.load = lambda backend: None

    target.load = once
    return target
