"""A store that is locked for the moment is asked again: jobs that run side by side share one SQLite file.

SQLite lets one process write at a time and gives up after five seconds of waiting. A call that failed for that reason
can be repeated: what it had written is written again with the same values. Any other error is passed on at once.
"""

import random
import time
from collections.abc import Callable
from typing import Any

__all__ = ["Patient", "is_locked"]

_PATIENCE_SECONDS = 120.0
_LONGEST_PAUSE = 2.0


def is_locked(error: BaseException) -> bool:
    """Whether the error says that another process holds the database."""
    text = str(error).lower()
    return "database is locked" in text or "database table is locked" in text or "database is busy" in text


class Patient:
    """Any client, its methods repeated while the store is locked."""

    def __init__(self, client: Any, patience: float = _PATIENCE_SECONDS) -> None:
        self._client, self._patience = client, patience

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._client, name)
        return self._repeating(found) if callable(found) else found

    def _repeating(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def patient(*arguments: Any, **named: Any) -> Any:
            end, pause = time.monotonic() + self._patience, 0.05
            while True:
                try:
                    return call(*arguments, **named)
                except Exception as error:
                    if not is_locked(error) or time.monotonic() > end:
                        raise
                # Unequal pauses: processes that collided once would collide again.
                time.sleep(pause * random.uniform(0.5, 1.5))
                pause = min(2 * pause, _LONGEST_PAUSE)

        return patient
