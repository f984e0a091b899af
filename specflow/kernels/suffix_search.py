"""Speculation from suffix trees: the most likely continuation of the last tokens, and how long to trust it.

The rules are those of suffix decoding (Liu et al., arXiv 2411.04975) as its published implementation has them: for
every match length m that the tree holds, 1 … len(context) - 1, at most int(m * factor + offset + 1e-6) tokens are
drafted as long as their estimated probability is at least `min_prob`; the draft whose probabilities add up to most
wins, and the longer match among equals. Probabilities and sums are float32.
"""

import numpy as np

from specflow.kernels.compiled import compiled
from specflow.kernels.inlined import inlined
from specflow.kernels.suffix_siblings import CHILD, COUNT, LENGTH, NEXT, REF, ROOT
from specflow.kernels.suffix_table import find
from specflow.kernels.suffix_tree import ACTIVE, HEADER, advance


@inlined
def locate(tree, context, length):  # type: ignore[no-untyped-def]
    """Where the last `length` tokens end: node (0: not in the tree), tokens of its label used, next position."""
    node, used, position = ROOT, 0, 0
    for index in range(len(context) - length, len(context)):
        token = context[index]
        if used == tree.nodes[node, LENGTH]:
            node = find(tree, node, token)
            if node == 0:
                return 0, 0, 0
            used, position = 0, tree.nodes[node, REF]
        elif tree.tokens[position] != token:
            return 0, 0, 0
        used += 1
        if used < tree.nodes[node, LENGTH]:
            position = advance(tree.pages, position)
    return node, used, position


@inlined
def follow(tree, node, used, position, min_prob, ids, probs):  # type: ignore[no-untyped-def]
    """Path form: go on with the most frequent child; fills ids [n] and probs [n]. Returns count and score."""
    prob, score, count = np.float32(1.0), np.float32(0.0), 0
    while count < len(ids) and prob >= min_prob:
        if used == tree.nodes[node, LENGTH]:
            child = tree.nodes[node, CHILD]
            if child == 0:
                break
            prob *= np.float32(tree.nodes[child, COUNT]) / np.float32(tree.nodes[node, COUNT])
            node, used, position = child, 0, tree.nodes[child, REF]
            continue
        ids[count], probs[count] = tree.tokens[position], prob
        score += prob
        count += 1
        used += 1
        if used < tree.nodes[node, LENGTH]:
            position = advance(tree.pages, position)
    return count, score


@inlined
def cap_of(length, most, factor, offset):  # type: ignore[no-untyped-def]
    """Most tokens that a match of this length may draft."""
    return max(0, min(most, int(length * factor + offset + 1e-6)))


@inlined
def match_end(tree, writer, context, length):  # type: ignore[no-untyped-def]
    """`locate`, at once where the writer's sequence ends with these tokens: its active suffixes end there."""
    if length <= writer[ACTIVE]:
        node = writer[HEADER + writer[ACTIVE] - length]
        return node, tree.nodes[node, LENGTH], 0
    return locate(tree, context, length)


@inlined
def best_path(tree, writer, context, rules, ids, probs, spare_ids, spare_probs):  # type: ignore[no-untyped-def]
    """Best path of one tree into ids [K] int32 and probs [K] float32; returns count, score and match length."""
    most, factor, offset, min_prob = rules
    best_count, best, match = 0, np.float32(0.0), 0
    for length in range(1, len(context)):
        node, used, position = match_end(tree, writer, context, length)
        if node == 0:
            break
        cap = min(len(ids), cap_of(length, most, factor, offset))
        count, score = follow(tree, node, used, position, min_prob, spare_ids[:cap], spare_probs)
        if score >= best:
            best_count, best, match = count, score, length
            for index in range(count):
                ids[index], probs[index] = spare_ids[index], spare_probs[index]
        elif used == tree.nodes[node, LENGTH] and tree.nodes[node, CHILD] == 0:
            break  # nothing has ever followed, nor can it after more tokens
    return best_count, best, match


@compiled
def speculate_path(tree, writer, context, rules, ids, probs):  # type: ignore[no-untyped-def]
    """Best path of one tree, as `best_path`; rules are most drafts, factor, offset and least probability."""
    return best_path(tree, writer, context, rules, ids, probs, np.empty_like(ids), np.empty_like(probs))


@compiled
def speculate_both(own, own_writer, shared, writer, context, rules, ids, probs):  # type: ignore[no-untyped-def]
    """Best path of two trees, of the first among equals; as `speculate_path`."""
    others, other_probs = np.empty_like(ids), np.empty_like(probs)
    spare_ids, spare_probs = np.empty_like(ids), np.empty_like(probs)
    count, score, match = best_path(own, own_writer, context, rules, ids, probs, spare_ids, spare_probs)
    result = best_path(shared, writer, context, rules, others, other_probs, spare_ids, spare_probs)
    if score >= result[1]:
        return count, score, match
    for index in range(result[0]):
        ids[index], probs[index] = others[index], other_probs[index]
    return result


@inlined
def push_children(tree, node, prob, parent, min_prob, cap, frontier, weights, size):  # type: ignore[no-untyped-def]
    """Add a node's children that reach `min_prob` to the frontier, at most `cap`; returns its size."""
    child, pushed = tree.nodes[node, CHILD], 0
    while child and pushed < cap:
        weight = prob * np.float32(tree.nodes[child, COUNT]) / np.float32(tree.nodes[node, COUNT])
        if weight < min_prob:
            break
        frontier[size, 0], frontier[size, 1] = child, 0
        frontier[size, 2], frontier[size, 3] = tree.nodes[child, REF], parent
        weights[size] = weight
        size, pushed, child = size + 1, pushed + 1, tree.nodes[child, NEXT]
    return size


@inlined
def expand(tree, node, used, position, min_prob, ids, parents, probs, frontier, weights):  # type: ignore[no-untyped-def]
    """Tree form: always the most probable next token; parents [n] is -1 at the context. Returns count and score.

    The frontier holds (node, tokens of its label used, position, parent); each drafted token opens at most n entries.
    """
    cap, size, count, score = len(ids), 1, 0, np.float32(0.0)
    frontier[0, 0], frontier[0, 1], frontier[0, 2], frontier[0, 3] = node, used, position, -1
    weights[0] = 1.0
    while size > 0 and count < cap:
        top = 0
        for entry in range(1, size):  # among equals the one nearest to the context
            older = weights[entry] == weights[top] and frontier[entry, 3] < frontier[top, 3]
            if weights[entry] > weights[top] or older:
                top = entry
        node, used, position, parent = frontier[top, 0], frontier[top, 1], frontier[top, 2], frontier[top, 3]
        prob = weights[top]
        if used == tree.nodes[node, LENGTH]:
            size -= 1
            weights[top] = weights[size]
            for column in range(4):
                frontier[top, column] = frontier[size, column]
            size = push_children(tree, node, prob, parent, min_prob, cap, frontier, weights, size)
            continue
        ids[count], parents[count], probs[count] = tree.tokens[position], parent, prob
        frontier[top, 1], frontier[top, 3] = used + 1, count
        if used + 1 < tree.nodes[node, LENGTH]:
            frontier[top, 2] = advance(tree.pages, position)
        score += prob
        count += 1
    return count, score


@compiled
def speculate_tree(tree, writer, context, rules, ids, parents, probs):  # type: ignore[no-untyped-def]
    """As `speculate_path` with a tree of drafts: parents [K] int32 are indices into ids, -1 at the context."""
    most, factor, offset, min_prob = rules
    best_count, best, match = 0, np.float32(0.0), 0
    found, found_parents, found_probs = np.empty_like(ids), np.empty_like(parents), np.empty_like(probs)
    room = (2 * len(ids) + 1) * len(ids) + 2
    frontier, weights = np.empty((room, 4), np.int64), np.empty(room, np.float32)
    for length in range(1, len(context)):
        node, used, position = match_end(tree, writer, context, length)
        if node == 0:
            break
        cap = min(len(ids), cap_of(length, most, factor, offset))
        count, score = expand(
            tree, node, used, position, min_prob, found[:cap], found_parents, found_probs, frontier, weights
        )
        if score >= best:
            best_count, best, match = count, score, length
            ids[:count], parents[:count], probs[:count] = found[:count], found_parents[:count], found_probs[:count]
    return best_count, best, match
