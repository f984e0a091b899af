"""Where the package keeps its files."""

from pathlib import Path

from specflow.errors import ConfigError

__all__ = ["config_root"]


def config_root() -> Path:
    """The folder of the built-in configuration tree.

    An installed wheel carries it inside the package; a source checkout has it beside the package, at the root.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"the configuration tree `conf` is missing beside {package}: the installation is incomplete.")
