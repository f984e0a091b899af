"""The hash table of a suffix tree: from a node and a token to the child whose label starts with it.

Open addressing with linear probing over one int32 array of 2^k places, 0 = empty. An entry is the child's row; its key,
(parent, first token of the label), is read from the tree of `specflow.kernels.suffix_tree`, which explains its arrays.
"""

import numpy as np

from specflow.kernels.inlined import borrowing, inlined
from specflow.kernels.suffix_siblings import PARENT, REF


@inlined
def bucket(tree, parent, token):  # type: ignore[no-untyped-def]
    """First place in the hash table of a child."""
    mixed = np.uint64(parent) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(token + 1) * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    return np.int64(mixed >> np.uint64(32)) & (len(tree.table) - 1)


@inlined
def find(tree, parent, token):  # type: ignore[no-untyped-def]
    """The child of a node whose label starts with a token; 0 when there is none."""
    mask = len(tree.table) - 1
    place = bucket(tree, parent, token)
    while True:
        node = tree.table[place]
        if node == 0:
            return 0
        if tree.nodes[node, PARENT] == parent and tree.tokens[tree.nodes[node, REF]] == token:
            return node
        place = (place + 1) & mask


@inlined
def home(tree, node):  # type: ignore[no-untyped-def]
    """First place in the hash table of a node."""
    return bucket(tree, tree.nodes[node, PARENT], tree.tokens[tree.nodes[node, REF]])


@inlined
def enter(tree, node):  # type: ignore[no-untyped-def]
    """Add a node to the hash table."""
    mask = len(tree.table) - 1
    place = home(tree, node)
    while tree.table[place]:
        place = (place + 1) & mask
    tree.table[place] = node


@inlined
def place_of(tree, node):  # type: ignore[no-untyped-def]
    """Where in the hash table a node is."""
    mask = len(tree.table) - 1
    place = home(tree, node)
    while tree.table[place] != node:
        place = (place + 1) & mask
    return place


@inlined
def erase(tree, node):  # type: ignore[no-untyped-def]
    """Take a node out of the hash table and close the gap, so that nothing marks where it was."""
    mask = len(tree.table) - 1
    gap = place_of(tree, node)
    place = gap
    while True:
        place = (place + 1) & mask
        other = tree.table[place]
        if other == 0:
            break
        if ((place - home(tree, other)) & mask) >= ((place - gap) & mask):
            tree.table[gap] = other
            gap = place
    tree.table[gap] = 0


@borrowing
def rehash(tree, old_table):  # type: ignore[no-untyped-def]
    """Enter the nodes of an old hash table in the tree's own, which is empty."""
    for node in old_table:
        if node:
            enter(tree, node)
