"""A tokenizer for models that have none: a token's text is its number."""

from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def stand_in_tokenizer(vocab_size: int) -> Any:
    """Ids 0 to vocab_size - 1 written as numbers with spaces between; any other word is read as id 0."""
    words = {str(index): index for index in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)
