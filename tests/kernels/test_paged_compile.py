"""The kernels of targets and of paged attention compile for NVIDIA and AMD; no GPU is needed for that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(("module", "count"), [("compile_paged", 7), ("compile_layers", 23)])
@pytest.mark.parametrize("target", [("cuda", "90", "32"), ("hip", "gfx942", "64")], ids=lambda target: target[1])
def test_compiles(target: tuple[str, str, str], module: str, count: int, tmp_path: Path) -> None:
    """Every kernel, with the rules that add code to it."""
    sizes = [int(line.split()[1]) for line in printed(module, target, tmp_path)]
    assert len(sizes) == count
    assert min(sizes) > 1000


@pytest.mark.slow
def test_streams_compile(tmp_path: Path) -> None:
    """For NVIDIA; a thread asks for its part of a whole ring of tiles before it waits for the kernel in front."""
    pytest.importorskip("triton.experimental.gluon")
    found = [int(line.split()[2]) for line in printed("compile_streams", ("cuda", "90", "32"), tmp_path)]
    ring = 12 * 16 * 256 * 2 // (32 * 16)
    gated_ring = 2 * 4 * 32 * 128 * 2 // (64 * 16)
    assert found[:2] == [ring, gated_ring]


@pytest.mark.slow
def test_what_is_for_hopper_compiles(tmp_path: Path) -> None:
    """Products: the warp that asks has asked for a whole ring of weights before it waits: panels, their halves when
    gated, and pieces of 64 columns. Attention: queries, two tiles of keys and values ahead, before the wait or behind
    it, and one more in the loop, 16 KiB each, by 128 threads."""
    pytest.importorskip("triton.experimental.gluon")
    found = [int(line.split()[2]) for line in printed("compile_hopper", ("cuda", "90", "32"), tmp_path)]
    assert found[:3] == [3 * 3 * 2 * 2, 8, 14 * 3]
    assert found[3:] == [(1 + 2 * 2 * 2 + 2) * 16384 // (16 * 128)] * 2


def printed(module: str, target: tuple[str, str, str], folder: Path) -> list[str]:
    """Lines that a module prints in a process without the interpreter."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{module}", *target],
        cwd=Path(__file__).parents[2],
        env=kept | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()
