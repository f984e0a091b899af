"""Which token stands for "to be drafted" in a checkpoint that was trained with such a token."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# As published drafters name it, the first that is there counts; a dot leads into a nested mapping.
MASK_KEYS = ("dflash_config.mask_token_id", "mask_token_id", "pard_token", "ptd_token_id")


@dataclass(frozen=True)
class MaskToken:
    """An entry of a config.json."""

    key: str
    value: object  # an id of the vocabulary, if the checkpoint is sound


def find_mask_token(config: Mapping[str, object], keys: Iterable[str] = MASK_KEYS) -> MaskToken | None:
    """The mask token that a config.json names; None when none of the keys has a value."""
    for key in keys:
        value: object = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return MaskToken(key, value)
    return None
