"""Contract of a workload: the prompts of a run."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prompt:
    """One conversation: the user's turns in order; each later turn follows the target's own answer."""

    id: str
    turns: tuple[str, ...]
    chat: bool  # render with the tokenizer's chat template; False = plain text, one turn
    category: str = ""
    token_ids: tuple[int, ...] = ()  # the only turn as ids, which go to the engine instead of the text
    max_tokens: int | None = None  # most tokens of the answer; None = as the sampling options say
    ignore_eos: bool = False  # an answer goes on past the end of text; False = as the sampling options say


class Workload(ABC):
    """A set of prompts with its limits, order and arrival times."""

    name: str = "workload"
    request_rate: float | None  # requests per second (Poisson arrivals); None = all at once
    seed: int

    @abstractmethod
    def load(self) -> Sequence[Prompt]:
        """Read, shuffle and cut the prompts. Raises `PromptError` (with file and line) or `ConfigError`."""

    def describe(self) -> dict[str, str]:
        """Source, number of prompts and data hash; shown in the report."""
        return {}
