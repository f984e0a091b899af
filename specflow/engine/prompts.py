"""From what a user writes to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from specflow.errors import PromptError

PromptLike = str | Sequence[int] | Sequence[Mapping[str, str]]


def encode_prompt(tokenizer: Any, prompt: PromptLike, vocab_size: int) -> list[int]:
    """Token ids of plain text, of a list of chat messages (`role`, `content`), or of ids given as they are.

    Chat messages are rendered with the tokenizer's own template, which brings its special tokens itself: none is added
    a second time. Raises `PromptError` for an empty prompt, a missing template or an id outside the vocabulary.
    """
    if isinstance(prompt, str):
        ids = list(tokenizer(prompt)["input_ids"]) if prompt else []
    elif len(prompt) and isinstance(prompt[0], Mapping):
        ids = _encode_chat(tokenizer, prompt)
    else:
        ids = [int(token_id) for token_id in prompt]  # type: ignore[arg-type]
    if not ids:
        raise PromptError("the prompt is empty: there is nothing to continue. Give at least one token of text.")
    wrong = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if wrong:
        raise PromptError(f"prompt token id {wrong[0]} is outside the target's vocabulary of {vocab_size} ids.")
    return ids


def _encode_chat(tokenizer: Any, messages: Any) -> list[int]:
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError(
            "chat messages were given, but the target's tokenizer has no chat template. "
            "Give plain text, or a target whose tokenizer has one."
        )
    text = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def bad_word_ids(tokenizer: Any, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Token sequences of each word as it stands alone and as it stands after a space, as vLLM encodes them."""
    found: list[tuple[int, ...]] = []
    for word in words:
        bare = tuple(tokenizer(word.lstrip(), add_special_tokens=False)["input_ids"])
        spaced = tuple(tokenizer(" " + word.lstrip(), add_special_tokens=False)["input_ids"])
        for ids in (bare, spaced):
            if ids and ids not in found:
                found.append(ids)
    return tuple(found)
