"""Composing configurations with Hydra, and running the jobs that come out of them.

Hydra's own `main` prints tracebacks and talks of structs and defaults lists; here its parts are driven directly, so
that every error reaches `specflow.diagnosis`, and the plugins' configuration folders are on the search path before
anything is composed.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from specflow.diagnosis import check_words, translated
from specflow.errors import ConfigError
from specflow.paths import config_root
from specflow.plugins.registry import Registry

# Groups whose keys are checked against a schema that is chosen at run time; any may be given without Hydra's plus.
_FREE_GROUPS = ("task.head", "task.options", "engine.arguments", "engine.environment")

__all__ = ["CONFIG_NAME", "Composer", "Sample", "composer", "flags_parser", "plain_config"]

CONFIG_NAME = "config"


def _with_free_keys(overrides: Sequence[str]) -> list[str]:
    """The overrides, those of free groups with the prefix that lets Hydra add a key or replace its value."""
    starts = tuple(f"{group}{end}" for group in _FREE_GROUPS for end in (".", "="))
    return [f"++{word}" if word.startswith(starts) else word for word in overrides]


def flags_parser() -> ArgumentParser:
    """Hydra's command-line flags (`--multirun`, `--cfg`, `--info`, …) and the overrides."""
    parser = get_args_parser()
    parser.prog = "specflow"
    return parser


def plain_config(cfg: DictConfig) -> dict[str, Any]:
    """A composition as plain containers, resolved, without Hydra's own node."""
    keys = [str(key) for key in cfg if key != "hydra"]
    config = OmegaConf.to_container(OmegaConf.masked_copy(cfg, keys), resolve=True, throw_on_missing=True)
    assert isinstance(config, dict)
    return {str(key): value for key, value in config.items()}


@contextmanager
def composer(registry: Registry, config_dir: str | None = None) -> Iterator["Composer"]:
    """A composer over the built-in tree and the plugins' folders; `config_dir` comes before both."""
    version.setbase("1.3")
    search_path = create_config_search_path(str(config_root()))
    before_schema = SearchPathQuery(provider="schema")
    if config_dir is not None:
        if not Path(config_dir).is_dir():
            raise ConfigError(f"--config-dir {config_dir}: there is no such folder.")
        search_path.prepend("command-line", f"file://{Path(config_dir).resolve()}", SearchPathQuery(provider="main"))
    for folder in registry.config_dirs():
        if folder != config_root():
            search_path.prepend("plugin", f"file://{folder}", before_schema)
    previous, settings = GlobalHydra.instance().hydra, HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None  # a run before in this process may have been started in another folder
    try:
        yield Composer(Hydra.create_main_hydra2("specflow", search_path), registry)
    finally:
        GlobalHydra.instance().clear()
        GlobalHydra.instance().hydra, HydraConfig.instance().cfg = previous, settings


@dataclass(frozen=True)
class Sample:
    """What the words of a sweep say before any job is composed."""

    config: dict[str, Any]
    folder: Path  # of the sweep
    folder_template: str  # the same before anything like the date was put in
    swept: tuple[str, ...]  # keys with several values
    jobs: int  # combinations of the values listed; a sweeper may run fewer or more


class Composer:
    """One Hydra instance with our search path. Errors come out as `ConfigError`."""

    def __init__(self, hydra: Hydra, registry: Registry) -> None:
        self._hydra = hydra
        self._registry = registry

    def compose(self, overrides: Sequence[str] = (), config_name: str = CONFIG_NAME) -> DictConfig:
        """The configuration of a single run, with Hydra's own node `hydra` in it."""
        overrides = _with_free_keys(overrides)
        with translated(self._hydra.config_loader, config_name, overrides, self._registry):
            return self._compose(overrides, config_name)

    def _compose(self, overrides: Sequence[str], config_name: str) -> DictConfig:
        return self._hydra.compose_config(config_name, list(overrides), RunMode.RUN)

    def group_options(self, group: str) -> list[str]:
        """Names that can be chosen in a group."""
        return list(self._hydra.config_loader.get_group_options(group))

    def is_sweep(self, arguments: Namespace, config_name: str = CONFIG_NAME) -> bool:
        """True when several jobs were asked for: by `-m`, or by a configuration that sets `hydra.mode`."""
        if arguments.multirun:
            return True
        arguments.overrides = _with_free_keys(arguments.overrides)
        with translated(self._hydra.config_loader, config_name, arguments.overrides, self._registry):
            parsed = OverridesParser.create().parse_overrides(arguments.overrides)
            if not any(item.is_sweep_override() for item in parsed):
                return self._compose(arguments.overrides, config_name).hydra.mode == RunMode.MULTIRUN
        return self._hydra.get_mode(config_name, list(arguments.overrides)) == RunMode.MULTIRUN

    def run(self, overrides: Sequence[str], job: Callable[[DictConfig], Any], config_name: str = CONFIG_NAME) -> Any:
        """Run one job in a fresh output folder; returns what the job returns."""
        overrides = _with_free_keys(overrides)
        with translated(self._hydra.config_loader, config_name, overrides, self._registry):
            done = self._hydra.run(config_name, job, [*overrides, "hydra.mode=RUN"], with_log_configuration=True)
            return done.return_value

    def sample(self, overrides: Sequence[str], config_name: str = CONFIG_NAME) -> "Sample":
        """One composition of a sweep, for what no job changes: where it goes, who tracks it. Nothing is run.

        Raises `ConfigError` for words that no job could be composed with.
        """
        overrides = _with_free_keys(overrides)
        loader = self._hydra.config_loader
        with translated(loader, config_name, overrides, self._registry):
            check_words(loader, config_name, overrides, self._registry)
            parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
            words, jobs, swept = [], 1, []
            for item, word in zip(parsed, overrides, strict=True):
                if not item.is_sweep_override():
                    words += [] if item.key_or_group.startswith("proposer.") else [word]
                    continue
                swept.append(item.key_or_group)
                if item.is_discrete_sweep():
                    values = list(item.sweep_string_iterator())
                    jobs *= len(values)
                    # Options of a proposer need the proposer, which may be what is swept: none of them matters here.
                    words += [] if "proposer" in item.key_or_group else [f"{item.get_key_element()}={values[0]}"]
            cfg = self._compose(words, config_name)
            folder = Path(str(cfg.hydra.sweep.dir)).absolute()
            template = str(OmegaConf.to_container(cfg.hydra.sweep, resolve=False)["dir"])  # type: ignore[index, call-overload]
        return Sample(plain_config(cfg), folder, template, tuple(swept), jobs)

    def sweep(self, overrides: Sequence[str], job: Callable[[DictConfig], Any], config_name: str = CONFIG_NAME) -> Any:
        """Run every job of a sweep with the configured sweeper and launcher."""
        overrides = _with_free_keys(overrides)
        with translated(self._hydra.config_loader, config_name, overrides, self._registry):
            return self._hydra.multirun(config_name, job, [*overrides, "hydra.mode=MULTIRUN"])

    def show(self, arguments: Namespace, config_name: str = CONFIG_NAME) -> None:
        """Hydra's own questions: `--cfg`, `--info`, `--hydra-help`, `--shell-completion`."""
        arguments.overrides = _with_free_keys(arguments.overrides)
        with translated(self._hydra.config_loader, config_name, arguments.overrides, self._registry):
            if arguments.cfg:
                self._hydra.compose_config(config_name, arguments.overrides, RunMode.RUN)  # its errors, not its exit
                self._hydra.show_cfg(
                    config_name, arguments.overrides, arguments.cfg, arguments.package, arguments.resolve
                )
            elif arguments.info:
                self._hydra.show_info(arguments.info, config_name=config_name, overrides=arguments.overrides)
            elif arguments.shell_completion:
                self._hydra.shell_completion(config_name=config_name, overrides=arguments.overrides)
            else:
                self._hydra.hydra_help(config_name=config_name, args_parser=flags_parser(), args=arguments)
