"""The kernels of targets and of paged attention compile for NVIDIA and AMD; no GPU is needed for that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize(("module", "count"), [("compile_paged", 6), ("compile_layers", 16)])
@pytest.mark.parametrize("target", [("cuda", "90", "32"), ("hip", "gfx942", "64")], ids=lambda target: target[1])
def test_compiles(target: tuple[str, str, str], module: str, count: int, tmp_path: Path) -> None:
    """Every kernel, with the rules that add code to it."""
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", f"tests.kernels.{module}", *target],
        cwd=Path(__file__).parents[2],
        env=kept | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    sizes = [int(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(sizes) == count
    assert min(sizes) > 1000
