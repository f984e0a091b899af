"""The contract of a user's class, checked before any weight is read: constructor, methods, and what they return."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from specflow.core.draft import Draft
from specflow.errors import ConfigError, ProposerError
from specflow.proposers.base import Proposer, Requirements
from specflow.proposers.custom_loading import LoadedClass, user_line
from specflow.words import did_you_mean

__all__ = ["EXAMPLE", "check_draft", "check_ids", "check_methods", "check_requirements", "construct"]

EXAMPLE = """Example:
    class Repeat:
        def __init__(self, num_speculative_tokens: int) -> None: ...
        def draft(self, tokens: np.ndarray, max_drafts: int, request_id: str) -> list[int]:
            return [int(tokens[-1])] * max_drafts"""

# What each optional method is called with; the values only stand for the number of arguments.
_SIGNATURES: Mapping[str, tuple[str, ...]] = {
    "draft": ("tokens", "max_drafts", "request_id"),
    "propose": ("context",),
    "start": ("request_id", "slot", "prompt"),
    "finish": ("request_id", "slot", "token_ids"),
    "reset": (),
    "load": ("target", "backend"),
    "attach": ("target", "limits"),
    "requirements": (),
    "describe": (),
}


# -- constructor ---------------------------------------------------------------------------------------------------
def construct(loaded: LoadedClass, num_speculative_tokens: int, options: Mapping[str, Any]) -> Any:
    """An instance, made with num_speculative_tokens if the constructor takes it, and with all options.

    Raises `ConfigError` when the constructor's parameters and the options do not fit, or when it raises.
    """
    missing = sorted(getattr(loaded.cls, "__abstractmethods__", ()))
    if missing:
        raise ConfigError(f"{loaded.name} is abstract: it has to define {', '.join(missing)}.\n{EXAMPLE}")
    arguments = _arguments(loaded, num_speculative_tokens, options)
    try:
        return loaded.cls(**arguments)
    except Exception as error:
        given = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        line = user_line(error)
        raise ConfigError(
            f"{loaded.cls.__name__}({given}) raised {type(error).__name__}: {error}{f' ({line})' if line else ''}."
        ) from error


def _arguments(loaded: LoadedClass, num_speculative_tokens: int, options: Mapping[str, Any]) -> dict[str, Any]:
    parameters = _parameters(loaded.cls)
    takes_any = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    named = {key: one for key, one in parameters.items() if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)}
    takes = f"{loaded.cls.__name__}({', '.join(str(one) for one in parameters.values())})"
    arguments = dict(options)
    if "num_speculative_tokens" in options:
        raise ConfigError("proposer.options.num_speculative_tokens: set proposer.num_speculative_tokens instead.")
    if takes_any or "num_speculative_tokens" in named:
        arguments["num_speculative_tokens"] = num_speculative_tokens
    for key in options:
        if not takes_any and key not in named:
            hint = did_you_mean(key, named)
            raise ConfigError(f"proposer.options.{key}: {loaded.name} has no such parameter.{hint} It is {takes}.")
    for key, one in parameters.items():
        required = one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
        if required and (key not in arguments or one.kind is one.POSITIONAL_ONLY):
            raise ConfigError(
                f"{loaded.name} cannot be made: its constructor is {takes} and nothing gives {key!r}. Set "
                f"'+proposer.options.{key}=VALUE', give the parameter a default, or take it out. It is called with "
                "num_speculative_tokens=K and every key of proposer.options, by name."
            )
    return arguments


def _parameters(cls: type) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(cls).parameters
    except ValueError:  # a class of an extension module that does not tell
        return {"options": inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD)}


# -- methods -------------------------------------------------------------------------------------------------------
def check_methods(loaded: LoadedClass, instance: Any) -> None:
    """Every method that will be called exists and takes the arguments. Raises `ConfigError`."""
    if not isinstance(instance, Proposer) and not hasattr(instance, "draft"):
        if hasattr(instance, "propose"):
            raise ConfigError(
                f"{loaded.name} has `propose` but does not derive from specflow.proposers.base.Proposer. Derive from "
                "it for propose(context) -> Draft; or offer draft(tokens, max_drafts, request_id) -> list of ids, "
                f"which is called once per request.\n{EXAMPLE}"
            )
        raise ConfigError(
            f"{loaded.name} cannot draft: it has neither draft(tokens, max_drafts, request_id) nor, as a subclass of "
            f"specflow.proposers.base.Proposer, propose(context).\n{EXAMPLE}"
        )
    for name, arguments in _SIGNATURES.items():
        method = getattr(instance, name, None)
        if method is not None:
            _check_method(loaded, name, method, arguments)


def _check_method(loaded: LoadedClass, name: str, method: Any, arguments: tuple[str, ...]) -> None:
    wanted = f"{name}({', '.join(arguments)})"
    if not callable(method):
        raise ConfigError(
            f"{loaded.name}: {name!r} is a {type(method).__name__}, but specflow calls {wanted}. Rename the attribute."
        )
    try:
        signature = inspect.signature(method)
    except ValueError:
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(
            f"{loaded.name}: {name} is called as {wanted}, but it is {name}{signature} ({error}).\n{EXAMPLE}"
        ) from None


def check_requirements(loaded: LoadedClass, found: Any, is_full: bool) -> Requirements:
    """What `requirements()` returned. Raises `ConfigError` for another type, or for what `draft` could not read."""
    if not isinstance(found, Requirements):
        raise ConfigError(
            f"{loaded.name}: requirements() returned {type(found).__name__}. It must return "
            "specflow.proposers.base.Requirements(…), for instance Requirements(host_tokens=True)."
        )
    unreadable = found.taps.layers or found.taps.last_hidden or found.target_kv or found.draft_logits
    if unreadable and not is_full:
        raise ConfigError(
            f"{loaded.name} asks for hidden states, KV pages or draft logits, but draft(tokens, max_drafts, "
            "request_id) receives none. Derive from specflow.proposers.base.Proposer and write propose(context)."
        )
    return found


# -- results -------------------------------------------------------------------------------------------------------
def check_ids(loaded: LoadedClass, found: Any) -> np.ndarray:
    """Ids [n] int64 from what `draft` returned; any integer is let through. Raises `ProposerError` otherwise.

    Integers beyond 64 bits become -1, which the engine drops as it drops every id outside the vocabulary.
    """
    try:
        if found is None or isinstance(found, str | bytes | Mapping | set | frozenset):
            raise TypeError
        ids = np.asarray(found)
        if ids.ndim != 1:
            raise TypeError
        if ids.dtype.kind == "i" or not len(ids):
            return ids.astype(np.int64)
        if ids.dtype.kind == "u" or (ids.dtype.kind == "O" and all(type(one) is int for one in found)):
            return np.array([int(one) if int(one) < 2**63 else -1 for one in ids.tolist()], dtype=np.int64)
    except (TypeError, ValueError):
        pass
    raise ProposerError(
        f"{loaded.name}: draft() returned {_shown(found)}. It must return a flat list (or 1-D array) of integer "
        f"token ids, [] for no draft.\n{EXAMPLE}"
    )


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{type(value).__name__} {text if len(text) <= 80 else text[:77] + '...'}"


def check_draft(loaded: LoadedClass, found: Any, batch_size: int) -> Draft:
    """A `Draft` of the right shapes, counts raised to 0 or more. Raises `ProposerError`."""
    problem = _draft_problem(found, batch_size)
    if problem:
        raise ProposerError(
            f"{loaded.name}: propose() returned {problem}. Expected for these {batch_size} requests: "
            f"Draft(token_ids=int64 tensor [{batch_size}, K], num_drafts=int64 tensor [{batch_size}])."
        )
    return Draft(found.token_ids.to(torch.int64), found.num_drafts.to(torch.int64).clamp(min=0), found.logits)


def _draft_problem(found: Any, batch_size: int) -> str:
    """What is wrong, or nothing."""
    if not isinstance(found, Draft):
        return f"{type(found).__name__}, not a specflow.core.draft.Draft"
    for name, dimensions in (("token_ids", 2), ("num_drafts", 1)):
        value = getattr(found, name)
        if not isinstance(value, torch.Tensor):
            return f"a Draft whose {name} is a {type(value).__name__}"
        if value.is_floating_point() or value.dtype == torch.bool or value.is_complex():
            return f"a Draft whose {name} is {value.dtype}"
        if value.dim() != dimensions or value.shape[0] != batch_size:
            return f"a Draft whose {name} has shape {list(value.shape)}"
    if found.logits is None:
        return ""
    if not isinstance(found.logits, torch.Tensor) or not found.logits.is_floating_point():
        return f"a Draft whose logits are {getattr(found.logits, 'dtype', type(found.logits).__name__)}"
    if found.logits.dim() != 3 or found.logits.shape[:2] != found.token_ids.shape:
        return f"a Draft whose logits have shape {list(found.logits.shape)}"
    return ""


def call(loaded: LoadedClass, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of the user's class; what it raises is reported with the class and the line."""
    try:
        return method(*arguments)
    except Exception as error:
        line = user_line(error)
        raise ProposerError(
            f"{loaded.name}: {method.__name__}() raised {type(error).__name__}: {error}{f' ({line})' if line else ''}."
        ) from error
