"""Vocabularies of target and drafter: do both mean the same by every id, and what if the drafter says only some?"""

from typing import Any

import torch

from specflow.errors import ConfigError


def over_all_ids(logits: torch.Tensor, ids: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Logits [..., Vd] of a drafter that says only `ids` [Vd] int64, over the target's vocabulary, [..., V].

    Ids that it cannot say get -inf.
    """
    whole = logits.new_full((*logits.shape[:-1], vocab_size), float("-inf"))
    return whole.index_copy_(-1, ids, logits)


def check_same_vocabulary(
    target_tokenizer: Any, target_name: str, target_size: int, draft_tokenizer: Any, draft_name: str, draft_size: int
) -> None:
    """Raise `ConfigError` unless the ordinary tokens of both tokenizers are the same under the same ids.

    Added tokens (chat marks and the like) may be present on one side only, but none may stand for different text.
    The sizes are those of the models' logits, for the message: padding makes them differ for one tokenizer.
    """
    target, draft = target_tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    difference = _first_difference(target, draft, target_tokenizer.get_added_vocab(), draft_tokenizer.get_added_vocab())
    if difference is None:
        return
    raise ConfigError(
        f"the draft model's tokenizer is not the target's: {difference}. "
        f"Target {target_name}: {_kind(target_tokenizer)}, {len(target)} tokens, {target_size} logits; "
        f"draft {draft_name}: {_kind(draft_tokenizer)}, {len(draft)} tokens, {draft_size} logits. "
        "Drafts are token ids, so both must share one vocabulary: choose a draft model of the same family."
    )


def _first_difference(
    target: dict[str, int], draft: dict[str, int], target_added: dict[str, int], draft_added: dict[str, int]
) -> str | None:
    """The lowest id that both know by different names, or the lowest ordinary token that one of them lacks."""
    if target == draft:
        return None
    names = {index: token for token, index in target.items()}
    clashing = [(index, token) for token, index in draft.items() if names.get(index, token) != token]
    if clashing:
        index, token = min(clashing)
        return f"id {index} is {names[index]!r} for the target and {token!r} for the draft"
    added = target_added.keys() | draft_added.keys()
    for mine, other, owner in ((target, draft, "target"), (draft, target, "draft")):
        only = [(index, token) for token, index in mine.items() if token not in other and token not in added]
        if only:
            index, token = min(only)
            return f"only the {owner} has {token!r} (id {index})"
    return None


def _kind(tokenizer: Any) -> str:
    return type(tokenizer).__name__
