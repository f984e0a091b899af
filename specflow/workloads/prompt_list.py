"""What all built-in workloads share: limits, order, arrival rate and the hash of the prompts used."""

import hashlib
import json
import random
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

from specflow.errors import ConfigError, PromptError
from specflow.workloads.base import Prompt, Workload

__all__ = ["PromptListWorkload", "PromptOptions", "fit_template", "hash_of"]


@dataclass(kw_only=True)
class PromptOptions:
    """Options of every built-in workload."""

    limit: int | None = None  # number of prompts; None = all
    shuffle: bool = False  # random order, before the limit cuts
    seed: int = 0  # of the random order and of arrival times
    request_rate: float | None = None  # requests per second (Poisson arrivals); None = all at once

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"workload.limit={self.limit}: must be 1 or more, or null for all prompts.")
        if self.request_rate is not None and not self.request_rate > 0:
            raise ConfigError(
                f"workload.request_rate={self.request_rate}: must be above 0 per second, or null for all at once."
            )


class PromptListWorkload(Workload):
    """A workload that reads a list of prompts once. Subclasses say how, and from where."""

    #: True: prompts are conversations only if the tokenizer has a chat template; see `fit_template`.
    template_optional: bool = False

    def __init__(self, options: PromptOptions) -> None:
        self.options = options
        self.request_rate = options.request_rate
        self.seed = options.seed
        self._available = 0
        self._prompts: list[Prompt] | None = None

    @abstractmethod
    def read(self) -> list[Prompt]:
        """All prompts in the order of their source. Raises `PromptError` or `ConfigError`."""

    @property
    @abstractmethod
    def source(self) -> str:
        """Where the prompts come from, for people."""

    def load(self) -> Sequence[Prompt]:
        """Read once, then shuffle and cut. Zero prompts are a `PromptError`: nothing would be measured."""
        if self._prompts is None:
            prompts = with_unique_ids(self.read())
            if not prompts:
                raise PromptError(f"{self.source} holds no prompt, so there is nothing to run.")
            self._available = len(prompts)
            if self.options.shuffle:
                random.Random(self.options.seed).shuffle(prompts)
            self._prompts = prompts[: self.options.limit]
        return self._prompts

    def describe(self) -> dict[str, str]:
        """Source, counts, order and the SHA-256 of the prompts in the order they are used."""
        prompts = self.load()
        order = f"shuffled with seed {self.seed}" if self.options.shuffle else "as stored"
        facts = {
            "workload": self.name,
            "source": self.source,
            "prompts": f"{len(prompts)} of {self._available}",
            "turns": str(sum(len(prompt.turns) for prompt in prompts)),
            "order": order,
            "arrivals": f"{self.request_rate:g} per second, seed {self.seed}" if self.request_rate else "all at once",
            "sha256": hash_of(prompts),
        }
        return facts


def hash_of(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of the texts: two runs with the same hash had the same prompts in the same order."""
    texts = [[*prompt.turns] for prompt in prompts]
    return hashlib.sha256(json.dumps(texts, ensure_ascii=False).encode()).hexdigest()


def with_unique_ids(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The same prompts; an id that occurred before gets a number behind it."""
    seen: set[str] = set()
    result = []
    for prompt in prompts:
        name, number = prompt.id, 1
        while name in seen:
            number += 1
            name = f"{prompt.id}#{number}"
        seen.add(name)
        result.append(replace(prompt, id=name))
    return result


def fit_template(workload: Workload, prompts: Sequence[Prompt], has_template: bool) -> tuple[list[Prompt], str | None]:
    """The prompts as a tokenizer with or without a chat template can take them, and a note for the report.

    Without a template, a workload that does not insist on one gives plain text: the first turn of each conversation,
    because nothing tells such a model where an answer ends and the next turn begins.
    """
    if has_template or not getattr(workload, "template_optional", False) or not any(one.chat for one in prompts):
        return list(prompts), None
    plain = [replace(prompt, turns=prompt.turns[:1], chat=False) if prompt.chat else prompt for prompt in prompts]
    dropped = sum(len(prompt.turns) - 1 for prompt in prompts if prompt.chat)
    note = "the tokenizer has no chat template: prompts are plain text"
    return plain, f"{note}, {dropped} later turns are left out" if dropped else note
