"""Refusing hidden states that cannot be right, before they are kept and trained on."""

from collections.abc import Sequence

import torch

from specflow.errors import SpecflowError

__all__ = ["CaptureError", "check_last_hidden", "check_states"]


class CaptureError(SpecflowError):
    """Captured hidden states are incomplete, or no model makes such values."""


def check_states(request_id: str, states: torch.Tensor, token_ids: torch.Tensor, layers: Sequence[int]) -> None:
    """Raise `CaptureError` for states [T, L, E] of token_ids [T] with NaN, or that do not vary.

    Within a layer the values must differ, and so must the positions when their tokens do.
    """
    for index, layer in enumerate(layers):
        _check(request_id, states[:, index], token_ids, f"of layer {layer}")


def check_last_hidden(request_id: str, states: torch.Tensor, token_ids: torch.Tensor) -> None:
    """The same for states [T, E] after the final norm."""
    _check(request_id, states, token_ids, "after the final norm")


def _check(request_id: str, states: torch.Tensor, token_ids: torch.Tensor, which: str) -> None:
    if not len(token_ids):
        return
    varied = len(token_ids) > 1 and bool((token_ids != token_ids[0]).any())
    problem = _problem(states, varied)
    if problem:
        raise CaptureError(
            f"request {request_id!r}: the hidden states {which} {problem}. Nothing was saved for this "
            "request, and the run stops: data like this trains without an error and drafts nothing. Check the "
            "target's weights and target.dtype (float16 overflows where bfloat16 does not)."
        )


def _problem(states: torch.Tensor, varied: bool) -> str:
    """What is wrong with one layer's states [T, E]; nothing when they are plausible."""
    low, high = states.aminmax()
    if not (torch.isfinite(low) and torch.isfinite(high)):
        position = int((~torch.isfinite(states)).any(1).nonzero()[0])
        return f"hold NaN or infinity (first at position {position} of {len(states)})"
    if low == high:
        return "are all zero" if low == 0 else f"are all {float(low):g}"
    if varied and bool((states == states[0]).all()):
        return "are the same at every position"
    return ""
