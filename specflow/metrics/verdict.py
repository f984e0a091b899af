"""The lossless verdict of a run: was the output the same as plain decoding's?"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["LosslessVerdict", "Status"]

Status = Literal["verified", "verified_up_to_ties", "failed", "not_applicable"]


@dataclass(frozen=True)
class LosslessVerdict:
    """Result of comparing every output with plain decoding by the same engine in the same run.

    first_difference: keys `request`, `position` (index in the output), `expected` and `actual` (token ids, None where
    an output had ended) and `gap` (between the target's two best logits there, None when unknown).
    """

    status: Status
    compared_requests: int = 0
    compared_tokens: int = 0
    first_difference: Mapping[str, Any] | None = None
    reason: str = ""  # why nothing was compared, or more about a failure
    differences: int = 0  # requests whose output differs

    @property
    def passed(self) -> bool:
        """False only for a proven difference."""
        return self.status != "failed"

    def sentence(self) -> str:
        """The verdict in one line."""
        counted = f"{self.compared_requests} requests, {self.compared_tokens} tokens"
        if self.status == "verified":
            return f"lossless: verified ({counted} equal to plain decoding)"
        if self.status == "verified_up_to_ties":
            return f"lossless: verified up to ties of rounding ({counted}; {self._differing()}; {self._difference()})"
        if self.status == "failed":
            return f"lossless: FAILED ({counted}; {self._differing()}; {self._difference()})"
        return f"lossless: not checked ({self.reason or 'nothing to compare'})"

    def _differing(self) -> str:
        count = max(self.differences, 1)
        return f"{count} request{'s' if count > 1 else ''} differ{'' if count > 1 else 's'}"

    def _difference(self) -> str:
        found = self.first_difference
        if not found:
            return self.reason or "no detail"
        gap = found.get("gap")
        text = (
            f"first difference: request {found.get('request')}, output token {found.get('position')}: "
            f"plain {_token(found.get('expected'))}, speculative {_token(found.get('actual'))}, "
            f"top-2 logit gap {'unknown' if gap is None else format(gap, '.3g')}"
        )
        return f"{text}; {self.reason}" if self.reason else text


def _token(token_id: Any) -> str:
    return "ended" if token_id is None else str(token_id)
