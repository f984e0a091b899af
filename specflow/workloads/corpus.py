"""Prompts to train a head of the bundled model with: pieces of the corpus that the model itself was trained on."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from specflow.errors import ConfigError
from specflow.workloads.base import Prompt
from specflow.workloads.prompt_list import PromptListWorkload, PromptOptions
from specflow.zoo.bundle import model_folder
from specflow.zoo.corpus import read_documents, standard_library, training_files

__all__ = ["CorpusOptions", "CorpusWorkload"]


@dataclass(kw_only=True)
class CorpusOptions(PromptOptions):
    """Options of `workload=corpus`."""

    num_prompts: int = 2048  # pieces cut from the corpus
    prompt_tokens: int = 64  # tokens of each, as the bundled target counts them
    root: str | None = None  # folder of Python sources; None = the standard library of the running Python

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("num_prompts", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"workload.{name}={getattr(self, name)}: must be 1 or more.")


class CorpusWorkload(PromptListWorkload):
    """Plain text that begins at a random line of a random file, files by their length. Never from a held-out module."""

    name = "corpus"

    def __init__(self, options: CorpusOptions) -> None:
        super().__init__(options)
        self._cut = options

    @property
    def source(self) -> str:
        """The corpus and how it was cut."""
        root = self._cut.root or "the standard library"
        return f"training files of {root}, {self._cut.prompt_tokens} tokens each, seed {self.seed}"

    def read(self) -> list[Prompt]:
        """Cut the prompts. The same options and files give the same ones, and fewer prompts a part of more."""
        documents = read_documents(training_files(standard_library(self._cut.root)))
        texts = [text for text in documents.texts if len(text) > 1]
        if not texts:
            raise ConfigError(f"workload.root={self._cut.root} holds no Python files to cut prompts from.")
        draw = random.Random(self.seed)
        ends = list(accumulate(len(text) for text in texts))
        encode = _encoder()
        prompts: list[Prompt] = []
        for number in range(self._cut.num_prompts):
            text = draw.choices(texts, cum_weights=ends)[0]
            piece = self._piece(text, draw.random())
            ids, offsets = encode(piece)
            end = offsets[min(len(ids), self._cut.prompt_tokens) - 1] if ids else 0
            if piece[:end].strip():
                prompts.append(Prompt(f"corpus-{number}", (piece[:end],), chat=False))
        return prompts

    def _piece(self, text: str, place: float) -> str:
        """Text from the line at a place (0 to 1) of a file on, long enough for the prompt."""
        start = text.rfind("\n", 0, int(place * len(text))) + 1
        return text[start : start + 16 * self._cut.prompt_tokens]


def _encoder() -> Callable[[str], tuple[list[int], list[int]]]:
    """A function from text to token ids and the character at which each ends, of the bundled target's tokenizer."""
    from tokenizers import Tokenizer  # here: listings read no tokenizer

    tokenizer = Tokenizer.from_file(str(model_folder("target") / "tokenizer.json"))

    def encode(text: str) -> tuple[list[int], list[int]]:
        found = tokenizer.encode(text, add_special_tokens=False)
        return found.ids, [end for _, end in found.offsets]

    return encode
