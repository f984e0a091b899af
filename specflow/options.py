"""From a plain mapping to a component's options dataclass, with errors a user can act on.

Every component declares its options as a standard dataclass; the values come from YAML and the command line. Types are
checked strictly (a word is no number, true is no 1), unknown keys are refused with the nearest valid name, and the
dataclass's own `__post_init__` refuses impossible combinations. All problems of a node are reported at once.
"""

import json
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from specflow.errors import ConfigError
from specflow.words import did_you_mean

__all__ = ["build_options", "describe_fields", "describe_type", "show"]

T = TypeVar("T")
_MAX_LISTED = 1000  # characters of a list of valid keys with their types; longer ones show names only


def build_options(schema: type[T], values: Mapping[str, Any], where: str) -> T:
    """An instance of the dataclass `schema` made from `values`.

    values: plain containers as YAML gives them; the key `name` only chooses the component and is taken out.
    where: path of the node in the configuration, for instance "proposer"; starts every key in the messages.
    Raises `ConfigError`, one line per problem: key, value, what is allowed, nearest valid name.
    """
    label = where
    if isinstance(values, Mapping) and isinstance(values.get("name"), str):
        label = f"{where}={values['name']}"
        values = {key: value for key, value in values.items() if key != "name"}
    problems = _unknown_keys(schema, values, where, label)
    if problems:
        raise ConfigError("\n".join(problems))
    try:
        return TypeAdapter(schema).validate_json(_as_json(values, where), strict=True)
    except ValidationError as error:
        lines = [_explain(schema, values, where, label, dict(problem)) for problem in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from None
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith(where) else f"{where}: {text}") from None


def _as_json(values: Mapping[str, Any], where: str) -> str:
    """JSON has YAML's types, so pydantic's strict mode for JSON takes lists as tuples, text as paths, and no more."""
    try:
        return json.dumps(values, default=_plain)
    except TypeError as error:
        raise ConfigError(f"{where} holds a value that is not plain data: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Sequence):
        return list(value)
    raise TypeError(f"{value!r} ({type(value).__name__})")


def _unknown_keys(schema: type, values: Any, where: str, label: str) -> list[str]:
    """One line per key that the schema lacks, nested dataclasses included."""
    if not isinstance(values, Mapping):
        return [f"{where}={show(values)} must be a group of options ({where}.KEY=VALUE), not a single value."]
    hints = get_type_hints(schema)
    known = {field.name for field in fields(schema)}
    problems = []
    for key, value in values.items():
        if key not in known:
            problems.append(_unknown_key(schema, str(key), value, where, label))
        elif (nested := _nested(hints[key])) and value is not None:
            problems += _unknown_keys(nested, value, f"{where}.{key}", f"{where}.{key}")
    return problems


def _unknown_key(schema: type, key: str, value: Any, where: str, label: str) -> str:
    text = f"{where}.{key}={show(value)}: {label} has no option {key!r}."
    names = [field.name for field in fields(schema)]
    if not names:
        return f"{text} It has no options."
    listed = ", ".join(describe_fields(schema))
    valid = listed if len(listed) <= _MAX_LISTED else ", ".join(names)
    return f"{text}{did_you_mean(key, names)} Valid: {valid}."


def _explain(schema: type, values: Any, where: str, label: str, problem: dict[str, Any]) -> str:
    """One line for one pydantic error."""
    path, field_type, value = where, typing.cast(Any, schema), values
    for part in problem["loc"]:
        if is_dataclass(field_type) and isinstance(part, str) and part in get_type_hints(field_type):
            field_type = get_type_hints(field_type)[part]
            field_type = _nested(field_type) or field_type
            path = f"{path}.{part}"
        elif isinstance(value, list) and isinstance(part, int):
            path = f"{path}[{part}]"
        else:
            break
        value = value[part] if isinstance(value, Mapping) and part in value else value
    if problem["type"] == "missing":
        return f"{path} must be set ({describe_type(field_type)}): {label} has no default for it."
    if problem["type"] == "value_error":
        return f"{path}: {problem['msg'].removeprefix('Value error, ')}"
    shown = show(problem["input"])
    hint = f" Quote it to pass text: {path}='\"{shown}\"'." if problem["type"] == "string_type" else ""
    return f"{path}={shown} is not valid: it must be {describe_type(field_type)}.{hint}"


def describe_fields(schema: type) -> list[str]:
    """`key (type)` for every option of a dataclass, in its own order."""
    hints = get_type_hints(schema)
    return [f"{field.name} ({describe_type(hints[field.name])}{_required(field)})" for field in fields(schema)]


def _required(field: "Field[Any]") -> str:
    return ", required" if field.default is MISSING and field.default_factory is MISSING else ""


def describe_type(annotation: Any) -> str:
    """An annotation in the words of a YAML user: `int`, `text`, `a | b`, `list of int`, `… | null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (typing.Union, types.UnionType):
        return " | ".join(describe_type(argument) for argument in arguments)
    if annotation in (str, Path):
        return "text" if annotation is str else "path"
    if is_dataclass(annotation) or (isinstance(origin, type) and issubclass(origin, Mapping)):
        return "group"
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return f"list of {describe_type(arguments[0])}" if arguments else "list"
    return getattr(annotation, "__name__", str(annotation))


def _nested(annotation: Any) -> type | None:
    """The dataclass inside `X` or `X | None`."""
    for candidate in (annotation, *get_args(annotation)):
        if is_dataclass(candidate) and isinstance(candidate, type):
            return candidate
    return None


def show(value: Any) -> str:
    """A value as it would be written in YAML or on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
