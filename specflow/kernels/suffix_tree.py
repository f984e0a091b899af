"""A suffix tree with counts in flat integer arrays: every suffix of every sequence, cut to a depth of D tokens.

The structure is that of suffix decoding (Liu et al., arXiv 2411.04975): a path-compressed trie whose nodes count the
suffixes that pass or end there, so that child count / node count estimates how likely a continuation is. The layout is
our own. A tree is six arrays and no Python object per node:

    nodes  [capacity, 8] int32   one row a node: count, label (where in `tokens` it starts, and its length), parent,
                                 first child, next and previous sibling, group of equal counts; row 1 is the root
    table  [2^k] int32           hash table of children by (parent, first token of the label), 0 = empty
    tokens [pages * 32] int32    the sequences, in pages of 32 tokens
    pages  [capacity, 2] int32   page that continues the sequence (0: none, and page 0 is never used), its start order
    groups [capacity, 3] int32   see `suffix_siblings`
    meta   [9] int64             sizes of the pools

A writer [4 + D] int32 is the growing end of one sequence: start order, first and last position in `tokens`, number of
active suffixes, then the nodes where these end, longest first.

A label always refers to the youngest sequence (by start order) among those that pass its node. When the oldest one is
removed, no label that stays refers to it, and its pages can be given back without a search.
"""

from typing import NamedTuple

import numpy as np

from specflow.kernels.inlined import borrowing, inlined
from specflow.kernels.suffix_siblings import (
    CHILD,
    COUNT,
    GROUP,
    GROUPS_LIVE,
    LENGTH,
    NEXT,
    NODES_LIVE,
    NODES_TOP,
    PAGES_LIVE,
    PAGES_TOP,
    PARENT,
    PREV,
    REF,
    ROOT,
    add_child,
    drop_child,
    give,
    lower_count,
    raise_count,
    substitute,
    take,
)
from specflow.kernels.suffix_table import enter, erase, find, place_of

SHIFT = 5
PAGE = 1 << SHIFT  # tokens of a page
LINK, ORDER = range(2)  # columns of pages
FIRST, LAST, ACTIVE, HEADER = 1, 2, 3, 4  # entries of a writer after its start order; then the active nodes


class Tree(NamedTuple):
    """The arrays of one tree; see the module."""

    nodes: np.ndarray
    table: np.ndarray
    tokens: np.ndarray
    pages: np.ndarray
    groups: np.ndarray
    meta: np.ndarray


@inlined
def advance(pages, position):  # type: ignore[no-untyped-def]
    """Position of the token after the one at `position` in the same sequence."""
    position += 1
    if position & (PAGE - 1):
        return position
    return pages[(position - 1) >> SHIFT, LINK] << SHIFT


@inlined
def split(tree, node):  # type: ignore[no-untyped-def]
    """Cut the first token of a label off into a new node above; returns it. Who ends at `node` still does."""
    nodes = tree.nodes
    top, parent = take(nodes, tree.meta, NODES_TOP), nodes[node, PARENT]
    tree.table[place_of(tree, node)] = top
    nodes[top, COUNT], nodes[top, REF], nodes[top, LENGTH] = nodes[node, COUNT], nodes[node, REF], 1
    nodes[top, PARENT], nodes[top, CHILD], nodes[top, GROUP] = parent, node, 0
    if parent != ROOT:
        substitute(nodes, tree.groups, parent, node, top)
    nodes[node, PARENT], nodes[node, NEXT], nodes[node, PREV] = top, 0, node
    nodes[node, REF] = advance(tree.pages, nodes[node, REF])
    nodes[node, LENGTH] -= 1
    enter(tree, node)
    return top


@inlined
def absorb(tree, node):  # type: ignore[no-untyped-def]
    """Join a node with its only child, which keeps its row and children; returns it. Nobody else ends at `node`."""
    nodes = tree.nodes
    child, parent = nodes[node, CHILD], nodes[node, PARENT]
    erase(tree, child)
    tree.table[place_of(tree, node)] = child
    nodes[child, COUNT], nodes[child, REF] = nodes[node, COUNT], nodes[node, REF]
    nodes[child, LENGTH] += nodes[node, LENGTH]
    nodes[child, PARENT] = parent
    if parent != ROOT:
        substitute(nodes, tree.groups, parent, node, child)
    give(nodes, tree.meta, NODES_TOP, node)
    return child


@inlined
def shift_token(tree, node):  # type: ignore[no-untyped-def]
    """Move the first token of the only child's label to the end of the node's own."""
    child = tree.nodes[node, CHILD]
    erase(tree, child)
    tree.nodes[node, LENGTH] += 1
    tree.nodes[child, REF] = advance(tree.pages, tree.nodes[child, REF])
    tree.nodes[child, LENGTH] -= 1
    enter(tree, child)


@inlined
def new_leaf(tree, parent, position):  # type: ignore[no-untyped-def]
    """A child of count 1 for the token at `position`."""
    nodes = tree.nodes
    leaf = take(nodes, tree.meta, NODES_TOP)
    nodes[leaf, COUNT], nodes[leaf, REF], nodes[leaf, LENGTH] = 1, position, 1
    nodes[leaf, PARENT], nodes[leaf, CHILD] = parent, 0
    add_child(nodes, tree.groups, tree.meta, parent, leaf)
    enter(tree, leaf)
    return leaf


@inlined
def grow(tree, node, token, position):  # type: ignore[no-untyped-def]
    """Let the suffix that ends at `node` go on by the token at `position`; returns where it ends now."""
    nodes = tree.nodes
    leaf = node != ROOT and nodes[node, CHILD] == 0
    child = 0 if leaf else find(tree, node, token)
    if child == 0:
        if leaf and nodes[node, COUNT] == 1:  # a leaf of this suffix alone
            nodes[node, LENGTH] += 1
            return node
        return new_leaf(tree, node, position)
    alone = node != ROOT and nodes[child, NEXT] == 0 and nodes[node, CHILD] == child
    if alone and nodes[child, COUNT] == nodes[node, COUNT] - 1:  # everyone else went on the same way
        if nodes[child, LENGTH] == 1:
            return absorb(tree, node)
        shift_token(tree, node)
        return node
    if nodes[child, LENGTH] > 1:
        child = split(tree, child)
    raise_count(nodes, tree.groups, tree.meta, child)
    if tree.pages[position >> SHIFT, ORDER] >= tree.pages[nodes[child, REF] >> SHIFT, ORDER]:
        nodes[child, REF] = position
    return child


@inlined
def store(tree, writer, token):  # type: ignore[no-untyped-def]
    """Write a token behind the writer's last one; returns its position."""
    position = writer[LAST] + 1
    if writer[LAST] == 0 or (position & (PAGE - 1)) == 0:
        page = take(tree.pages, tree.meta, PAGES_TOP)
        tree.pages[page, LINK], tree.pages[page, ORDER] = 0, writer[0]
        if writer[LAST]:
            tree.pages[writer[LAST] >> SHIFT, LINK] = page
        position = page << SHIFT
    if writer[LAST] == 0:
        writer[FIRST] = position
    tree.tokens[position] = token
    writer[LAST] = position
    return position


@inlined
def has_room(tree, tokens):  # type: ignore[no-untyped-def]
    """Whether the pools, as they are, hold `tokens` more nodes and groups and a page, at a fair load of the table."""
    nodes = tree.meta[NODES_LIVE] + tokens
    return (
        nodes < len(tree.nodes) - 2
        and 10 * nodes < 7 * len(tree.table)
        and tree.meta[GROUPS_LIVE] + tokens < len(tree.groups) - 2
        and tree.meta[PAGES_LIVE] < len(tree.pages) - 2
    )


@borrowing
def append_tokens(tree, writer, ids):  # type: ignore[no-untyped-def]
    """Append ids [n] to a writer's sequence; returns how many, fewer than n when a pool has to grow first."""
    depth = len(writer) - HEADER
    for index in range(len(ids)):
        if not has_room(tree, depth):
            return index
        position = store(tree, writer, ids[index])
        if writer[ACTIVE] == depth:  # the longest suffix has reached the depth
            for active in range(HEADER, HEADER + depth - 1):
                writer[active] = writer[active + 1]
            writer[ACTIVE] -= 1
        writer[HEADER + writer[ACTIVE]] = ROOT
        writer[ACTIVE] += 1
        for active in range(HEADER, HEADER + writer[ACTIVE]):
            writer[active] = grow(tree, writer[active], ids[index], position)
    return len(ids)


@inlined
def remove_suffix(tree, position, length):  # type: ignore[no-untyped-def]
    """Take out one suffix: `length` tokens from `position` on."""
    nodes, node = tree.nodes, ROOT
    while length > 0:
        child = find(tree, node, tree.tokens[position])
        if nodes[child, COUNT] == 1:
            drop_child(nodes, tree.groups, tree.meta, child)
            while child:
                erase(tree, child)
                below = nodes[child, CHILD]
                give(nodes, tree.meta, NODES_TOP, child)
                child = below
            break
        lower_count(nodes, tree.groups, tree.meta, child)
        length -= nodes[child, LENGTH]
        for _ in range(nodes[child, LENGTH]):
            position = advance(tree.pages, position)
        node = child
    child = nodes[node, CHILD]
    if node != ROOT and child and nodes[child, NEXT] == 0 and nodes[child, COUNT] == nodes[node, COUNT]:
        absorb(tree, node)


@borrowing
def remove_sequence(tree, writer, depth, length):  # type: ignore[no-untyped-def]
    """Take out the oldest sequence, of `length` tokens. Needs room for a group per suffix and level."""
    position = writer[FIRST]
    for remaining in range(length, 0, -1):
        remove_suffix(tree, position, min(depth, remaining))
        position = advance(tree.pages, position)
    page = writer[FIRST] >> SHIFT
    while page:
        following = tree.pages[page, LINK]
        give(tree.pages, tree.meta, PAGES_TOP, page)
        page = following


@borrowing
def read_sequence(tree, writer, ids):  # type: ignore[no-untyped-def]
    """Copy a sequence of n tokens out, into ids [n] int32."""
    position = writer[FIRST]
    for index in range(len(ids)):
        ids[index] = tree.tokens[position]
        position = advance(tree.pages, position)
