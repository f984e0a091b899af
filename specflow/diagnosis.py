"""What a failed composition means for the person who typed the command line.

Hydra's messages speak of structs and defaults lists. Here the overrides are looked at one by one: is the group known,
is the name one of its options, does the key exist in what would be composed without it? Only a case that none of this
explains falls back to Hydra's own text.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, ValueType
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from specflow.errors import ConfigError
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry
from specflow.words import did_you_mean, valid_names

__all__ = ["check_words", "translated"]

_PLUS = "+"  # the prefix that adds a group to the defaults list
_COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError)  # Hydra raises all three
_OPTIONAL = (str(Kind.PROPOSER), "experiment")  # groups that are not in it


@contextmanager
def translated(loader: ConfigLoader, config_name: str, overrides: Sequence[str], registry: Registry) -> Iterator[None]:
    """Turn Hydra's errors inside the block into one `ConfigError` that names the wrong word and the valid ones."""
    try:
        yield
    except OverrideParseException as error:
        raise ConfigError(_syntax(error)) from error
    except _COMPOSE_ERRORS as error:
        raise ConfigError(_Diagnosis(loader, config_name, registry).explain(overrides, error)) from error


def check_words(loader: ConfigLoader, config_name: str, overrides: Sequence[str], registry: Registry) -> None:
    """Raise `ConfigError` for overrides that no job of a sweep could compose with, before it makes its folder."""
    problems = _Diagnosis(loader, config_name, registry).problems(overrides)
    if problems:
        raise ConfigError("\n".join(problems))


def _syntax(error: OverrideParseException) -> str:
    reason = str(error.message).splitlines()[0]
    return (
        f"cannot read {error.override!r}: {reason}\n"
        "Write GROUP=NAME or GROUP.KEY=VALUE, and quote special characters: 'sampling.stop=[\"a, b\"]'."
    )


class _Diagnosis:
    """Looks for the override that makes a composition fail."""

    def __init__(self, loader: ConfigLoader, config_name: str, registry: Registry) -> None:
        self._loader = loader
        self._config_name = config_name
        self._registry = registry

    def explain(self, overrides: Sequence[str], error: Exception) -> str:
        """Every override that is wrong, one paragraph each; Hydra's own words when none is."""
        if "--multirun" in str(error):
            swept = [
                item for item in OverridesParser.create().parse_overrides(list(overrides)) if item.is_sweep_override()
            ]
            words = " ".join(item.input_line or "" for item in swept)
            return f"{words}: several values. Add -m to run each of them, or write one list as KEY=[a,b]."
        return "\n".join(self.problems(overrides)) or _hydra_words(error)

    def problems(self, overrides: Sequence[str]) -> list[str]:
        """One paragraph per override that is wrong for itself."""
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        groups = [item for item in parsed if self._is_group(item)]
        problems = [self._group_problem(item, groups) for item in groups]
        if not any(problems):
            problems += self._key_problems(parsed)
        return list(dict.fromkeys(problem for problem in problems if problem))

    def _is_group(self, override: Override) -> bool:
        return bool(self._loader.get_group_options(override.key_or_group, results_filter=None))

    def _group_problem(self, override: Override, groups: list[Override]) -> str | None:
        group = override.key_or_group
        options = self._loader.get_group_options(group)
        if override.value() is None and not override.is_delete():
            return f"{override.input_line}: a {group} is chosen by name; for none leave it out, or write ~{group}."
        for name in _chosen(override):
            if name not in options:
                return self._unknown_option(group, name, options)
        others = [item for item in groups if item is not override]
        if self._composes(groups) or not self._composes(others):
            return None
        return _prefix_problem(group, override, options)

    def _unknown_option(self, group: str, name: str, options: list[str]) -> str:
        plus = _PLUS if group in _OPTIONAL else ""
        text = f"{plus}{group}={name}: there is no {group} of this name.{did_you_mean(name, options)}"
        lines = [f"{text} Valid: {valid_names(name, options)}."]
        if group in list(Kind):
            if name in self._registry.components(group):
                owner = self._registry.get(group, name).source
                lines.append(f"The plugin {owner} registers it, but provides no file {group}/{name}.yaml.")
            lines += self._registry.remedies(name)
        return "\n".join(lines)

    def _key_problems(self, parsed: list[Override]) -> list[str | None]:
        """Check keys against what the groups compose to, then values one by one."""
        groups = [item for item in parsed if self._is_group(item)]
        base = self._composed(groups)
        if base is None:
            return []
        keys = [item for item in parsed if item not in groups]
        unknown = [self._key_problem(base, item) for item in keys]
        if any(unknown):
            return unknown
        return [self._value_problem(groups, item) for item in keys]

    def _key_problem(self, base: DictConfig, override: Override) -> str | None:
        if override.is_add() or override.is_force_add():
            return None
        node: Any = base
        parts = override.key_or_group.split(".")
        for depth, part in enumerate(parts):
            if not isinstance(node, DictConfig) or part not in node:
                return self._unknown_key(node, parts, depth, override)
            node = OmegaConf.select(node, part)
        return None

    def _unknown_key(self, node: Any, parts: list[str], depth: int, override: Override) -> str:
        where, word = ".".join(parts[:depth]), parts[depth]
        if where == Kind.PROPOSER and node is None:
            names = self._loader.get_group_options(where)
            return f"{override.input_line}: no proposer is chosen. Add +proposer=NAME: {valid_names('', names)}."
        if not isinstance(node, DictConfig):
            return f"{override.input_line}: {where} is a single value and has no key {word!r}."
        names = [str(key) for key in node if key not in ("hydra", "name")]
        if not where:
            groups = self._loader.get_group_options("", results_filter=ObjectType.GROUP)
            names += [group for group in groups if group not in (*names, "hydra")]
            valid = valid_names(word, names)
            return f"{override.input_line}: there is no {word!r} here.{did_you_mean(word, names)} Valid: {valid}."
        label = f"{where}={node['name']}" if "name" in node else where
        text = f"{override.input_line}: {label} has no option {word!r}."
        return f"{text}{did_you_mean(word, names)} Valid: {valid_names(word, names)}."

    def _value_problem(self, groups: list[Override], override: Override) -> str | None:
        """An override that fails although its key exists: a value Hydra refuses."""
        try:
            self._compose([*groups, override])
        except _COMPOSE_ERRORS as error:
            return f"{override.input_line}: {_hydra_words(error)}"
        return None

    def _composes(self, overrides: list[Override]) -> bool:
        return self._composed(overrides) is not None

    def _composed(self, overrides: list[Override]) -> DictConfig | None:
        try:
            return self._compose(overrides)
        except _COMPOSE_ERRORS:
            return None

    def _compose(self, overrides: list[Override]) -> DictConfig:
        """One job's configuration: of a sweep the first value is taken."""
        lines = [line for item in overrides if (line := _first_choice(item))]
        return self._loader.load_configuration(self._config_name, lines, RunMode.RUN)


def _prefix_problem(group: str, override: Override, options: list[str]) -> str:
    """The name is right; so the prefix is not."""
    value = (override.input_line or "").split("=", 1)[-1]
    if override.is_add():
        return f"{override.input_line}: a {group} is chosen already, so write {group}={value} without the plus."
    return (
        f"{override.input_line}: no {group} is in the composition yet, so write {_PLUS}{group}={value}\n"
        f"Valid: {valid_names(value, options)}."
    )


def _chosen(override: Override) -> list[str]:
    """Names that a group override asks for: one, a list, or a sweep."""
    value = override.value()
    if value is None or override.is_delete():
        return []
    if isinstance(value, ChoiceSweep):
        items: list[Any] = list(value.list)
    elif override.is_sweep_override():
        return []  # a glob, which Hydra expands to names that exist
    else:
        items = value if isinstance(value, list) else [value]
    return [str(getattr(item, "text", item)) for item in items if item is not None]


def _first_choice(override: Override) -> str | None:
    """The override with the first value of its sweep; None for an interval or a glob, which have none by themselves."""
    line = override.input_line or ""
    if not override.is_sweep_override():
        return line
    if override.is_interval_sweep() or override.value_type is ValueType.GLOB_CHOICE_SWEEP:
        return None
    first = next(iter(override.sweep_string_iterator()), "")
    return f"{line.split('=', 1)[0]}={first}"


def _hydra_words(error: Exception) -> str:
    """Hydra's message, its cause included, without blank lines and not more than a screen."""
    texts = [str(error), str(error.__cause__ or "")]
    return "\n".join([line.rstrip() for text in texts for line in text.splitlines() if line.strip()][:8])
