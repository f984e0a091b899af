"""What a plugin hands over: a named, lazily loaded component with its options schema."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from typing import Any


class Kind(StrEnum):
    """The kinds of component; each is also a Hydra config group of the same name."""

    TARGET = "target"
    PROPOSER = "proposer"
    SAMPLER = "sampler"
    SCHEDULER = "scheduler"
    BACKEND = "backend"
    ENGINE = "engine"
    WORKLOAD = "workload"
    TASK = "task"
    TRACKING = "tracking"


# Roles, not kinds: no groups of their own, chosen by the name of a proposer.
TRAINABLE_HEAD = "trainable_head"
VLLM_METHOD = "vllm_method"
ROLES = (TRAINABLE_HEAD, VLLM_METHOD)


@dataclass(frozen=True)
class Component:
    """One entry of a registry hook.

    `factory` and `options` are the objects themselves or "module:attribute" strings, which are imported only when
    the component is used: a missing optional package hurts only those who ask for the component.
    The factory is called with one argument, an instance of the options dataclass.
    """

    name: str
    factory: str | Callable[..., Any]
    options: str | type
    summary: str

    def load_factory(self) -> Callable[..., Any]:
        """Import and return the factory."""
        return _resolve(self.factory)

    def load_options(self) -> type:
        """Import and return the options dataclass."""
        return _resolve(self.options)


def _resolve(reference: Any) -> Any:
    if not isinstance(reference, str):
        return reference
    module, _, attribute = reference.partition(":")
    return getattr(import_module(module), attribute)
