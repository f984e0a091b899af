"""Ctrl-C and SIGTERM: the first ends the run in order, the second ends the process."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["INTERRUPTED", "interruptible"]

INTERRUPTED = 130  # exit code of a run that was interrupted, as shells have it
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise `KeyboardInterrupt` at the first signal and give the next one back to the system.

    So a run can close its files, and nothing it does then, however long, can hold up a second Ctrl-C.
    Outside of the main thread signals cannot be handled, and nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, _stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _stop(number: int, frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL)
    raise KeyboardInterrupt(f"stopped by {signal.Signals(number).name}")
