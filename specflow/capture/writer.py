"""Writing captured requests to the disk while the engine goes on."""

import hashlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from safetensors.torch import save

from specflow.capture.checks import check_last_hidden, check_states
from specflow.capture.collector import Captured
from specflow.capture.manifest import Entry, Manifest, file_name, hash_ids, storage_error, write_atomically
from specflow.core.layer_numbers import CONVENTION

__all__ = ["AsyncWriter"]


class AsyncWriter:
    """A pool of threads behind a bounded queue: checks, serialises, writes and records each request.

    An error is raised by the next `submit`, or by `close`; requests queued behind it are left out. Of several errors
    the one of the request submitted first is raised, whichever thread was faster.
    """

    def __init__(self, manifest: Manifest, layers: tuple[int, ...], target_hash: str, num_threads: int) -> None:
        self._manifest, self._layers, self._target = manifest, layers, target_hash
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="extract-writer")
        self._room = threading.BoundedSemaphore(2 * num_threads)  # being written, and as many waiting
        self._error: BaseException | None = None
        self._error_number = 0  # of the submission that `_error` belongs to
        self._submitted = 0
        self.waited_seconds = 0.0  # how long `submit` had to wait for room
        self.num_files = self.num_tokens = self.num_bytes = 0
        self._mutex = threading.Lock()

    def submit(self, captured: Captured) -> None:
        """Queue one request; waits only when the queue is full. Raises what went wrong with an earlier one."""
        begun = time.perf_counter()
        self._room.acquire()
        self.waited_seconds += time.perf_counter() - begun
        if self._error is not None:
            self._room.release()
            self._pool.shutdown(wait=True)  # an earlier submission may be failing right now
            raise self._error
        self._submitted += 1
        self._pool.submit(self._run, captured, self._submitted)

    def _run(self, captured: Captured, number: int) -> None:
        try:
            if self._error is None or number < self._error_number:
                self._write(captured)
        except OSError as error:
            self._fail(storage_error(error, self._manifest.folder, len(self._manifest.entries)), number)
        except BaseException as error:
            self._fail(error, number)
        finally:
            self._room.release()

    def _fail(self, error: BaseException, number: int) -> None:
        with self._mutex:
            if self._error is None or number < self._error_number:
                self._error_number, self._error = number, error

    def _write(self, captured: Captured) -> None:
        states, ids = captured.hidden_states, captured.token_ids
        check_states(captured.request_id, states, ids, self._layers)
        tensors = {"hidden_states": states, "token_ids": ids}
        if captured.last_hidden is not None:
            check_last_hidden(captured.request_id, captured.last_hidden, ids)
            tensors["last_hidden"] = captured.last_hidden
        facts = {
            "request_id": captured.request_id,
            "layers": json.dumps(self._layers),
            "layer_convention": CONVENTION,
            "target": self._target,
            "first_position": str(captured.first_position),
        }
        content = save(tensors, metadata=facts)
        name = file_name(captured.request_id)
        write_atomically(self._manifest.folder / name, content)
        entry = Entry(
            request_id=captured.request_id,
            file=name,
            hidden_states=tuple(states.shape),  # type: ignore[arg-type]
            token_ids=tuple(ids.shape),  # type: ignore[arg-type]
            dtype=str(states.dtype).removeprefix("torch."),
            layers=self._layers,
            first_position=captured.first_position,
            prompt_tokens=len(captured.prompt_ids),
            prompt_sha256=hash_ids(captured.prompt_ids),
            target=self._target,
            bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(),
            last_hidden=captured.last_hidden is not None,
        )
        self._manifest.add(entry)
        with self._mutex:
            self.num_files += 1
            self.num_tokens += len(ids)
            self.num_bytes += len(content)

    def close(self) -> None:
        """Wait for everything queued. Raises the first error that no `submit` has raised."""
        self._pool.shutdown(wait=True)
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "AsyncWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Everything queued is written, whatever ended the run; the run's own error comes first."""
        if kind is None:
            self.close()
        else:
            self._pool.shutdown(wait=True)
