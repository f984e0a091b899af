"""The command line: `python -m specflow [FLAGS] [GROUP=NAME …] [GROUP.KEY=VALUE …]`.

Every failure becomes a few lines on stderr and an exit code; a traceback is shown only when asked for with
`SPECFLOW_TRACEBACK=1` (or Hydra's `HYDRA_FULL_ERROR=1`).
"""

import os
import sys
import traceback
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specflow import __version__
from specflow.errors import ConfigError, SpecflowError
from specflow.interrupts import INTERRUPTED
from specflow.plugins.registry import Registry, load_plugins

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from specflow.composition import Composer

__all__ = ["main"]


def main(argv: Sequence[str] | None = None, registry: Registry | None = None) -> int:
    """Run one command line and return its exit code.

    registry: plugins to use instead of the installed ones, for programs and tests that embed the command.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if "--version" in words:
        print(f"specflow {__version__}")
        return 0
    try:
        return _dispatch(words, registry or load_plugins())
    except KeyboardInterrupt as error:
        reason = f": {error}" if str(error) else ""
        print("\n".join([f"interrupted{reason}", *getattr(error, "__notes__", [])]), file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output is gone (`| head`): nothing more to say, and nobody to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        return _report(error)


def _report(error: Exception) -> int:
    """Print an error for the user and return the exit code."""
    if "1" in (os.environ.get("SPECFLOW_TRACEBACK"), os.environ.get("HYDRA_FULL_ERROR")):
        traceback.print_exception(error)
    elif isinstance(error, SpecflowError):
        print("\n".join([f"error: {error}", *getattr(error, "__notes__", [])]), file=sys.stderr)
    else:
        print(f"error: unexpected {type(error).__name__}: {error}", file=sys.stderr)
        print("Set SPECFLOW_TRACEBACK=1 to see where it comes from.", file=sys.stderr)
    return error.exit_code if isinstance(error, SpecflowError) else 1


def _dispatch(words: list[str], registry: Registry) -> int:
    if "--help" in words or "-h" in words:
        from specflow.help_text import help_text

        print(help_text(registry))
        return 0
    from specflow.composition import CONFIG_NAME, composer, flags_parser

    flags = flags_parser().parse_intermixed_args(words)  # flags may stand between overrides
    if flags.config_path or flags.experimental_rerun:
        raise ConfigError("--config-path and --experimental-rerun are not supported; see --config-dir in --help.")
    config_name = flags.config_name or CONFIG_NAME
    with composer(registry, flags.config_dir) as compose:
        if flags.cfg or flags.info or flags.hydra_help or flags.shell_completion:
            compose.show(flags, config_name)
            return 0
        if compose.is_sweep(flags, config_name):
            return _sweep(flags, config_name, compose, registry)
        return _run(flags, config_name, compose, registry)


def _run(flags: Namespace, config_name: str, compose: "Composer", registry: Registry) -> int:
    """One run. Its options are checked before Hydra makes a folder for it."""
    from specflow.composition import plain_config
    from specflow.runner import check, execute, is_tracked, run, storage_error

    config = plain_config(compose.compose(flags.overrides, config_name))
    plan = check(config, registry)
    if (config.get("sweep") or {}).get("resume"):
        raise ConfigError(
            "sweep.resume=true goes on with a sweep, and this is a single run: add -m and what was swept."
        )
    if not is_tracked(config, registry):
        execute(plan, Path.cwd(), {})
        return 0
    raised: list[Exception] = []

    def job(cfg: "DictConfig") -> float | None:
        try:
            return run(cfg, registry)
        except Exception as error:  # kept from Hydra, which would print its own text about it
            raised.append(error)
            return None

    try:
        compose.run(flags.overrides, job, config_name)
    except OSError as error:  # Hydra makes the folder and saves its files there
        raise storage_error(error, None) from error
    if raised:
        raise raised[0]
    return 0


def _sweep(flags: Namespace, config_name: str, compose: "Composer", registry: Registry) -> int:
    """Many runs: one that fails is reported at once and again at the end, and does not stop the others."""
    from rich.console import Console

    from specflow.multirun import run_sweep
    from specflow.report import wording
    from specflow.report.overview_table import render_overview
    from specflow.report.table import WIDTH
    from specflow.runner import storage_error

    try:
        result = run_sweep(compose, flags.overrides, config_name, registry, _report)
    except OSError as error:
        raise storage_error(error, None) from error
    if result is None:
        return 0
    console = Console()
    console = console if console.is_terminal else Console(width=WIDTH)
    if result.page is not None and result.overview.rows:
        render_overview(result.overview, console)
        console.print(f"report: {wording.short_path(result.page)}", soft_wrap=True, highlight=False)
    if not result.failed:
        return 0
    lines = [f"{len(result.failed)} job(s) of the sweep failed:"]
    for reason, names in result.overview.failures().items():
        lines += [f"  {reason.splitlines()[0]}", *(f"    {name}" for name in names)]
    print("\n".join(lines), file=sys.stderr)
    return 1
