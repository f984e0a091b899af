"""Suffix trees: worked examples of the published implementation, and a count of substrings as referee."""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specflow.kernels.suffix_siblings import (
    CHILD,
    COUNT,
    GROUP,
    HEAD,
    LENGTH,
    NEXT,
    PARENT,
    PREV,
    REF,
    ROOT,
    SIZE,
    TAIL,
)
from specflow.kernels.suffix_store import Sequence, Speculation, SuffixTree
from specflow.kernels.suffix_tree import PAGE, SHIFT, advance


def array(ids: Any) -> np.ndarray:
    return np.array(list(ids), np.int32)


def grown(text: list[int], depth: int = 24) -> SuffixTree:
    tree = SuffixTree(depth)
    tree.append(tree.open(), array(text))
    return tree


@dataclass
class Node:
    """The trie without compression: one node per token."""

    count: int = 0
    children: dict[int, "Node"] = field(default_factory=dict)


def naive_trie(sequences: list[list[int]], depth: int) -> Node:
    root = Node()
    for sequence in sequences:
        for start in range(len(sequence)):
            node = root
            for token in sequence[start : start + depth]:
                node = node.children.setdefault(token, Node())
                node.count += 1
    return root


def label(tree: SuffixTree, node: int) -> list[int]:
    arrays, position, ids = tree.tree, int(tree.tree.nodes[node, REF]), []
    for _ in range(arrays.nodes[node, LENGTH]):
        ids.append(int(arrays.tokens[position]))
        position = advance(arrays.pages, position)
    return ids


def children(tree: SuffixTree, node: int) -> list[int]:
    """The children in their order, every link of the list and of the groups checked."""
    nodes, groups = tree.tree.nodes, tree.tree.groups
    if node == ROOT:
        return [int(child) for child in tree.tree.table if child and nodes[child, PARENT] == ROOT]
    found = []
    child = int(nodes[node, CHILD])
    while child:
        found.append(child)
        child = int(nodes[child, NEXT])
    for before, after in pairwise(found):
        assert nodes[after, PREV] == before
        assert nodes[before, COUNT] >= nodes[after, COUNT]
    if found:
        assert nodes[found[0], PREV] == found[-1]
    for count, size in Counter(int(nodes[one, COUNT]) for one in found).items():
        same = [one for one in found if nodes[one, COUNT] == count]
        group = int(nodes[same[0], GROUP])
        assert {int(nodes[one, GROUP]) for one in same} == {group}
        assert (group > 0) == (size > 1)
        if group:
            assert groups[group].tolist() == [same[0], same[-1], size]
            assert (HEAD, TAIL, SIZE) == (0, 1, 2)
    return found


def check(tree: SuffixTree, sequences: list[list[int]]) -> None:
    """The tree says the same as the count of substrings, and is as small as it should be."""
    nodes, seen, groups = tree.tree.nodes, 1, 0

    def walk(node: int, expected: Node) -> None:
        nonlocal seen, groups
        below = children(tree, node)
        groups += sum(
            1 for size in Counter(int(nodes[one, COUNT]) for one in below).values() if size > 1 and node != ROOT
        )
        assert len(below) == len(expected.children)
        for child in below:
            seen += 1
            assert nodes[child, PARENT] == node
            inner = expected
            for token in label(tree, child):
                inner = inner.children[token]
                assert inner.count == nodes[child, COUNT]
            walk(child, inner)

    walk(ROOT, naive_trie(sequences, tree.depth))
    assert seen == tree.num_nodes == np.count_nonzero(tree.tree.table) + 1
    assert seen <= 1 + 2 * sum(map(len, sequences))
    assert groups == tree.num_groups
    assert tree.num_pages == sum(-(-len(sequence) // PAGE) for sequence in sequences)
    assert tree.num_tokens == sum(map(len, sequences))


def below(trie: Node, tokens: list[int]) -> Node:
    for token in tokens:
        trie = trie.children[token]
    return trie


def check_speculation(trie: Node, context: list[int], found: Speculation, cap: int, least: float) -> None:
    """Every token is a most frequent one, with its probability, and the draft stops where it must."""
    node = below(trie, context[len(context) - found.match_length :])
    prob = np.float32(1)
    for token, expected in zip(found.token_ids.tolist(), found.probs.tolist(), strict=True):
        child = node.children[token]
        assert child.count == max(one.count for one in node.children.values())
        prob *= np.float32(child.count) / np.float32(node.count)
        assert expected == pytest.approx(float(prob))
        assert prob >= np.float32(least) - 1e-6
        node = child
    assert found.score == pytest.approx(sum(found.probs.tolist()), abs=1e-5)
    assert len(found.token_ids) <= cap
    if 0 < len(found.token_ids) < cap and node.children:
        best = max(one.count for one in node.children.values())
        assert prob * np.float32(best) / np.float32(node.count) < np.float32(least) + 1e-6


S = range(1, 31)
# (case, prompt, output, options, tokens, probabilities, score, match length)
CASES: list[tuple[str, Any, Any, dict[str, float], Any, list[float], float, int]] = [
    ("S1", [1, 2, 3, 4], [1, 2], {}, [3, 4], [0.5] * 2, 1.0, 2),
    ("S2", S[:6], [1, 2, 3], {}, [4, 5, 6], [0.5] * 3, 1.5, 3),
    ("S3", S[:6], [1, 2, 3], {"factor": 2}, [4, 5, 6, 1, 2, 3], [0.5] * 6, 3.0, 3),
    ("S4a", S[:6], [1, 2, 3], {"factor": 0.5}, [4], [0.5], 0.5, 3),
    ("S4b", S[:6], [1, 2, 3], {"factor": 1.34}, [4, 5, 6, 1], [0.5] * 4, 2.0, 3),
    ("S5", [1, 2, 3, 4], [1, 2], {"factor": 0, "offset": 3}, [3, 4, 1], [0.5] * 3, 1.5, 2),
    ("S6", [1, 2, 3], [1, 2], {"factor": 0}, [], [], 0.0, 4),
    ("S7", [1, 2, 3], [1, 2], {"most": 1}, [3], [0.5], 0.5, 2),
    ("S8", [1, 2, 3, 1, 2, 3, 1, 2, 4], [1, 2], {}, [3, 1], [0.5] * 2, 1.0, 2),
    ("S9", [1, 2, 3, 1, 2, 4], [1, 2], {}, [3, 1], [1 / 3] * 2, 2 / 3, 2),
    ("S10", [1, 2, 4, 1, 2, 3], [1, 2], {}, [4, 1], [1 / 3] * 2, 2 / 3, 2),
    ("S11", [1, 2, 3, 1, 2, 4, 1, 2, 4], [1, 2], {}, [4, 1, 2], [0.5] * 3, 1.5, 5),
    ("S12", [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 4], [1, 2], {}, [4, 1, 2], [0.5] * 3, 1.5, 5),
    ("S13", [1, 2, 3, 1, 2, 4], [1, 2], {"least": 0.6}, [], [], 0.0, 7),
    ("S14a", [1, 2, 3, 1, 2, 4, 1, 2, 5], [1, 2], {"least": 0.25}, [3, 1], [0.25] * 2, 0.5, 2),
    ("S14b", [1, 2, 3, 1, 2, 4, 1, 2, 5], [1, 2], {"least": 0.3}, [], [], 0.0, 10),
    ("S15", [5] * 4, [5], {}, [5, 5], [0.75, 0.5], 1.25, 2),
    ("S16a", S, S[:12], {}, S[12:24], [0.5] * 12, 6.0, 12),
    ("S16b", S, S[:23], {}, [*S[23:], *S[:5]], [0.5] * 12, 6.0, 12),
    ("S24a", [9], [1], {}, [], [], 0.0, 1),
    ("S24b", [], [1], {}, [], [], 0.0, 0),
    ("S25a", [], [1, 1], {}, [1], [0.5], 0.5, 1),
    ("S25b", [], [1, 2, 1, 2], {}, [1, 2], [0.5] * 2, 1.0, 2),
    ("S30", [1, 2, 3, 9, 1, 2, 4], [6, 1, 2], {}, [3, 9], [1 / 3] * 2, 2 / 3, 2),
    ("S31", [1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 4, 7, 1, 2, 4], [6, 1, 2], {}, [4, 7], [0.4, 0.2], 0.6, 2),
    ("S32", [1, 2, 4, 9, 1, 2, 4, 8, 1, 2, 3, 7, 1, 2, 3], [6, 1, 2], {}, [3, 7], [0.4, 0.2], 0.6, 2),
    ("S33", [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 4, 7, 1, 2, 3], [6, 1, 2], {}, [3, 9], [0.4, 0.2], 0.6, 2),
    ("S34", [1, 2, 3, 9, 1, 2, 4, 8, 1, 2, 5, 7, 1, 2, 5, 10, 1, 2, 4], [6, 1, 2], {}, [5, 7], [1 / 3, 1 / 6], 0.5, 2),
]


@pytest.mark.parametrize(("name", "prompt", "output", "given", "ids", "probs", "score", "match"), CASES)
def test_worked_examples(
    name: str, prompt: Any, output: Any, given: Any, ids: Any, probs: Any, score: float, match: int
) -> None:
    text = [*prompt, *output]
    options = {"most": 32, "factor": 1.0, "offset": 0.0, "least": 0.1} | given
    found = grown(text).speculate(
        array(text[-24:]), options["most"], options["factor"], options["offset"], options["least"]
    )
    assert found.token_ids.tolist() == list(ids)
    assert found.probs.tolist() == pytest.approx(probs)
    assert found.score == pytest.approx(score)
    assert found.match_length == match


def test_tree_form() -> None:
    """S26 and S27: several continuations at once, each under its own parent."""
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    found = grown(text).speculate(array(text), 32, 2.0, 0.0, 0.1, form="tree")
    pairs = list(zip(found.token_ids.tolist(), found.parents.tolist(), strict=True))
    under = sorted((token, int(found.token_ids[parent]) if parent >= 0 else -1) for token, parent in pairs)
    assert under == [(1, 3), (1, 4), (3, -1), (4, -1)]
    assert found.parents.tolist() == [-1, -1, 0, 1]
    assert (found.score, found.match_length) == (pytest.approx(4 / 3), 2)
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 5, 1, 2]
    found = grown(text).speculate(array(text), 32, 4.0, 0.0, 0.3, form="tree")
    assert (found.token_ids.tolist(), found.parents.tolist()) == ([3, 1, 2], [-1, 0, 1])
    assert found.probs.tolist() == pytest.approx([0.4] * 3)
    assert (found.score, found.match_length) == (pytest.approx(1.2), 2)


def test_a_draft_is_never_longer_than_half_the_depth() -> None:
    """Match and draft lie in one suffix, which is cut to the depth."""
    text = [*range(1, 200), *range(1, 100)]
    for depth in (2, 5, 24, 40):
        found = grown(text, depth).speculate(array(text[-depth:]), 99, 1.0, 0.0, 0.1)
        assert len(found.token_ids) == depth // 2


@settings(max_examples=150, deadline=None)
@given(data=st.data(), depth=st.integers(2, 8), width=st.integers(1, 4))
def test_counts_order_and_eviction(data: st.DataObject, depth: int, width: int) -> None:
    """Sequences grow side by side, the oldest ones go; at every point the tree is what a fresh one would be."""
    tree = SuffixTree(depth)
    alive: list[tuple[Sequence, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["open", "append", "append", "append", "remove"]))
        if action == "open" or not alive:
            alive.append((tree.open(), []))
        if action == "remove":
            tree.remove(alive.pop(0)[0])
        elif alive:
            sequence, ids = data.draw(st.sampled_from(alive))
            fresh = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=40))
            tree.append(sequence, array(fresh))
            ids += fresh
            assert tree.read(sequence).tolist() == ids
    texts = [ids for _, ids in alive]
    check(tree, texts)
    context = data.draw(st.lists(st.integers(0, width), min_size=1, max_size=depth))
    factor, least = data.draw(st.sampled_from([0.5, 1.0, 3.0])), data.draw(st.sampled_from([0.0, 0.1, 0.3]))
    found = tree.speculate(array(context), 9, factor, 0.0, least)
    if found.match_length:
        cap = min(9, int(found.match_length * factor + 1e-6))
        check_speculation(naive_trie(texts, depth), context, found, cap, least)


def test_removal_gives_everything_back() -> None:
    generator = np.random.default_rng(0)
    tree = SuffixTree(24)
    texts = [generator.zipf(1.5, 300) % 50 for _ in range(30)]
    sequences = []
    for text in texts:
        sequences.append(tree.open())
        tree.append(sequences[-1], array(text))
    nodes, size = tree.num_nodes, tree.nbytes
    for sequence in sequences:
        tree.remove(sequence)
    assert (tree.num_nodes, tree.num_pages, tree.num_groups, tree.num_tokens) == (1, 0, 0, 0)
    assert not tree.tree.table.any()
    for text in texts:  # what was given back is used again
        tree.append(tree.open(), array(text))
    assert tree.num_nodes == nodes
    assert size <= tree.nbytes <= 1.5 * size


def test_labels_refer_to_the_youngest_sequence() -> None:
    """So that an evicted sequence's pages can go at once: here the text of all three is the same."""
    tree = SuffixTree(6)
    sequences = [tree.open() for _ in range(3)]
    for index in (2, 0, 1):  # growing in another order than they started
        tree.append(sequences[index], array([*range(8), *range(8)]))
    live = [int(node) for node in tree.tree.table if node]
    assert {int(tree.tree.pages[tree.tree.nodes[node, REF] >> SHIFT, 1]) for node in live} == {sequences[2].order}
    tree.remove(sequences[0])
    tree.remove(sequences[1])
    check(tree, [[*range(8), *range(8)]])


def test_clear_forgets_everything() -> None:
    tree = grown([1, 2, 3, 1, 2, 4])
    tree.clear()
    assert (tree.num_nodes, tree.num_pages, tree.num_tokens) == (1, 0, 0)
    assert not len(tree.speculate(array([1, 2]), 8, 1.0, 0.0, 0.1).token_ids)
    tree.append(tree.open(), array([1, 2, 3, 1, 2]))
    assert tree.speculate(array([1, 2]), 8, 1.0, 0.0, 0.1).token_ids.tolist() == [3]


def test_memory() -> None:
    """Random ids, the worst case: under 100 bytes a token with the room to grow; other implementations take 270."""
    tree = SuffixTree(24)
    for seed in range(20):
        tree.append(tree.open(), array(np.random.default_rng(seed).integers(0, 32000, 500)))
    assert tree.nbytes < 100 * tree.num_tokens
