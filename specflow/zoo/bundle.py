"""Where the bundled models are: `zoo:target`, `zoo:draft`, … name folders inside the package."""

from pathlib import Path

from specflow.errors import ConfigError

PREFIX = "zoo:"
NAMES = ("target", "draft", "pard", "eagle3", "dflash")


def model_folder(name: str) -> Path:
    """The folder of a bundled model. ConfigError when there is none of that name."""
    if name not in NAMES:
        raise ConfigError(f"no bundled model is named {name!r}; there are: {', '.join(NAMES)}")
    return Path(__file__).parent / "models" / name


def resolve(reference: str) -> str:
    """`zoo:NAME` as the folder it stands for; any other reference unchanged."""
    return str(model_folder(reference.removeprefix(PREFIX))) if reference.startswith(PREFIX) else reference
