"""From a pack of documents and their hidden states to what a head's loss reads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specflow.training.documents import Document
from specflow.training.hidden_provider import States
from specflow.training.objective import TrainBatch

__all__ = ["make_batch"]


def make_batch(
    documents: Sequence[Document], found: Sequence[States], length: int, seed: int, dtype: torch.dtype | None
) -> TrainBatch:
    """The documents side by side, padded to `length` tokens, on the device of their states.

    dtype: of the hidden states; None leaves the target's.
    """
    device = found[0].hidden.device
    token_ids, documents_of = torch.zeros(length, dtype=torch.int64), torch.full((length,), -1, dtype=torch.int64)
    positions, predicted = torch.zeros(length, dtype=torch.int64), torch.zeros(length, dtype=torch.bool)
    start = 0
    for number, document in enumerate(documents):
        end = start + len(document)
        token_ids[start:end] = document.token_ids
        documents_of[start:end] = number
        positions[start:end] = torch.arange(len(document))
        predicted[start + document.num_prompt_tokens : end] = True
        start = end
    last = [states.last_hidden for states in found if states.last_hidden is not None]
    return TrainBatch(
        token_ids=token_ids.to(device),
        predicted=predicted.to(device),
        documents=documents_of.to(device),
        positions=positions.to(device),
        hidden=_joined([states.hidden for states in found], length, dtype),
        last_hidden=_joined(last, length, dtype) if last else None,
        sample_ids=tuple(document.id for document in documents),
        seed=seed,
    )


def _joined(parts: Sequence[Tensor], length: int, dtype: torch.dtype | None) -> Tensor:
    """Rows of all parts, then zeros up to `length`."""
    first = parts[0]
    joined = torch.zeros((length, *first.shape[1:]), dtype=dtype or first.dtype, device=first.device)
    start = 0
    for part in parts:
        joined[start : start + len(part)] = part
        start += len(part)
    return joined
