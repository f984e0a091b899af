"""The wheel carries everything: configuration, bundled models, prompts and templates; and works from any folder."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel, unpacked."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder / "site"


def test_data_files_are_inside(unpacked: Path) -> None:
    for name in (
        "conf/config.yaml",
        "conf/proposer/ngram.yaml",
        "zoo/models/target/model.safetensors",
        "zoo/models/draft/model.safetensors",
        "zoo/models/pard/model.safetensors",
        "zoo/models/dflash/model.safetensors",
        "workloads/data/bundled.jsonl",
        "report/templates/report.html.j2",
        "example_plugin/pyproject.toml",
        "example_plugin/specflow_custom_class/conf/proposer/phrase_lookup.yaml",
    ):
        assert (unpacked / "specflow" / name).is_file(), name


def test_it_runs_from_an_empty_folder(unpacked: Path, tmp_path: Path) -> None:
    """The unpacked wheel, not the source tree, composes and runs a tiny benchmark."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "specflow", "+proposer=ngram", "+experiment=debug", "task.batch_sizes=[1]"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "lossless: verified" in done.stdout
    where = [sys.executable, "-c", "import specflow; print(specflow.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(unpacked)
    assert list(tmp_path.glob("runs/*/*/report.html"))
