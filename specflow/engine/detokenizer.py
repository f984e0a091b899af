"""Text of a growing token sequence, one token at a time."""

from collections.abc import Callable, Sequence
from typing import Any

from specflow.core.sampling_params import SamplingParams

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns ids into text as they come; a character that is still incomplete is held back.

    Each new piece is the difference of two decodes over a short window of ids, since a tokenizer may write a token
    differently after another one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._decode = _decoder(tokenizer)
        self._ids: list[int] = []
        self._window_start = 0  # ids before it no longer influence the text
        self._written = 0  # ids whose text has been written
        self.text = ""
        self._searched = 0  # characters in which no stop string begins
        self._released = 0  # characters handed out by `release`
        self.stopped = False

    def add(self, token_id: int) -> None:
        """Append one id and whatever text it completes."""
        self._ids.append(token_id)
        before = self._decode(self._ids[self._window_start : self._written])
        after = self._decode(self._ids[self._window_start :])
        if len(after) > len(before) and not after.endswith(_REPLACEMENT):
            self._write(after[len(before) :])

    def finish(self) -> None:
        """Write what is held back, also when its last character never became complete."""
        if not self.stopped and self._written < len(self._ids):
            before = self._decode(self._ids[self._window_start : self._written])
            after = self._decode(self._ids[self._window_start :])
            self._write(after[len(before) :])

    def _write(self, piece: str) -> None:
        self.text += piece
        self._window_start, self._written = self._written, len(self._ids)

    def cut_at_stop(self, sampling: SamplingParams) -> bool:
        """Cut the text at the stop string that ends first; True when there is one."""
        starts = [(self.text.find(stop, self._searched), stop) for stop in sampling.stop]
        found = [(start + len(stop), stop) for start, stop in starts if start >= 0]
        longest = max(len(stop) for stop in sampling.stop)
        if not found:
            self._searched = max(0, len(self.text) - longest + 1)
            return False
        end, stop = min(found)
        self.text = self.text[: end if sampling.include_stop_str_in_output else end - len(stop)]
        self.stopped = True
        return True

    def release(self, hold_back: int) -> str:
        """Text not handed out yet, except the last `hold_back` characters, which a stop string may still take away."""
        end = max(self._released, len(self.text) - hold_back)
        piece = self.text[self._released : end]
        self._released = end
        return piece


def detokenize(tokenizer: Any, token_ids: Sequence[int]) -> str:
    """The text of a finished sequence, equal to what streaming it would have given."""
    detokenizer = Detokenizer(tokenizer)
    for token_id in token_ids:
        detokenizer.add(token_id)
    detokenizer.finish()
    return detokenizer.text


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Decode without special tokens; straight to the Rust tokenizer where there is one, which is ten times faster."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: backend.decode(ids, skip_special_tokens=True)
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
