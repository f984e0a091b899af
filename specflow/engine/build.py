"""From a composition to an engine."""

from collections.abc import Callable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

from specflow.engine.engine import Engine
from specflow.errors import ConfigError
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry, load_plugins

_DEFAULTS = {
    Kind.TARGET: "bundled",
    Kind.SAMPLER: "standard",
    Kind.SCHEDULER: "continuous",
    Kind.BACKEND: "auto",
}


def assemble(build: Callable[[Kind], Any]) -> Engine:
    """An engine of the components that `build` makes; the proposer may be None."""
    return Engine(
        build(Kind.TARGET), build(Kind.PROPOSER), build(Kind.SAMPLER), build(Kind.SCHEDULER), build(Kind.BACKEND)
    )


def build_engine(config: Mapping[str, Any] | DictConfig, registry: Registry | None = None) -> Engine:
    """Check all options of a composition, then build its engine; see `Engine.from_config`.

    Raises `ConfigError` for unknown groups and options before any weight is read.
    """
    plain = OmegaConf.to_container(config, resolve=True) if isinstance(config, DictConfig) else dict(config)
    assert isinstance(plain, dict)
    registry = registry or load_plugins()
    nodes: dict[Kind, Mapping[str, Any]] = {kind: {"name": name} for kind, name in _DEFAULTS.items()}
    for key, node in plain.items():
        if key in set(Kind) and node is not None:
            nodes[Kind(str(key))] = _with_name(Kind(str(key)), node)
        elif key not in set(Kind) and not isinstance(config, DictConfig):
            raise ConfigError(f"{key!r} is no part of an engine. Valid: {', '.join(_DEFAULTS)}, {Kind.PROPOSER}.")
    components = {
        kind: registry.get(kind, str(nodes[kind]["name"])) for kind in [*_DEFAULTS, Kind.PROPOSER] if kind in nodes
    }
    for kind, component in components.items():
        component.check(nodes[kind])
    return assemble(lambda kind: components[kind].build(nodes[kind]) if kind in components else None)


def _with_name(kind: Kind, node: Any) -> Mapping[str, Any]:
    """A node may be just the component's name; without a name it changes options of the default component."""
    if isinstance(node, str):
        return {"name": node}
    if "name" not in node and kind not in _DEFAULTS:
        raise ConfigError(f"{kind} has no name: write {{'{kind}': {{'name': …}}}}.")
    return {"name": _DEFAULTS.get(kind), **node}
