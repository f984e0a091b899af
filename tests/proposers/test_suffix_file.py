"""The file that carries past outputs from run to run: what it holds, what it refuses, and how it fails."""

import gc
from pathlib import Path

import numpy as np
import pytest

from specflow.errors import ConfigError, StorageError
from specflow.proposers import suffix_file
from specflow.proposers.suffix_file import read_outputs, write_outputs
from tests.proposers.helpers import Row, make_limits
from tests.proposers.suffix_helpers import propose, proposer


def test_the_cache_survives_the_run(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "outputs.bin"
    first = proposer(cache_path=str(path))
    first.attach(None, make_limits(24, 100))  # type: ignore[arg-type]
    for slot, output in enumerate(([1, 2, 8, 9], [1, 2, 8, 7, 6])):
        first.start(f"r{slot}", slot, [5])
        propose(first, Row(slot, [5, *output], (0, 1), 8, name=f"r{slot}"))
        first.finish(f"r{slot}", slot, [5, *output])
    first.start("cut short", 0, [5])
    propose(first, Row(0, [5, 3, 3], (0, 1), 8, name="cut short"))
    del first  # the end of the process does the same
    gc.collect()
    assert [ids.tolist() for ids in read_outputs(path).outputs] == [[1, 2, 8, 9], [1, 2, 8, 7, 6], [3, 3]]
    assert [file.name for file in path.parent.iterdir()] == ["outputs.bin"]

    second = proposer(cache_path=str(path), suffix_decoding_max_tree_depth=10, suffix_decoding_max_cached_requests=3)
    second.attach(None, make_limits(10, 100))  # type: ignore[arg-type]
    second.start("r0", 0, [50])
    assert propose(second, Row(0, [50, 1, 2], (0, 1), 8, name="r0")) == [[8, 7]]  # [1, 2, 8, 9] has made room
    assert second.cache.cached == (None, None, "r0")
    assert "3 requests" in second.describe()["past outputs"]
    assert second.describe()["cache_path"] == str(path)


def damaged(tmp_path: Path) -> list[tuple[bytes, str]]:
    path = tmp_path / "good.bin"
    write_outputs(path, [np.array([1, 2, 3], np.int32)], 100)
    good = path.read_bytes()
    flipped = bytearray(good)
    flipped[-1] ^= 1
    other = bytearray(good)
    other[8] = 9
    write_outputs(path, [np.array([1, 200], np.int32)], 100)
    return [
        (b"", "no suffix cache"),
        (b"PK\x03\x04" + bytes(60), "no suffix cache"),
        (good[:-2], "damaged"),
        (good + b"\0", "damaged"),
        (bytes(flipped), "damaged"),
        (path.read_bytes(), "impossible"),
        (bytes(other), "version 9"),
    ]


def test_a_bad_file_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "bad.bin"
    for content, words in damaged(tmp_path):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=words) as caught:
            proposer(cache_path=str(path))
        assert str(path) in str(caught.value)
        assert "left as it is" in str(caught.value)
        assert path.read_bytes() == content
    with pytest.raises(ConfigError, match="cannot be read"):
        proposer(cache_path=str(tmp_path))


def test_a_file_for_another_vocabulary_is_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "outputs.bin"
    write_outputs(path, [np.array([1, 2, 3], np.int32)], 100)
    content = path.read_bytes()
    one = proposer(cache_path=str(path))
    with pytest.raises(ConfigError, match=r"100 token ids, and this target has 50"):
        one.attach(None, make_limits(24, 50))  # type: ignore[arg-type]
    del one
    gc.collect()
    assert path.read_bytes() == content


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "outputs.bin"
    write_outputs(path, [np.array([1], np.int32)], 100)
    content = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(suffix_file.os, "fsync", full)
    with pytest.raises(StorageError, match="No space left"):
        write_outputs(path, [np.array([2], np.int32)], 100)
    one = proposer(cache_path=str(path))
    one.attach(None, make_limits(24, 100))  # type: ignore[arg-type]
    one.start("a", 0, [5])
    propose(one, Row(0, [5, 1], (0, 1), 8, name="a"))
    with pytest.warns(RuntimeWarning, match="could not be written"):
        one.finish("a", 0, [5, 1])
    assert "not written" in one.describe()["cache_path"]
    assert path.read_bytes() == content
    assert [file.name for file in tmp_path.iterdir()] == ["outputs.bin"]
    monkeypatch.undo()
    one.save()
    assert "not written" not in one.describe()["cache_path"]
    assert len(read_outputs(path).outputs) == 2


def test_reset_goes_back_to_the_file_and_leaves_it(tmp_path: Path) -> None:
    path = tmp_path / "outputs.bin"
    write_outputs(path, [np.array([1, 2, 3], np.int32), np.array([1, 2, 4], np.int32)], 100)
    one = proposer(cache_path=str(path), suffix_decoding_max_cached_requests=3)
    one.attach(None, make_limits(24, 100))  # type: ignore[arg-type]
    for name in ("a", "b"):  # the second pushes an output of the file out
        one.start(name, 0, [5])
        one.finish(name, 0, [5, 6, 7])
    assert len(one.cache.outputs()) == 3
    one.save()
    content = path.read_bytes()
    one.reset()
    assert [ids.tolist() for ids in one.cache.outputs()] == [[1, 2, 3], [1, 2, 4]]
    one.save()
    assert path.read_bytes() == content  # nothing new to write
    one.start("a", 0, [5])
    one.finish("a", 0, [5, 8])
    one.save()
    assert [ids.tolist() for ids in read_outputs(path).outputs] == [[1, 2, 3], [1, 2, 4], [8]]
