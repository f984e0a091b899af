"""Checks of how a proposer is chosen and described: its name, its options and their errors, its configuration file."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import yaml

from specflow.errors import ConfigError
from specflow.plugins.component import Kind
from specflow.plugins.registry import RegisteredComponent
from specflow.testing.subject import PROMPTS, Subject, greedy, installed

__all__ = ["check_description", "check_option_errors", "check_registration"]

_K = "num_speculative_tokens"


def check_registration(name: str) -> RegisteredComponent:
    """`+proposer=NAME` finds the component, its options and a file that says the same as the options dataclass."""
    item = installed().get(Kind.PROPOSER, name)
    summary, schema = item.component.summary, item.load_options()
    assert summary.strip(), f"{name} has no summary"
    assert "\n" not in summary, f"the summary of {name} must be one line, it stands in --help"
    assert dataclasses.is_dataclass(schema), f"the options of {name} are {schema!r}, not a dataclass"
    assert callable(item.load_factory()), f"the factory of {name} is {item.load_factory()!r}, which cannot be called"
    files = [folder / Kind.PROPOSER / f"{name}.yaml" for folder in installed().config_dirs()]
    found = [file for file in files if file.is_file()]
    assert found, (
        f"+proposer={name} needs a file proposer/{name}.yaml in a folder that specflow_config_dirs returns. "
        "Is it packaged?"
    )
    values = yaml.safe_load(found[0].read_text(encoding="utf-8"))
    assert values.pop("name", None) == name, f"{found[0]} must say `name: {name}`"
    fields = {field.name: field for field in dataclasses.fields(schema)}
    assert set(values) == set(fields), (
        f"{found[0]} and {schema.__name__} differ in {sorted(set(values) ^ set(fields))}: each option stands in both"
    )
    for key, value in values.items():
        default = fields[key].default
        if default is not dataclasses.MISSING and not dataclasses.is_dataclass(default):
            plain = list(default) if isinstance(default, tuple) else default
            assert plain == value, f"{key} is {value!r} in {found[0]} and {default!r} in {schema.__name__}"
    return item


def check_option_errors(name: str, options: Mapping[str, Any], invalid: Sequence[Mapping[str, Any]] = ()) -> None:
    """Unknown keys, wrong types and values out of range are errors that name the option, before anything is loaded.

    options: valid ones. invalid: changes of them, each of which must be refused.
    """
    item = installed().get(Kind.PROPOSER, name)
    hints = get_type_hints(item.load_options())
    item.check({"name": name, **options})
    for key in hints:
        text = _refusal(item, {**options, f"{key}x": 1})
        assert key in text, f"an unknown option {key}x is refused without the nearest name, {key}: {text}"
    for key, kind in hints.items():
        if kind in (int, float, bool):
            text = _refusal(item, {**options, key: "many"})
            assert f"proposer.{key}" in text, f"the word 'many' for {key} is refused without naming it: {text}"
    changes: list[Mapping[str, Any]] = [{_K: 0}, {_K: -1}] if _K in hints else []
    for change in [*changes, *invalid]:
        text = _refusal(item, {**options, **change})
        assert any(key in text for key in change), f"{dict(change)} is refused without naming the option: {text}"


def _refusal(item: RegisteredComponent, values: Mapping[str, Any]) -> str:
    try:
        item.check({"name": item.component.name, **values})
    except ConfigError as error:
        return str(error)
    raise AssertionError(
        f"{dict(values)} is not refused. Raise specflow.errors.ConfigError from __post_init__ of the options."
    )


def check_description(subject: Subject, name: str) -> None:
    """`describe()` is a flat dict of texts that says something, and the same every time."""
    engine = subject.engine()
    proposer = engine.proposer
    assert proposer is not None
    assert not name or proposer.name == name, f"the class says name = {proposer.name!r}, it is registered as {name!r}"
    before = proposer.describe()
    assert before, "describe() is empty: the report could not say what ran"
    for key, value in before.items():
        assert isinstance(key, str), f"describe() has the key {key!r}, which is no text"
        assert isinstance(value, str), f"describe()[{key!r}] is {value!r}, which is no text"
        assert " object at 0x" not in value, f"describe()[{key!r}] is {value!r}: say what it is"
    again = subject.engine().describe()["proposer"]
    assert again == engine.describe()["proposer"], "describe() differs between two equal proposers"
    engine.generate(PROMPTS[:1], greedy(4))
    assert set(before) <= set(proposer.describe()), "describe() loses entries after a run"
