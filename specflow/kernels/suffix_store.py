"""The suffix tree as an object: its arrays grow as needed, sequences come and go oldest first."""

from dataclasses import dataclass, field

import numpy as np

from specflow.kernels import suffix_search, suffix_table, suffix_tree
from specflow.kernels.suffix_siblings import GROUPS_LIVE, GROUPS_TOP, NODES_LIVE, NODES_TOP, PAGES_LIVE, PAGES_TOP
from specflow.kernels.suffix_tree import HEADER, PAGE, Tree

GROWTH = 1.5
NO_WRITER = np.zeros(HEADER, np.int32)  # of no sequence
FEW_NODES, FEW_PAGES, FEW_GROUPS = 256, 16, 64


@dataclass(eq=False)
class Sequence:
    """One sequence of a tree and where it goes on."""

    order: int  # its place in the order of starts
    writer: np.ndarray  # [4 + D] int32, see `suffix_tree`
    length: int = 0
    evicted: bool = False


@dataclass(frozen=True)
class Speculation:
    """What one tree, or the better of two, proposes."""

    token_ids: np.ndarray  # [n] int32
    probs: np.ndarray  # [n] float32: estimated probability of each token and all before it
    score: float  # sum of probs: tokens expected to be accepted
    match_length: int  # tokens of the context that were found
    parents: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # [n] int32, tree form only


class SuffixTree:
    """Suffixes, cut to `depth` tokens, of sequences that grow side by side; only the oldest one can be removed.

    Ids must lie in 0 … 2^31 - 2. Arrays grow by half and are not given back, but what a removed sequence held is used
    again, to the last entry.
    """

    def __init__(self, depth: int, tokens: int = 0) -> None:
        self.depth = depth
        self.num_tokens = 0
        self._orders = 0
        nodes = max(FEW_NODES, 2 * tokens)
        self.tree = Tree(
            nodes=np.zeros((nodes, 8), np.int32),
            table=np.zeros(_table_size(nodes), np.int32),
            tokens=np.zeros(max(FEW_PAGES, tokens // PAGE + 4) * PAGE, np.int32),
            pages=np.zeros((max(FEW_PAGES, tokens // PAGE + 4), 2), np.int32),
            groups=np.zeros((FEW_GROUPS, 3), np.int32),
            meta=np.zeros(9, np.int64),
        )
        self.clear()

    def clear(self) -> None:
        """Forget everything, keep the arrays."""
        meta = self.tree.meta
        meta[:] = 0
        meta[[NODES_TOP, NODES_LIVE]] = 2, 1  # row 0 means none, row 1 is the root
        meta[[PAGES_TOP, GROUPS_TOP]] = 1
        self.tree.nodes[:2] = 0
        self.tree.table[:] = 0
        self.num_tokens = self._orders = 0

    @property
    def num_nodes(self) -> int:
        """Nodes in use, the root included."""
        return int(self.tree.meta[NODES_LIVE])

    @property
    def num_pages(self) -> int:
        """Token pages in use."""
        return int(self.tree.meta[PAGES_LIVE])

    @property
    def num_groups(self) -> int:
        """Groups of siblings with equal counts."""
        return int(self.tree.meta[GROUPS_LIVE])

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, room to grow included."""
        return sum(array.nbytes for array in self.tree)

    def open(self) -> Sequence:
        """Start a sequence, the youngest from now on."""
        writer = np.zeros(HEADER + self.depth, np.int32)
        self._orders += 1
        writer[0] = self._orders
        return Sequence(self._orders, writer)

    def append(self, sequence: Sequence, ids: np.ndarray) -> None:
        """Let a sequence go on by ids [n] int32."""
        done = 0
        while (done := done + suffix_tree.append_tokens(self.tree, sequence.writer, ids[done:])) < len(ids):
            self._grow(len(ids) - done)
        sequence.length += len(ids)
        self.num_tokens += len(ids)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, which must be the oldest."""
        if sequence.length:
            self._ensure_groups(sequence.length * self.depth)
            suffix_tree.remove_sequence(self.tree, sequence.writer, self.depth, sequence.length)
        self.num_tokens -= sequence.length
        sequence.length, sequence.evicted = 0, True

    def read(self, sequence: Sequence) -> np.ndarray:
        """The tokens of a sequence, [n] int32."""
        ids = np.empty(sequence.length, np.int32)
        suffix_tree.read_sequence(self.tree, sequence.writer, ids)
        return ids

    def speculate(
        self, context: np.ndarray, most: int, factor: float, offset: float, min_prob: float, *, form: str = "path"
    ) -> Speculation:
        """Continuation of any context [n] int32, as a path or a tree; see `suffix_search`."""
        ids, probs, parents = np.empty(most, np.int32), np.empty(most, np.float32), np.empty(most, np.int32)
        rules = (most, float(factor), float(offset), np.float32(min_prob))
        if form == "path":
            count, score, match = suffix_search.speculate_path(self.tree, NO_WRITER, context, rules, ids, probs)
            return Speculation(ids[:count], probs[:count], float(score), match)
        count, score, match = suffix_search.speculate_tree(self.tree, NO_WRITER, context, rules, ids, parents, probs)
        return Speculation(ids[:count], probs[:count], float(score), match, parents[:count])

    def _grow(self, tokens: int) -> None:
        """Make room where it is short, for one token at least and for `tokens` at their usual size."""
        tree, depth = self.tree, self.depth
        nodes = _grown(tree.nodes, self.num_nodes + depth + 2 * tokens + 3)
        pages = _grown(tree.pages, self.num_pages + tokens // PAGE + 4)
        self.tree = tree._replace(
            nodes=nodes,
            pages=pages,
            tokens=tree.tokens if pages is tree.pages else np.resize(tree.tokens, len(pages) * PAGE),
            groups=_grown(tree.groups, self.num_groups + depth + 3),
        )
        if _table_size(self.num_nodes + depth + 2 * tokens) > len(tree.table):
            table = np.zeros(_table_size(self.num_nodes + depth + 2 * tokens), np.int32)
            self.tree = self.tree._replace(table=table)
            suffix_table.rehash(self.tree, tree.table)

    def _ensure_groups(self, more: int) -> None:
        """Room for groups that a removal makes on its way; there are never more than half the nodes."""
        most = min(self.num_groups + more, self.num_nodes // 2) + self.depth + 3
        self.tree = self.tree._replace(groups=_grown(self.tree.groups, most))


def speculate_both(
    own: tuple[SuffixTree, Sequence],
    shared: tuple[SuffixTree, Sequence | None],
    context: np.ndarray,
    most: int,
    factor: float,
    min_prob: float,
) -> Speculation:
    """The better path of two trees, the first one's among equals.

    A sequence beside its tree is one that ends with `context` [n] int32, which saves the search.
    """
    ids, probs = np.empty(most, np.int32), np.empty(most, np.float32)
    rules = (most, float(factor), 0.0, np.float32(min_prob))
    writer = NO_WRITER if shared[1] is None else shared[1].writer
    count, score, match = suffix_search.speculate_both(
        own[0].tree, own[1].writer, shared[0].tree, writer, context, rules, ids, probs
    )
    return Speculation(ids[:count], probs[:count], float(score), match)


def _table_size(nodes: int) -> int:
    """Power of two that holds the nodes at a load of 0.7 at most."""
    return 1 << max(6, (10 * nodes // 7).bit_length())


def _grown(pool: np.ndarray, rows: int) -> np.ndarray:
    """A pool of at least so many rows, with the old content; the same one when it is large enough."""
    if rows <= len(pool):
        return pool
    grown = np.empty((max(rows, int(GROWTH * len(pool))), pool.shape[1]), pool.dtype)
    grown[: len(pool)] = pool
    return grown
