"""Suffix decoding driven by hand, without an engine."""

from typing import Any

import numpy as np

from specflow.proposers.suffix import SuffixOptions, SuffixProposer
from tests.proposers.helpers import Row, make_context


def proposer(**options: Any) -> SuffixProposer:
    """One with these options."""
    return SuffixProposer(SuffixOptions(**options))


def propose(one: SuffixProposer, *rows: Row) -> list[list[int]]:
    """The drafts of one step."""
    table = np.zeros((5, 64), np.int64)
    for row in rows:
        table[row.slot, : len(row.tokens)] = row.tokens
    draft = one.propose(make_context(table, np.zeros((5, 1), np.int64), rows))
    return [ids[:count].tolist() for ids, count in zip(draft.token_ids, draft.num_drafts.tolist(), strict=True)]
