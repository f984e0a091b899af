"""vLLM in a process of its own, possibly of another Python environment; it is spoken to in JSON lines."""

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specflow.errors import ConfigError, SpecflowError
from specflow.peers import vllm_runner

__all__ = ["INTERPRETER", "VllmProcess", "has_vllm", "interpreter"]

INTERPRETER = "SPECFLOW_VLLM_PYTHON"  # environment variable: what engine.python=null means

_CLOSE_SECONDS = 30.0  # an engine that takes longer to end is killed
_TAIL_LINES = 8
_ERROR = re.compile(r"\b[A-Za-z_.]*(?:Error|Exception): .+")


def interpreter(python: str | None) -> str:
    """The Python that is to run vLLM: the one given, else that of the environment variable, else the running one."""
    return python or os.environ.get(INTERPRETER) or sys.executable


def has_vllm(python: str) -> bool:
    """Whether an interpreter finds vLLM; nothing of it is imported. Raises `ConfigError` when it cannot be started."""
    code = "import importlib.util as u; print(u.find_spec('vllm') is not None)"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"engine.python={python} cannot be started: {error}.") from None
    return done.stdout.strip() == "True"


class VllmProcess:
    """Started at once; `ask` sends a command and waits for its answer."""

    def __init__(self, python: str, log: Path, environment: Mapping[str, str] | None = None) -> None:
        reading, writing = os.pipe()
        self.log = log
        self._answers = os.fdopen(reading, "rb", buffering=0)
        self._left = b""
        try:
            with log.open("wb") as file:
                self._process = subprocess.Popen(
                    [python, vllm_runner.__file__, str(writing)],
                    stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT, pass_fds=(writing,),
                    start_new_session=True, cwd=log.parent, env={**os.environ, **(environment or {})},
                )  # fmt: skip
        except OSError as error:
            self._answers.close()
            raise SpecflowError(f"engine=vllm: {python} cannot be started: {error}.") from error
        finally:
            os.close(writing)

    def ask(
        self, command: Mapping[str, Any], on_event: Callable[[dict[str, Any]], None], timeout: float | None = None
    ) -> dict[str, Any]:
        """Send a command; events are handed on until the one that answers it, which is returned.

        timeout: seconds until that one; None = as long as the process lives. Raises `SpecflowError` when vLLM fails,
        dies or takes too long.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._gone() from None
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            message = self._next(end)
            if message["event"] == "failed":
                raise SpecflowError(f"engine=vllm failed: {message['error']}\n{self._tail()}")
            if message["event"] != "finished":
                return message
            on_event(message)

    def _next(self, end: float | None) -> dict[str, Any]:
        """The next answer, whole."""
        while b"\n" not in self._left:
            wait = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._answers], [], [], wait)[0]:
                raise SpecflowError(
                    f"engine=vllm was not ready in time: raise engine.start_timeout, or see why.\n{self._tail()}"
                )
            got = os.read(self._answers.fileno(), 1 << 16)
            if not got:
                raise self._gone()
            self._left += got
        line, _, self._left = self._left.partition(b"\n")
        return json.loads(line)

    def _gone(self) -> SpecflowError:
        try:
            code = self._process.wait(timeout=_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        return SpecflowError(f"engine=vllm: its process ended (exit code {code}).\n{self._tail()}")

    def _tail(self) -> str:
        """What vLLM's own log says: the first error, which is the cause of those behind it, and the end."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()
        causes = [found[0] for found in map(_ERROR.search, lines) if found]
        shown = [*([f"first error: {causes[0]}"] if causes else []), *(f"  {line}" for line in lines[-_TAIL_LINES:])]
        return "\n".join([*shown, f"vLLM's log: {self.log}"])

    def close(self) -> None:
        """End it, and every process that vLLM has started."""
        assert self._process.stdin is not None
        with suppress(OSError):  # it is gone already
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_CLOSE_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # its group outlives it when a worker hangs
        self._process.wait()
        self._answers.close()
