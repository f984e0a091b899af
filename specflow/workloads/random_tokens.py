"""Prompts of random token ids, as vLLM's random dataset has them: for measurements in which no text matters."""

import random
from dataclasses import dataclass

from specflow.errors import ConfigError
from specflow.workloads.base import Prompt
from specflow.workloads.prompt_list import PromptListWorkload, PromptOptions

__all__ = ["RandomOptions", "RandomWorkload"]


@dataclass(kw_only=True)
class RandomOptions(PromptOptions):
    """Options of `workload=random`."""

    num_prompts: int = 8  # prompts made
    input_len: int = 256  # tokens of each prompt
    output_len: int = 128  # most tokens of each answer; goes before sampling.max_tokens in task=bench
    vocab_size: int = 1000  # ids are drawn below this number, which may not exceed the target's vocabulary
    ignore_eos: bool = True  # True = every answer has output_len tokens

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_prompts", "input_len", "output_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"workload.{name}={getattr(self, name)}: must be 1 or more.")


class RandomWorkload(PromptListWorkload):
    """Every prompt has the same number of ids, each drawn evenly from all below `vocab_size`; the same for a seed."""

    name = "random"

    def __init__(self, options: RandomOptions) -> None:
        super().__init__(options)
        self._sizes = options

    @property
    def source(self) -> str:
        """Sizes and seed."""
        sizes = self._sizes
        return f"{sizes.input_len} random ids below {sizes.vocab_size}, seed {sizes.seed}"

    def read(self) -> list[Prompt]:
        """All prompts. A prompt's text is its ids, for hashes and for people."""
        sizes, numbers = self._sizes, random.Random(self._sizes.seed)
        prompts = []
        for index in range(sizes.num_prompts):
            ids = tuple(numbers.randrange(sizes.vocab_size) for _ in range(sizes.input_len))
            prompts.append(
                Prompt(
                    f"random-{index}",
                    (" ".join(map(str, ids)),),
                    chat=False,
                    token_ids=ids,
                    max_tokens=sizes.output_len,
                    ignore_eos=sizes.ignore_eos,
                )
            )
        return prompts
