"""SIGTERM and Ctrl-C while training: the step is finished and saved, then the run ends."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "stop_request"]

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """Which signal came, if any. The handler only takes a note: nothing is interrupted half-way."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.signal = signal.Signals(number).name
        for each in _SIGNALS:  # the next one ends the process at once
            signal.signal(each, signal.SIG_DFL)


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Take notes of signals inside the block; outside of the main thread there are none to take."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.signal(number, request._take) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
