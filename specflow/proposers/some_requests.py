"""Drafting for some of a step's requests: the part of a context that concerns them, and their drafts put in place."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch

from specflow.core.draft import Draft
from specflow.core.upload import to_device
from specflow.proposers.base import HostView, ProposeContext


def draft_where_wanted(
    context: ProposeContext, num_speculative_tokens: int, draft: Callable[[ProposeContext, torch.Tensor | slice], Draft]
) -> Draft:
    """Call `draft` for the requests that want drafts: with their context, and with what picks their rows out of
    tensors over all B."""
    wanting = np.flatnonzero(context.host.wants_drafts)
    if len(wanting) == len(context.host.slots):
        return draft(context, slice(None))
    if not len(wanting):
        return no_drafts(context, num_speculative_tokens)
    part, picked = pick_requests(context, wanting)
    return put_drafts(context, picked, draft(part, picked))


def drafts_wanted(host: HostView, num_speculative_tokens: int) -> int:
    """Most drafts that any request can use, 1 … K: a method that drafts one by one may stop there.

    In a static context that is K.
    """
    return min(num_speculative_tokens, max(1, int(host.max_drafts.max(initial=1))))


def stacked_drafts(drafts: Sequence[torch.Tensor], num_speculative_tokens: int) -> torch.Tensor:
    """Drafts made one by one, each [R] int64, as [R, K]; -1 in the places of those that nobody wanted."""
    made = torch.stack(list(drafts), 1)
    return torch.nn.functional.pad(made, (0, num_speculative_tokens - len(drafts)), value=-1)


def pick_requests(context: ProposeContext, rows: np.ndarray) -> tuple[ProposeContext, torch.Tensor]:
    """The context of the requests `rows` (ascending numbers), as far as drafting reads it, and `rows` on its device."""
    picked = to_device(rows, context.slots.device)
    host = replace(
        context.host,
        num_tokens=context.host.num_tokens[rows],
        max_drafts=context.host.max_drafts[rows],
        block_table=context.host.block_table[rows],
    )
    part = replace(
        context,
        slots=context.slots[picked],
        num_tokens=context.num_tokens[picked],
        max_drafts=context.max_drafts[picked],
        block_table=context.block_table[picked],
        temperature=context.temperature[picked],
        seeds=context.seeds[picked],
        filters=None if context.filters is None else context.filters.of(picked),
        host=host,
    )
    return part, picked


def no_drafts(context: ProposeContext, num_speculative_tokens: int) -> Draft:
    """Nothing for anybody."""
    ids = torch.full((len(context.host.slots), num_speculative_tokens), -1, device=context.slots.device)
    return Draft(ids, torch.zeros_like(context.slots))


def put_drafts(context: ProposeContext, picked: torch.Tensor, draft: Draft) -> Draft:
    """The drafts of the picked requests among all B of a context."""
    whole = no_drafts(context, draft.token_ids.shape[1])
    logits = None
    if draft.logits is not None:
        logits = draft.logits.new_full((len(whole.token_ids), *draft.logits.shape[1:]), float("-inf"))
        logits[picked] = draft.logits
    whole.token_ids[picked], whole.num_drafts[picked] = draft.token_ids, draft.num_drafts
    return Draft(whole.token_ids, whole.num_drafts, logits)
