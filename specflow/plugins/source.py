"""Where a plugin comes from, and what went wrong with one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from specflow.errors import PluginError, SpecflowError
from specflow.options import build_options
from specflow.plugins.component import Component, Kind

__all__ = ["Problem", "RegisteredComponent", "Source"]


@dataclass(frozen=True)
class Source:
    """The plugin (entry-point name) and the installed distribution it belongs to."""

    plugin_name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.plugin_name} ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Problem:
    """Something wrong with a plugin that must not pass in silence."""

    source: Source
    message: str
    failed: bool  # True: the plugin, or a part of it, is not available

    def __str__(self) -> str:
        return f"plugin {self.source}: {self.message}"


@dataclass(frozen=True)
class RegisteredComponent:
    """A component and the plugin that registered it. Nothing is imported before it is needed."""

    kind: Kind | str  # or one of `ROLES`
    component: Component
    source: Source

    @property
    def plugin_name(self) -> str:
        """Entry-point name of the plugin."""
        return self.source.plugin_name

    @property
    def distribution(self) -> str:
        """Installed distribution of the plugin."""
        return self.source.distribution

    @property
    def version(self) -> str:
        """Version of that distribution."""
        return self.source.version

    def load_factory(self) -> Callable[..., Any]:
        """Import the factory; raises `PluginError` with the original error, for instance a missing package."""
        return self._import(self.component.load_factory)

    def load_options(self) -> type:
        """Import the options dataclass; raises `PluginError` likewise."""
        return self._import(self.component.load_options)

    def check(self, values: Mapping[str, Any], where: str | None = None) -> Any:
        """The options made from a configuration node; raises `ConfigError` (see `specflow.options`).

        where: path of the node when it is not the one of the kind.
        """
        schema = self.load_options()
        return self._named("cannot check its options", lambda: build_options(schema, values, where or str(self.kind)))

    def build(self, values: Mapping[str, Any]) -> Any:
        """The component itself, with the options checked first."""
        options = self.check(values)
        return self.load_factory()(options)

    def _import(self, load: Callable[[], Any]) -> Any:
        return self._named("cannot be imported", load)

    def _named(self, what: str, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except SpecflowError:
            raise
        except Exception as error:
            raise PluginError(
                f"{self.kind}={self.component.name} of plugin {self.source} {what}: {type(error).__name__}: {error}"
            ) from error
