"""Plugins: hook specifications, the registry and the built-in components."""

from specflow.plugins.component import Component, Kind
from specflow.plugins.hookspecs import hookimpl

__all__ = ["Component", "Kind", "hookimpl"]
