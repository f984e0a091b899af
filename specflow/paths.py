"""Where the package keeps its files."""

from pathlib import Path

from specflow.errors import ConfigError

__all__ = ["config_root", "example_plugin"]


def config_root() -> Path:
    """The folder of the built-in configuration tree.

    An installed wheel carries it inside the package; a source checkout has it beside the package, at the root.
    """
    package = Path(__file__).resolve().parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "config.yaml").is_file():
            return folder
    raise ConfigError(f"the configuration tree `conf` is missing beside {package}: the installation is incomplete.")


def example_plugin() -> Path:
    """The folder of the example plugin package: inside an installed wheel, or in `plugins` of a source checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "example_plugin", package.parent / "plugins" / "specflow-custom-class"):
        if (folder / "pyproject.toml").is_file():
            return folder
    raise ConfigError(f"the example plugin is missing beside {package}: the installation is incomplete.")
