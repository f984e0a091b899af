"""Prompt lookup's worked examples, its definition, and a way to ask a proposer."""

from collections.abc import Sequence

import numpy as np

from specflow.proposers.base import Proposer
from tests.proposers.helpers import Row, make_context

PERIODIC = [1, 2, 3] * 3
N12 = [4, 1, 2, 3, 8, 2, 3, 6, 1, 2, 3]

# (case, history, min, max, K, expected with the earliest match, expected with the latest or None where not recorded)
CASES: list[tuple[str, list[int], int, int, int, list[int], list[int] | None]] = [
    ("N1", [1, 2, 3, 4, 1, 2, 3], 2, 2, 4, [4, 1, 2, 3], [4, 1, 2, 3]),
    ("N2", [1, 2, 3, 4, 1, 2, 3], 1, 3, 3, [4, 1, 2], None),
    ("N3", [1, 2, 9, 1, 2, 8, 1, 2], 2, 2, 2, [9, 1], [8, 1]),
    ("N4", [7, 1, 2, 9, 1, 2, 8, 7, 1, 2], 2, 3, 2, [9, 1], [9, 1]),
    ("N5", [5, 5, 5, 5], 1, 3, 3, [5], [5]),
    ("N6", [5] * 6, 2, 2, 4, [5, 5, 5, 5], None),
    ("N7", [1, 2, 3, 4, 5], 1, 3, 3, [], []),
    ("N8", [1, 2], 3, 3, 3, [], []),
    ("N9", [1], 1, 1, 3, [], None),
    ("N10", [1, 1], 1, 1, 3, [1], None),
    ("N11", [1, 2, 1, 2, 1, 2, 1], 1, 3, 4, [2, 1, 2, 1], [2, 1]),
    ("N12", N12, 1, 3, 3, [8, 2, 3], [8, 2, 3]),
    ("N13", N12, 1, 2, 3, [8, 2, 3], [6, 1, 2]),
    ("N14", [2, 3, 4, 9, 3, 4, 8, 2, 5, 3, 4], 2, 4, 3, [9, 3, 4], [8, 2, 5]),
    ("N15", [0, 0, 0, 7, 0, 0], 2, 2, 5, [0, 7, 0, 0], None),
    ("N16", [3, 0, 0], 2, 2, 5, [], None),
    ("N17", PERIODIC, 5, 5, 5, [1, 2, 3], [1, 2, 3]),
    ("N18", PERIODIC, 3, 6, 5, [1, 2, 3], [1, 2, 3]),
    ("N19", [9, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4], 2, 5, 3, [5, 6, 1], None),
    ("N20", [1, 2, 3, 4, 5, 1, 2], 2, 2, 10, [3, 4, 5, 1, 2], [3, 4, 5, 1, 2]),
]


def propose(proposer: Proposer, *requests: tuple[list[int], int], stale: Sequence[int] = (0,)) -> list[list[int]]:
    """Drafts of requests given as (history, most drafts); behind a history, `stale` stands over and over."""
    width = max(len(tokens) for tokens, _ in requests) + 8
    table = np.resize(np.array(stale, dtype=np.int64), (len(requests) + 1, width))
    rows = []
    # Slots in reverse, so that a mix-up of rows and slots is seen.
    for slot, (tokens, most) in zip(range(len(requests) - 1, -1, -1), requests, strict=True):
        table[slot, : len(tokens)] = tokens
        rows.append(Row(slot, tokens, (0, len(tokens) - 1), most))
    draft = proposer.propose(make_context(table, np.zeros((len(requests) + 1, 1), dtype=np.int64), tuple(rows)))
    assert draft.logits is None
    return [ids[:count].tolist() for ids, count in zip(draft.token_ids, draft.num_drafts.tolist(), strict=True)]


def oracle(tokens: list[int], n_min: int, n_max: int, most: int, latest: bool) -> list[int]:
    """The definition, word for word."""
    length = len(tokens)
    for n in range(min(n_max, length), n_min - 1, -1):
        starts = range(length - n)
        for p in reversed(starts) if latest else starts:
            if tokens[p : p + n] == tokens[length - n :]:
                return tokens[p + n : p + n + most]
    return []
