"""Looking at hidden states before the first optimiser step.

Data that is wrong in these ways trains without an error and gives a head that drafts nothing: states that were never
written, of another layer, shifted by a row, or of another model. Every refusal names the response it was found at.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specflow.capture.checks import CaptureError, check_last_hidden, check_states
from specflow.targets import transformers_facts as facts
from specflow.targets.base import Taps, TokenTables
from specflow.training.documents import Document
from specflow.training.hidden_provider import States, own_forward

__all__ = ["check_predictions", "check_sample", "check_shapes", "check_source"]

# Greedy text agrees with the argmax of the same model but for ties: 2 to 3 % in bfloat16.
_LEAST_AGREEMENT = 0.8
_LEAST_LABELS = 16  # fewer say nothing about a share
# Sampled tokens have on average the probability sum p^2 under the law they were drawn from.
_LEAST_OF_EXPECTED = 0.5
_ROWS = 64  # of a document that is compared with the target itself


def check_sample(
    documents: Sequence[Document], found: Sequence[States], taps: Taps, tables: TokenTables, model: Any
) -> None:
    """Every check below for each document. Raises `CaptureError` naming the first that fails."""
    for document, states in zip(documents, found, strict=True):
        check_shapes(document, states, taps)
        if states.last_hidden is not None:
            check_predictions(document, states.last_hidden, tables)
        check_source(document, states, taps, model)


def check_shapes(document: Document, states: States, taps: Taps) -> None:
    """One row per token and one slot per layer; finite values that vary."""
    expected = (len(document), len(taps.layers))
    if tuple(states.hidden.shape[:2]) != expected:
        raise CaptureError(
            f"response {document.id!r}: hidden states of shape {list(states.hidden.shape)} for {expected[0]} tokens "
            f"and {expected[1]} layers {list(taps.layers)}: the capture belongs to another response or another head."
        )
    check_states(document.id, states.hidden.cpu(), document.token_ids, taps.layers)
    if taps.last_hidden:
        if states.last_hidden is None:
            raise CaptureError(f"response {document.id!r}: the states after the final norm are missing.")
        check_last_hidden(document.id, states.last_hidden.cpu(), document.token_ids)


@torch.no_grad()
def check_predictions(document: Document, last_hidden: Tensor, tables: TokenTables) -> None:
    """The target's own tokens must be likely under head @ last_hidden of the row before.

    This holds for no state of another layer, before the norm, of another position or of another model.
    """
    first, length = document.num_prompt_tokens, len(document)
    if length - first < _LEAST_LABELS:
        return
    labels = document.token_ids[first:].to(last_hidden.device)
    logits = (last_hidden[first - 1 : length - 1].to(tables.head.dtype) @ tables.head.T).float()
    if tables.logit_softcap:
        logits = tables.logit_softcap * torch.tanh(logits / tables.logit_softcap)
    if document.temperature == 0:
        share = float((logits.argmax(-1) == labels).float().mean())
        if share < _LEAST_AGREEMENT:
            raise CaptureError(_unlikely(document, f"the target's first choice is the response's token at {share:.0%}"))
        return
    law = torch.softmax(logits / document.temperature, -1)
    seen, expected = float(law.gather(1, labels[:, None]).mean()), float(law.square().sum(-1).mean())
    if seen < _LEAST_OF_EXPECTED * expected:
        raise CaptureError(
            _unlikely(document, f"the response's tokens have probability {seen:.3f} instead of about {expected:.3f} at")
        )


def _unlikely(document: Document, what: str) -> str:
    return (
        f"response {document.id!r}: {what} of its positions, by the captured states after the final norm. They are "
        "shifted, of another layer or of another target, or the response is (or was written with a penalty or a "
        "logit bias). Delete what is wrong and run its stage again."
    )


@torch.no_grad()
def check_source(document: Document, states: States, taps: Taps, model: Any) -> None:
    """Compare the first rows with what the target in this process computes, by its plain attention.

    Says which layer, or which shift, the states fit if not their own. Raises `CaptureError`.
    """
    part = document.cut(_ROWS)
    real = _reference(part, taps, model)
    tolerance = 1e-3 if states.hidden.dtype == torch.float32 else 0.1
    for index, layer in enumerate(taps.layers):
        given = states.hidden[: len(part), index]
        if _distance(given, real.hidden[:, index]) > tolerance:
            raise CaptureError(_diagnosis(part, given, layer, model, tolerance))
    if taps.last_hidden and states.last_hidden is not None and real.last_hidden is not None:
        distance = _distance(states.last_hidden[: len(part)], real.last_hidden)
        if distance > tolerance:
            raise CaptureError(
                f"response {document.id!r}: the captured states after the final norm are not what this target computes "
                f"(they differ by {distance:.0%}): {_ELSEWHERE}"
            )


_ELSEWHERE = (
    "they come from another target, another tokenisation, or from before the norm. Delete the captured states and run "
    "task.stage=capture again."
)


def _reference(document: Document, taps: Taps, model: Any) -> States:
    """States of one document alone, by the attention that transformers calls eager."""
    with own_forward(model, taps, "eager") as (decoder, hooks):
        decoder(input_ids=document.token_ids.unsqueeze(0).to(model.device), use_cache=False)
        hidden = torch.stack([hooks.hidden[layer][0] for layer in taps.layers], dim=1)
        last = hooks.last_hidden
        return States(hidden, None if last is None else last[0].clone())


def _distance(given: Tensor, real: Tensor) -> float:
    """Median over rows of |given - real| / |real|."""
    given, real = given.float().to(real.device), real.float()
    return float(((given - real).norm(dim=-1) / real.norm(dim=-1).clamp(min=1e-12)).median())


def _diagnosis(document: Document, given: Tensor, layer: int, model: Any, tolerance: float) -> str:
    """What states that are not of `layer` seem to be."""
    layers = facts.decoder_layers(model)
    assert layers is not None
    every = tuple(range(-1, len(layers)))
    real = _reference(document, Taps(layers=every), model).hidden
    distances = {other: _distance(given, real[:, index]) for index, other in enumerate(every)}
    best = min(distances, key=distances.__getitem__)
    start = f"response {document.id!r}: the hidden states stored as layer {layer} are not those of layer {layer}"
    if distances[best] <= tolerance:
        return (
            f"{start}: they are those of layer {best}. Layers count from 0, after the layer, and -1 is the embedding "
            "(docs/hidden_states.md). Correct the layer ids, or delete the captured states and capture them again."
        )
    own = real[:, every.index(layer)]
    for shift in (1, -1):
        rows = given[shift:] if shift > 0 else given[:shift]
        moved = own[:-shift] if shift > 0 else own[-shift:]
        if len(rows) > 1 and _distance(rows, moved) <= tolerance:
            return (
                f"{start} at the same token: they are shifted by one row "
                f"({'late' if shift > 0 else 'early'}). Delete the captured states and capture them again."
            )
    return f"{start}, nor of any other layer (the best, {best}, differs by {distances[best]:.0%}): {_ELSEWHERE}"
