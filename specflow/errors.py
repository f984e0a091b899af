"""Errors that a user can act on.

Every message says the cause, the consequence and the remedy, in a few lines and without a traceback:
the command line prints `str(error)` and exits with `exit_code`.
"""


class SpecflowError(Exception):
    """Base of all errors whose text is meant for the user."""

    exit_code = 1


class ConfigError(SpecflowError):
    """An option is unknown, of the wrong type, out of range, or impossible beside another one."""

    exit_code = 2


class CheckpointError(SpecflowError):
    """A model folder is missing, incomplete, half-written or of another architecture."""


class UnsupportedModelError(SpecflowError):
    """The engine cannot run this model correctly, and says which layer or rule is the reason."""


class PromptError(SpecflowError):
    """A prompt is empty, too long for the context, or its file is malformed (with the line number)."""


class PluginError(SpecflowError):
    """A plugin failed to import, declared an unknown hook or registered a name twice."""


class ProposerError(SpecflowError):
    """A proposer raised in the middle of a run; carries its name and the original error."""


class StorageError(SpecflowError):
    """A result could not be written: unwritable directory, disk full."""
