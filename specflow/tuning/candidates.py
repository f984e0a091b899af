"""The methods that may be tried, and the compositions that try them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from specflow.errors import ConfigError
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry
from specflow.tuning.options import TuneOptions

__all__ = ["Composition", "chosen_methods"]

_LENGTH = "num_speculative_tokens"


@dataclass(frozen=True)
class Composition:
    """The composition of the run, from which those of other runs are made."""

    config: Mapping[str, Any]
    options: TuneOptions

    def proposer(self, method: str, length: int) -> dict[str, Any]:
        """Node of a method at a K: the composition's own options where it names the method, and those of the task."""
        own = self.config.get(Kind.PROPOSER) or {}
        given = dict(own) if own.get("name") == method else {}
        return given | dict(self.options.options.get(method, {})) | {"name": method, _LENGTH: length}

    def with_method(self, method: str, length: int) -> dict[str, Any]:
        """The composition with a method, or with none (K = 0), to be benchmarked."""
        node = self.proposer(method, length) if length else None
        return {**self.config, str(Kind.PROPOSER): node, str(Kind.TASK): {"name": "bench"}}

    def bench(self, method: str, length: int, batch_size: int, parent_run_id: str | None) -> dict[str, Any]:
        """The composition of a finalist's own run."""
        options = self.options
        tracking = dict(self.config[Kind.TRACKING])
        if parent_run_id is not None and "parent_run_id" in tracking:
            tracking |= {"parent_run_id": parent_run_id, "run_name": None}
        task = {
            "name": "bench",
            "batch_sizes": [batch_size],
            "repeats": options.repeats,
            "warmup_requests": options.warmup_requests,
            "require_lossless": options.require_lossless,
            "cost_curve": False,
        }
        return self.with_method(method, length) | {str(Kind.TASK): task, str(Kind.TRACKING): tracking}


def chosen_methods(
    config: Mapping[str, Any], options: TuneOptions, registry: Registry
) -> tuple[list[str], dict[str, str]]:
    """Methods to try, and those that cannot be, with the reason.

    Methods named by the user have to exist and to have an option for the length: raises `ConfigError`. Of all others
    those are left out that lack something which only the user can give.
    """
    composition = Composition(config, options)
    known = registry.components(Kind.PROPOSER)
    own = (config.get(Kind.PROPOSER) or {}).get("name")
    for name in [*(options.methods or ()), *options.options]:
        registry.get(Kind.PROPOSER, name)
    names: Sequence[str] = options.methods or [*known]
    if own is not None and own not in names:
        names = [own, *names]
    usable, reasons = [], {}
    for name in names:
        try:
            _check(composition, name, registry)
            usable.append(name)
        except ConfigError as error:
            if options.methods is not None or name == own:
                raise ConfigError(f"task.methods: {name}: {error}") from None
            reasons[name] = str(error).splitlines()[0]
    return usable, reasons


def _check(composition: Composition, name: str, registry: Registry) -> None:
    component = registry.get(Kind.PROPOSER, name)
    schema = component.component.load_options()
    if _LENGTH not in {field.name for field in fields(schema)}:
        raise ConfigError(f"proposer={name} has no option {_LENGTH}, so there is nothing to tune.")
    component.check(composition.proposer(name, max(composition.options.num_speculative_tokens)))
