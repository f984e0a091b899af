"""Which ids of the target a head with a smaller vocabulary can say, as the speculators format stores it."""

from collections.abc import MutableMapping
from pathlib import Path

import torch
from torch import Tensor

from specflow.errors import CheckpointError


def take_vocabulary_map(folder: Path, tensors: MutableMapping[str, Tensor], num_rows: int, vocab_size: int) -> Tensor:
    """Target ids of the rows of a head's output table, [Vd] int64; takes `d2t` and `t2d` out of `tensors`.

    d2t [Vd] int holds offsets: target id = draft id + d2t[draft id]. t2d [V] bool marks the same ids. Without d2t the
    rows are the target's first ids. Raises `CheckpointError` for maps that contradict each other or the sizes.
    """
    offsets, mask = tensors.pop("d2t", None), tensors.pop("t2d", None)
    rows = torch.arange(num_rows)
    ids = rows if offsets is None else rows + offsets.long()
    broken = f"{folder} has an inconsistent vocabulary map"
    lowest, highest, different = int(ids.min()), int(ids.max()), len(ids.unique())
    if different != num_rows or lowest < 0 or highest >= vocab_size:
        raise CheckpointError(
            f"{broken}: draft id + d2t[draft id] must be {num_rows} different ids below {vocab_size}, and they are "
            f"{different} from {lowest} to {highest} (d2t holds offsets, not ids)."
        )
    if mask is not None and not torch.equal(mask.bool().nonzero().flatten(), ids.sort().values):
        raise CheckpointError(
            f"{broken}: t2d marks {int(mask.bool().sum())} ids, and they are not the {num_rows} that d2t leads to."
        )
    if num_rows == vocab_size and not torch.equal(ids, rows):
        raise CheckpointError(f"{broken}: the head has a row for every id, and d2t leads to other ids.")
    return ids


def vocabulary_maps(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """`d2t` and `t2d` for a head whose rows stand for ids [Vd] int64."""
    ids = ids.cpu()
    marks = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    return {"d2t": ids - torch.arange(len(ids)), "t2d": marks}
