"""The registry: every plugin, its components and its listeners, in one object without global state.

pluggy keeps the hooks. Three things it leaves to its host are done here: entry points are loaded one by one, each in
its own error boundary (`specflow.plugins.loading`); a hook that no specification knows is reported; and every hook
implementation is called separately, so that a result or an error can be attributed to its plugin.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from specflow.errors import ConfigError, PluginError
from specflow.plugins import hookspecs
from specflow.plugins.component import ROLES, TRAINABLE_HEAD, VLLM_METHOD, Component, Kind
from specflow.plugins.relay import LifeCycle, call_each
from specflow.plugins.source import Problem, RegisteredComponent, Source
from specflow.plugins.validation import check_hooks
from specflow.words import did_you_mean, valid_names

__all__ = ["COMPONENT_HOOKS", "Problem", "RegisteredComponent", "Registry", "Source", "load_plugins"]

COMPONENT_HOOKS: Mapping[str, Kind | str] = {
    "specflow_targets": Kind.TARGET,
    "specflow_proposers": Kind.PROPOSER,
    "specflow_samplers": Kind.SAMPLER,
    "specflow_schedulers": Kind.SCHEDULER,
    "specflow_backends": Kind.BACKEND,
    "specflow_engines": Kind.ENGINE,
    "specflow_workloads": Kind.WORKLOAD,
    "specflow_tasks": Kind.TASK,
    "specflow_trackers": Kind.TRACKING,
    "specflow_trainable_heads": TRAINABLE_HEAD,
    "specflow_vllm_methods": VLLM_METHOD,
}
_LISTENER = "listener"


@dataclass(frozen=True)
class _Plugin:
    """One registered plugin with what its hooks returned."""

    plugin: Any
    source: Source
    components: tuple[RegisteredComponent, ...]
    config_dirs: tuple[Path, ...]


class Registry:
    """All plugins of one process. Earlier plugins win a name in listings; asking for a name taken twice is an error."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(hookspecs.PROJECT)
        self._manager.add_hookspecs(hookspecs)
        self._plugins: list[_Plugin] = []
        self._listeners: dict[int, Source] = {}
        self._load_problems: list[Problem] = []

    # -- plugins ---------------------------------------------------------------------------------------------------
    def add(self, plugin: Any, source: Source) -> None:
        """Register a plugin and collect its components. What is wrong with it is recorded in `problems`."""
        self._load_problems += check_hooks(self._manager, plugin, source)
        name = f"{source.distribution}:{source.plugin_name}"
        try:
            self._manager.register(plugin, name=name)
        except (pluggy.PluginValidationError, ValueError) as error:
            # pluggy registers hook after hook: what came before the wrong one is taken out again.
            if self._manager.get_plugin(name) is plugin:
                self._manager.unregister(plugin)
            reason = " ".join(str(error).split())
            self._load_problems.append(Problem(source, f"cannot be registered: {reason}", failed=True))
            return
        components = tuple(self._collect_components(plugin, source))
        self._plugins.append(_Plugin(plugin, source, components, tuple(self._collect_dirs(plugin, source))))

    def remove(self, plugin: Any) -> None:
        """Take a plugin out again, with its components and problems."""
        for entry in [entry for entry in self._plugins if entry.plugin is plugin]:
            self._plugins.remove(entry)
            self._load_problems = [problem for problem in self._load_problems if problem.source != entry.source]
        if self._manager.is_registered(plugin):
            self._manager.unregister(plugin)

    @contextmanager
    def temporary(self, plugin: Any, source: Source | None = None) -> Iterator["Registry"]:
        """Register a throw-away plugin for the length of a `with` block."""
        self.add(plugin, source or Source(type(plugin).__name__, "throw-away", "0"))
        try:
            yield self
        finally:
            self.remove(plugin)

    def record(self, problem: Problem) -> None:
        """Note a problem found outside of a plugin's hooks, for instance an entry point that fails to import."""
        self._load_problems.append(problem)

    def _collect_components(self, plugin: Any, source: Source) -> Iterator[RegisteredComponent]:
        for hook, kind in COMPONENT_HOOKS.items():
            for item in self._items(plugin, hook, source):
                if isinstance(item, Component):
                    yield RegisteredComponent(kind, item, source)
                else:
                    message = f"{hook} returned {item!r}, which is no specflow.plugins.Component."
                    self._load_problems.append(Problem(source, message, failed=True))

    def _collect_dirs(self, plugin: Any, source: Source) -> Iterator[Path]:
        for item in self._items(plugin, "specflow_config_dirs", source):
            folder = Path(item) if isinstance(item, str | Path) else None
            if folder is not None and folder.is_dir():
                yield folder.resolve()
            else:
                message = f"specflow_config_dirs names {item}, which is no folder: its configuration is not found."
                self._load_problems.append(Problem(source, message, failed=True))

    def _items(self, plugin: Any, hook: str, source: Source) -> list[Any]:
        """What one hook of one plugin returns; a hook that raises is a recorded problem."""
        try:
            return [item for result in call_each(self._manager, hook, {}, only=plugin) for item in result or ()]
        except Exception as error:
            message = f"{hook} failed: {type(error).__name__}: {error}"
            self._load_problems.append(Problem(source, message, failed=True))
            return []

    # -- components ------------------------------------------------------------------------------------------------
    def components(self, kind: Kind | str) -> dict[str, RegisteredComponent]:
        """All components of a kind by name, built-in ones first. Names taken twice are listed in `problems`."""
        found: dict[str, RegisteredComponent] = {}
        for item in self._of_kind(_known(kind)):
            found.setdefault(item.component.name, item)
        return found

    def get(self, kind: Kind | str, name: str) -> RegisteredComponent:
        """The component of that name. Raises `ConfigError` if unknown and `PluginError` if two plugins claim it."""
        kind = _known(kind)
        matches = [item for item in self._of_kind(kind) if item.component.name == name]
        if len(matches) > 1:
            raise PluginError(_clash(matches))
        if matches:
            return matches[0]
        names = self.components(kind)
        text = f"{kind}={name}: there is no {kind} of this name.{did_you_mean(name, names)}"
        raise ConfigError("\n".join([f"{text} Valid: {valid_names(name, names)}.", *self.remedies(name)]))

    def _of_kind(self, kind: Kind | str) -> list[RegisteredComponent]:
        return [item for entry in self._plugins for item in entry.components if item.kind is kind]

    # -- configuration and problems --------------------------------------------------------------------------------
    def config_dirs(self) -> list[Path]:
        """Folders with configuration groups, the built-in tree first."""
        return list(dict.fromkeys(folder for entry in self._plugins for folder in entry.config_dirs))

    def sources(self) -> list[Source]:
        """Every plugin that was registered."""
        return [entry.source for entry in self._plugins]

    def packages(self) -> list[tuple[str, Source]]:
        """Top-level Python packages that hold a plugin's hooks or components, with the plugin."""
        found: dict[str, Source] = {}
        for entry in self._plugins:
            modules = [_module_of(entry.plugin), *(_module_of(item.component.factory) for item in entry.components)]
            for module in modules:
                found.setdefault(module.partition(".")[0], entry.source)
        return list(found.items())

    def hooks_of(self, source: Source) -> list[str]:
        """Names of the hooks that a plugin implements."""
        plugins = [entry.plugin for entry in self._plugins if entry.source == source]
        callers = (caller for plugin in plugins for caller in self._manager.get_hookcallers(plugin) or ())
        return sorted({caller.name for caller in callers})

    @property
    def problems(self) -> list[Problem]:
        """Everything wrong with the installed plugins, name clashes included."""
        return [*self._load_problems, *self._clashes()]

    def remedies(self, name: str) -> list[str]:
        """What to do about a name that no plugin provides: one sentence per plugin that failed; where none did, the
        package that would bring it by the usual naming, that of `task=new-plugin`."""
        failed = [problem for problem in self._load_problems if problem.failed]
        if failed or not name.isidentifier():
            return [f"A plugin that may provide it failed: {problem}" for problem in failed]
        package = f"specflow-{name.lower().replace('_', '-')}"
        return [f"A part from a package of its own needs that package, usually: pip install {package}"]

    def _clashes(self) -> list[Problem]:
        taken: dict[tuple[str, str], list[RegisteredComponent]] = {}
        for entry in self._plugins:
            for item in entry.components:
                taken.setdefault((item.kind, item.component.name), []).append(item)
        return [Problem(items[-1].source, _clash(items), failed=True) for items in taken.values() if len(items) > 1]

    # -- life cycle ------------------------------------------------------------------------------------------------
    @property
    def hooks(self) -> LifeCycle:
        """Calls of the life-cycle hooks: `hooks.specflow_step_finished(record=…)`."""
        return LifeCycle(self._manager, self._source_of)

    def register_listener(self, listener: Any, owner: RegisteredComponent | None = None) -> None:
        """Let an object with life-cycle hooks listen until `unregister_listener`.

        owner: the component it was built from, named when a hook of it raises.
        Raises `PluginError` for a hook that does not exist or asks for an unknown argument.
        """
        source = owner.source if owner else Source(type(listener).__name__, "specflow", "built-in")
        problems = check_hooks(self._manager, listener, source)
        if problems:
            raise PluginError("\n".join(map(str, problems)))
        self._listeners[id(listener)] = source
        try:
            self._manager.register(listener, name=f"{_LISTENER}:{source.plugin_name}:{id(listener)}")
        except (pluggy.PluginValidationError, ValueError) as error:
            self.unregister_listener(listener)
            raise PluginError(f"plugin {source}: {' '.join(str(error).split())}") from error

    def unregister_listener(self, listener: Any) -> None:
        """Stop listening; harmless when the object does not listen."""
        self._listeners.pop(id(listener), None)
        if self._manager.is_registered(listener):
            self._manager.unregister(listener)

    @contextmanager
    def listeners_set_aside(self) -> Iterator[list[Any]]:
        """For runs within a run, which have listeners of their own: those of now hear nothing inside the block.

        Yields them, in the order of their registration.
        """
        named = self._manager.list_name_plugin()
        aside = [(plugin, name) for name, plugin in named if plugin is not None and id(plugin) in self._listeners]
        for plugin, _ in aside:
            self._manager.unregister(plugin)
        try:
            yield [plugin for plugin, _ in aside]
        finally:
            for plugin, name in aside:
                self._manager.register(plugin, name=name)

    def _source_of(self, plugin: Any) -> Source:
        known = {id(entry.plugin): entry.source for entry in self._plugins} | self._listeners
        return known.get(id(plugin), Source(repr(plugin), "unknown", "unknown"))


def _known(kind: Kind | str) -> Kind | str:
    """The kind, or the role beside the kinds. ValueError for any other word."""
    return kind if kind in ROLES else Kind(kind)


def _module_of(thing: Any) -> str:
    """The module of a plugin (a module or an object) or of a component's factory ("module:attribute" or the object)."""
    if isinstance(thing, str):
        return thing.partition(":")[0]
    if isinstance(thing, ModuleType):
        return thing.__name__
    return str(getattr(thing, "__module__", None) or type(thing).__module__)


def _clash(items: list[RegisteredComponent]) -> str:
    first = items[0]
    owners = " and ".join(str(item.source) for item in items)
    return f"{first.kind}={first.component.name} is registered by {owners}: rename or uninstall one of them."


def load_plugins(strict: bool = False, only: str | None = None) -> Registry:
    """A registry with the built-in components and every installed plugin; see `specflow.plugins.loading`."""
    from specflow.plugins.loading import fill_registry  # it imports this module

    return fill_registry(Registry(), strict=strict, only=only)
