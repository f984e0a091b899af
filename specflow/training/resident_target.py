"""One target in memory for everything a training run does with it."""

from typing import TYPE_CHECKING, Any

from specflow.core.batch import PackedBatch, TargetOutput
from specflow.core.limits import EngineLimits
from specflow.errors import UnsupportedModelError
from specflow.targets.base import Taps, Target, TokenTables

if TYPE_CHECKING:
    from specflow.backends.base import Backend

__all__ = ["ResidentTarget"]


class ResidentTarget(Target):
    """A target that is loaded once, whichever engines are built around it; everything else is the inner target's."""

    def __init__(self, inner: Target) -> None:
        self._inner = inner
        self._loaded = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load(self, backend: "Backend") -> None:
        """See `Target.load`; the second time nothing happens.

        Raises `UnsupportedModelError` for a target that is no transformers model: its hidden states are computed by
        transformers.
        """
        if self._loaded:
            return
        self._inner.load(backend)
        model = getattr(self._inner, "model", None)
        if model is None:
            raise UnsupportedModelError(
                f"task=train reads the hidden states of a transformers model, and target {self.facts.name} is none. "
                "Use target=hf or target=bundled."
            )
        model.requires_grad_(False)
        self._loaded = True

    def attach(self, limits: EngineLimits, taps: Taps) -> None:
        """See `Target.attach`."""
        self._inner.attach(limits, taps)

    def release(self) -> None:
        """Drop the pages and hooks of the last engine."""
        self._inner.detach()  # type: ignore[attr-defined]

    def forward(self, batch: PackedBatch) -> TargetOutput:
        """See `Target.forward`."""
        return self._inner.forward(batch)

    def token_tables(self) -> TokenTables:
        """See `Target.token_tables`."""
        return self._inner.token_tables()

    def describe(self) -> dict[str, str]:
        """See `Target.describe`."""
        return self._inner.describe()
