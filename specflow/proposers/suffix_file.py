"""Past outputs in a file, so that suffix decoding begins a run with what it saw in the last.

The file holds the outputs themselves and not the tree, so that it is small (4 bytes a token), valid for any tree depth
and harmless when it is damaged: a magic word, version, vocabulary size, numbers of outputs and tokens and a checksum,
then the lengths and the tokens as little-endian int32.
"""

import os
import struct
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from specflow.errors import ConfigError, StorageError

MAGIC = b"SPECSUFX"
VERSION = 1
_HEADER = struct.Struct("<8sIIQQI")  # magic, version, vocabulary, outputs, tokens, checksum of what follows
_KEPT = "The file is left as it is: move it away or set another proposer.cache_path."


@dataclass(frozen=True)
class SavedOutputs:
    """Content of a file; without a file there are no outputs and the vocabulary is unknown."""

    outputs: Sequence[np.ndarray] = field(default_factory=tuple)  # each [n] int32, oldest first
    vocab_size: int | None = None


def read_outputs(path: Path) -> SavedOutputs:
    """Read a file that may be missing. Raises `ConfigError` when it is foreign, damaged or of another version."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return SavedOutputs()
    except OSError as error:
        raise ConfigError(f"proposer.cache_path={path} cannot be read: {error.strerror}. {_KEPT}") from None
    if len(data) < _HEADER.size or not data.startswith(MAGIC):
        raise ConfigError(f"proposer.cache_path={path} is no suffix cache. {_KEPT}")
    _, version, vocab_size, num_outputs, num_tokens, checksum = _HEADER.unpack_from(data)
    if version != VERSION:
        raise ConfigError(
            f"proposer.cache_path={path} is a suffix cache of version {version}; this specflow reads {VERSION}. {_KEPT}"
        )
    body = memoryview(data)[_HEADER.size :]
    if len(body) != 4 * (num_outputs + num_tokens) or zlib.crc32(body) != checksum:
        raise ConfigError(f"proposer.cache_path={path} is damaged: its length or checksum is wrong. {_KEPT}")
    return SavedOutputs(_split(path, np.frombuffer(body, "<i4"), num_outputs, vocab_size), vocab_size)


def _split(path: Path, numbers: np.ndarray, num_outputs: int, vocab_size: int) -> list[np.ndarray]:
    """Cut lengths and tokens [n + t] int32 into outputs."""
    lengths, tokens = numbers[:num_outputs].astype(np.int64), numbers[num_outputs:].astype(np.int32)
    wrong = (lengths < 0).any() or lengths.sum() != len(tokens) or (tokens < 0).any() or (tokens >= vocab_size).any()
    if wrong:
        raise ConfigError(f"proposer.cache_path={path} is damaged: it holds impossible lengths or token ids. {_KEPT}")
    return np.split(tokens, np.cumsum(lengths)[:-1]) if num_outputs else []


def write_outputs(path: Path, outputs: Sequence[np.ndarray], vocab_size: int) -> None:
    """Replace the file at once: after a crash it is the old or the new one. Raises `StorageError`."""
    lengths = np.array([len(ids) for ids in outputs], "<i4")
    body = lengths.tobytes() + b"".join(ids.astype("<i4").tobytes() for ids in outputs)
    header = _HEADER.pack(MAGIC, VERSION, vocab_size, len(outputs), int(lengths.sum()), zlib.crc32(body))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(header + body)
                file.flush()
                os.fsync(file.fileno())
            os.replace(name, path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StorageError(
            f"proposer.cache_path={path} could not be written: {error.strerror}. "
            "What was there is unchanged; free some space or set another path."
        ) from None
