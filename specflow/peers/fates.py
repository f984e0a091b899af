"""What becomes of every option of a composition in another engine."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specflow.options import show

__all__ = ["Fate", "OptionFate", "OptionFates"]

Fate = Literal["mapped", "left out", "differs", "impossible"]


@dataclass(frozen=True)
class OptionFate:
    """One option.

    mapped: it means the same there. left out: it only says how specflow itself computes. differs: the other engine
    does something else, which keeps the output. impossible: the other engine cannot do it.
    """

    option: str  # e.g. "sampler.kernels"
    value: str
    fate: Fate
    text: str  # where it went, or why it has no counterpart

    def sentence(self) -> str:
        """The option and what becomes of it, in a line."""
        return f"{self.option}={self.value}: {self.text}"


@dataclass
class OptionFates:
    """Fates in the order in which they are decided; a group's options must all be given one."""

    every: list[OptionFate] = field(default_factory=list)

    def add(self, option: str, value: Any, fate: Fate, text: str) -> None:
        """Decide one option."""
        self.every.append(OptionFate(option, show(value), fate, text))

    def leave_out(self, group: str, options: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """Leave out the named options of a group, each for its reason."""
        for name, reason in names.items():
            if name in options:
                self.add(f"{group}.{name}", options[name], "left out", reason)

    def of(self, *fates: Fate) -> list[OptionFate]:
        """Those of the given fates."""
        return [one for one in self.every if one.fate in fates]

    def undecided(self, group: str, options: Iterable[str]) -> list[str]:
        """Options of a group that nothing was said about: full names."""
        said = {one.option for one in self.every}
        return [name for name in (f"{group}.{key}" for key in options) if name not in said]
