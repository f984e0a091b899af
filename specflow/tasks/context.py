"""The context that the runner really hands to a task."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from specflow.tasks.base import TaskContext

if TYPE_CHECKING:
    from specflow.plugins.registry import Registry

__all__ = ["RegistryContext"]


@dataclass(frozen=True)
class RegistryContext(TaskContext):
    """A task context with the registry, for tasks that are about the plugins themselves."""

    registry: "Registry"
