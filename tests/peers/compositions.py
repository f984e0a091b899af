"""Compositions as the command line makes them."""

from typing import Any

from specflow.composition import composer, plain_config
from specflow.plugins.registry import Registry, load_plugins


def compose(*words: str) -> tuple[dict[str, Any], Registry]:
    """The configuration of these overrides, and the built-in components."""
    registry = load_plugins(only="")
    with composer(registry) as found:
        return plain_config(found.compose(list(words))), registry
