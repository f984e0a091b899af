"""Where an MLflow store lies, and which ones cannot be used."""

import os
import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from urllib.parse import urlsplit

from specflow.errors import ConfigError

__all__ = ["artifact_location", "refuse_file_store", "resolve_uri", "without_password"]

_ENVIRONMENT = "MLFLOW_TRACKING_URI"
_ALLOW_FILES = "MLFLOW_ALLOW_FILE_STORE"
_SQLITE = "sqlite:///"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")


def resolve_uri(uri: str | None, launch_dir: Path) -> str:
    """The store's URI with absolute paths, so that a run that changes its folder finds the same store.

    None is MLflow's own variable MLFLOW_TRACKING_URI if it is set, else SQLite in the launch folder's runs/.
    """
    uri = uri or os.environ.get(_ENVIRONMENT) or f"{_SQLITE}runs/mlflow.db"
    if not uri.startswith(_SQLITE) or uri == _SQLITE:
        return uri
    path = Path(uri.removeprefix(_SQLITE)).expanduser()
    return _SQLITE + str(launch_dir.absolute() / path)


def artifact_location(uri: str, launch_dir: Path) -> str | None:
    """Folder for the files of new experiments: beside a SQLite store, runs/artifacts for other databases; None where a
    server decides.
    """
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme not in _DATABASES:
        return None
    if uri.startswith(_SQLITE):
        return (Path(uri.removeprefix(_SQLITE)).parent / "artifacts").as_uri()
    return (launch_dir.absolute() / "runs" / "artifacts").as_uri()


def refuse_file_store(uri: str | None) -> None:
    """Raise `ConfigError` for a folder of files, which MLflow refuses since 3.13 unless a variable allows it."""
    uri = uri or os.environ.get(_ENVIRONMENT)
    if uri is None or not _is_file_store(uri) or _mlflow_version() < (3, 13):
        return
    if os.environ.get(_ALLOW_FILES, "").lower() in ("true", "1"):
        return
    folder = urlsplit(uri).path if uri.startswith("file:") else uri
    raise ConfigError(
        f"tracking.uri={uri} is a folder of files, which MLflow {'.'.join(map(str, _mlflow_version()))} no longer "
        f"accepts. Move it into a database once:\n"
        f"  mlflow migrate-filestore --source {folder} --target sqlite:///mlflow.db\n"
        f"and give tracking.uri=sqlite:///mlflow.db (or leave tracking.uri out for a new store in runs/). "
        f"{_ALLOW_FILES}=true in the environment allows the folder as it is."
    )


def without_password(uri: str) -> str:
    """The URI as it may be shown."""
    return re.sub(r"//[^/@]*@", "//…@", uri)


def _is_file_store(uri: str) -> bool:
    scheme = urlsplit(uri).scheme
    is_drive = sys.platform == "win32" and len(scheme) == 1
    return is_drive or (scheme in ("", "file") and uri != "databricks")


def _mlflow_version() -> tuple[int, ...]:
    for package in ("mlflow-skinny", "mlflow"):
        try:
            return tuple(int(part) for part in version(package).split(".")[:2] if part.isdigit())
        except PackageNotFoundError:
            continue
    return (0,)
