"""Store addresses, flattening, curves and the row file."""

import json
from pathlib import Path
from typing import Any

import pytest

from specflow.errors import ConfigError, StorageError
from specflow.tracking import store_uri
from specflow.tracking.curves import StepCurves
from specflow.tracking.flatten import CUT_MARK, chunks, finite, flatten, safe_name
from specflow.tracking.patience import Patient
from specflow.tracking.rows import RowWriter
from specflow.tracking.store_uri import artifact_location, refuse_file_store, resolve_uri, without_password
from tests.report import scenario


@pytest.fixture(autouse=True)
def _no_user_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)


def test_default_store_is_in_the_launch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C62: whatever folder the job works in."""
    monkeypatch.chdir("/")
    uri = resolve_uri(None, tmp_path)
    assert uri == f"sqlite:///{tmp_path}/runs/mlflow.db"
    assert artifact_location(uri, tmp_path) == f"file://{tmp_path}/runs/artifacts"
    assert resolve_uri("sqlite:///mine.db", tmp_path) == f"sqlite:///{tmp_path}/mine.db"
    assert resolve_uri("sqlite:////abs/mine.db", tmp_path) == "sqlite:////abs/mine.db"


def test_server_decides_where_artifacts_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://tracker:5000")
    assert resolve_uri(None, tmp_path) == "http://tracker:5000"
    assert artifact_location("http://tracker:5000", tmp_path) is None
    assert artifact_location("postgresql+psycopg2://h/db", tmp_path) == f"file://{tmp_path}/runs/artifacts"


@pytest.mark.parametrize("uri", ["./mlruns", "mlruns", "file:///data/mlruns"])
def test_file_store_is_refused_with_the_way_out(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """C62."""
    monkeypatch.setattr(store_uri, "_mlflow_version", lambda: (3, 13))
    with pytest.raises(ConfigError, match=r"mlflow migrate-filestore --source \S*mlruns --target sqlite:///mlflow.db"):
        refuse_file_store(uri)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    refuse_file_store(uri)


def test_other_stores_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for uri in (None, "http://tracker", "sqlite:///x.db", "databricks"):
        refuse_file_store(uri)
    monkeypatch.setattr(store_uri, "_mlflow_version", lambda: (3, 12))
    refuse_file_store("./mlruns")


def test_passwords_are_not_shown() -> None:
    assert without_password("postgresql://me:secret@host/db") == "postgresql://…@host/db"
    assert without_password("sqlite:////home/me/x.db") == "sqlite:////home/me/x.db"


def test_flatten() -> None:
    config = {"a": {"b": None, "c": [1, "x"], "empty": {}}, "flag": True, "text": "plain", "odd[0]?": 1}
    assert flatten(config) == {
        "a.b": "null",
        "a.c": '[1, "x"]',
        "a.empty": "{}",
        "flag": "true",
        "text": "plain",
        "odd_0__": "1",
    }
    assert flatten({"x": "y" * 501})["x"] == "y" * (500 - len(CUT_MARK)) + CUT_MARK
    assert len(safe_name("n" * 999)) <= 250


def test_chunks_and_finite() -> None:
    assert [list(part) for part in chunks([1, 2, 3], 2)] == [[1, 2], [3]]
    assert finite({"a": 1, "b": float("inf"), "c": None}) == {"a": 1.0}


def test_curves_are_thinned() -> None:
    curves = StepCurves(1)
    curves.start(scenario.series("ngram", 4))
    for record in scenario.steps("ngram", 4, 1000):
        curves.add(record)
    points = [point for point in curves.take() if point.name == "steps/ngram/batch_4/acceptance_rate"]
    assert len(points) == 125
    assert points[-1].step == 999
    assert 0.2 < points[0].value < 0.6
    assert curves.take() == []


@pytest.mark.parametrize(("interval", "warmup"), [(0, False), (5, True)])
def test_curves_without_points(interval: int, warmup: bool) -> None:
    curves = StepCurves(interval)
    curves.start(scenario.series("plain", 1, warmup=warmup))
    curves.add(scenario.steps("plain", 1, 1)[0])
    assert curves.take() == []


def test_rows_are_on_disk_as_they_finish(tmp_path: Path) -> None:
    writer = RowWriter(tmp_path)
    for number in range(3):
        writer.write(scenario.row("ngram", 1, number))
        lines = (tmp_path / "requests.jsonl").read_text().splitlines()  # while the file is still open
        assert len(lines) == number + 1
    row: dict[str, Any] = json.loads(lines[-1])
    assert (row["request_id"], row["accepted"], row["token_ids"][:3]) == ("heapq-2", 10, [0, 1, 2])
    writer.close()
    writer.close()


def test_rows_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"cannot write the request rows: .*requests\.jsonl"):
        RowWriter(tmp_path / "missing").write(scenario.row("plain", 1))


# -- a store that is locked ----------------------------------------------------------------------------------------
class Locked:
    """A client whose calls fail a few times."""

    limit = 7

    def __init__(self, failures: int, message: str = "(sqlite3.OperationalError) database is locked") -> None:
        self.failures, self.message, self.calls = failures, message, 0

    def write(self, value: int, *, twice: bool = False) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise RuntimeError(self.message)
        return value * (2 if twice else 1)


def test_a_locked_store_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specflow.tracking.patience.time.sleep", lambda seconds: None)
    client = Locked(3)
    assert Patient(client).write(4, twice=True) == 8
    assert client.calls == 4
    assert Patient(client).limit == 7


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    client = Locked(10**6)
    with pytest.raises(RuntimeError, match="locked"):
        Patient(client, patience=0.2).write(1)
    assert client.calls > 1


def test_another_error_is_passed_on_at_once() -> None:
    client = Locked(1, "no such table")
    with pytest.raises(RuntimeError, match="no such table"):
        Patient(client).write(1)
    assert client.calls == 1
