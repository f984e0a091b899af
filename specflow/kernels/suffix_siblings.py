"""Lists of sibling nodes in non-increasing count, with a step to a neighbouring count in constant time.

Part of the suffix tree of `specflow.kernels.suffix_tree`, which explains its arrays. Siblings of one count stand next
to each other and form a group as soon as there are two. The order among equal counts follows the published
implementation of suffix decoding: a new child goes last; a node whose count rises goes in front of the next group when
it was the first of its own, else behind it. Children of the root are looked up by token only and are in no list.
"""

from specflow.kernels.inlined import inlined

ROOT = 1
COUNT, REF, LENGTH, PARENT, CHILD, NEXT, PREV, GROUP = range(8)  # columns of nodes [capacity, 8] int32
HEAD, TAIL, SIZE = range(3)  # columns of groups [capacity, 3] int32
# Entries of meta [9] int64: rows ever used, head of the list of free rows and rows in use, of each pool.
NODES_TOP, NODES_FREE, NODES_LIVE, PAGES_TOP, PAGES_FREE, PAGES_LIVE, GROUPS_TOP, GROUPS_FREE, GROUPS_LIVE = range(9)


@inlined
def take(pool, meta, top):  # type: ignore[no-untyped-def]
    """A row of a pool [capacity, columns]; free rows are linked through column 0. The caller has made room."""
    row = meta[top + 1]
    if row:
        meta[top + 1] = pool[row, 0]
    else:
        row = meta[top]
        meta[top] += 1
    meta[top + 2] += 1
    return row


@inlined
def give(pool, meta, top, row):  # type: ignore[no-untyped-def]
    """Put a row back."""
    pool[row, 0] = meta[top + 1]
    meta[top + 1] = row
    meta[top + 2] -= 1


@inlined
def append_sibling(nodes, parent, node):  # type: ignore[no-untyped-def]
    """Make a node the last child; PREV of the first child is the last one."""
    head = nodes[parent, CHILD]
    nodes[node, NEXT] = 0
    if head == 0:
        nodes[parent, CHILD] = node
        nodes[node, PREV] = node
        return
    tail = nodes[head, PREV]
    nodes[tail, NEXT] = node
    nodes[node, PREV] = tail
    nodes[head, PREV] = node


@inlined
def insert_before(nodes, parent, node, other):  # type: ignore[no-untyped-def]
    """Put a detached node in front of `other`."""
    before = nodes[other, PREV]
    nodes[node, PREV] = before
    nodes[node, NEXT] = other
    nodes[other, PREV] = node
    if nodes[parent, CHILD] == other:
        nodes[parent, CHILD] = node
    else:
        nodes[before, NEXT] = node


@inlined
def detach(nodes, parent, node):  # type: ignore[no-untyped-def]
    """Take a node out of its list."""
    head, after, before = nodes[parent, CHILD], nodes[node, NEXT], nodes[node, PREV]
    if head == node:
        nodes[parent, CHILD] = after
        if after:
            nodes[after, PREV] = before
    else:
        nodes[before, NEXT] = after
        nodes[after if after else head, PREV] = before


@inlined
def substitute(nodes, groups, parent, old, new):  # type: ignore[no-untyped-def]
    """Let `new`, which is in no list, stand where `old` stands; `old` is in no list then."""
    after, before, group = nodes[old, NEXT], nodes[old, PREV], nodes[old, GROUP]
    nodes[new, NEXT] = after
    nodes[new, PREV] = new if before == old else before
    if nodes[parent, CHILD] == old:
        nodes[parent, CHILD] = new
    else:
        nodes[before, NEXT] = new
    nodes[after if after else nodes[parent, CHILD], PREV] = new
    nodes[new, GROUP] = group
    nodes[old, GROUP] = 0
    if group and groups[group, HEAD] == old:
        groups[group, HEAD] = new
    if group and groups[group, TAIL] == old:
        groups[group, TAIL] = new


@inlined
def join_group(nodes, groups, meta, node, other, front):  # type: ignore[no-untyped-def]
    """Make a node that stands beside the group of `other` its first or last member."""
    group = nodes[other, GROUP]
    if group == 0:
        group = take(groups, meta, GROUPS_TOP)
        groups[group, HEAD] = groups[group, TAIL] = other
        groups[group, SIZE] = 1
        nodes[other, GROUP] = group
    groups[group, HEAD if front else TAIL] = node
    groups[group, SIZE] += 1
    nodes[node, GROUP] = group


@inlined
def leave_group(nodes, groups, meta, node):  # type: ignore[no-untyped-def]
    """Take a node, still in its list, out of its group; a group of one is no group."""
    group = nodes[node, GROUP]
    if group == 0:
        return
    nodes[node, GROUP] = 0
    if groups[group, HEAD] == node:
        groups[group, HEAD] = nodes[node, NEXT]
    elif groups[group, TAIL] == node:
        groups[group, TAIL] = nodes[node, PREV]
    groups[group, SIZE] -= 1
    if groups[group, SIZE] == 1:
        nodes[groups[group, HEAD], GROUP] = 0
        give(groups, meta, GROUPS_TOP, group)


@inlined
def add_child(nodes, groups, meta, parent, node):  # type: ignore[no-untyped-def]
    """Enter a new child of count 1 at the end."""
    nodes[node, GROUP] = 0
    if parent == ROOT:
        return
    append_sibling(nodes, parent, node)
    before = nodes[node, PREV]
    if before != node and nodes[before, COUNT] == 1:
        join_group(nodes, groups, meta, node, before, False)


@inlined
def drop_child(nodes, groups, meta, node):  # type: ignore[no-untyped-def]
    """Take a node out of its parent's list."""
    parent = nodes[node, PARENT]
    if parent != ROOT:
        leave_group(nodes, groups, meta, node)
        detach(nodes, parent, node)


@inlined
def raise_count(nodes, groups, meta, node):  # type: ignore[no-untyped-def]
    """Add one to a node's count and move it among its siblings."""
    parent, count = nodes[node, PARENT], nodes[node, COUNT]
    nodes[node, COUNT] = count + 1
    if parent == ROOT:
        return
    before = 0 if nodes[parent, CHILD] == node else nodes[node, PREV]
    if before == 0 or nodes[before, COUNT] > count + 1:
        leave_group(nodes, groups, meta, node)
    elif nodes[before, COUNT] == count + 1:  # first of its group: it overtakes the whole next one
        leave_group(nodes, groups, meta, node)
        detach(nodes, parent, node)
        group = nodes[before, GROUP]
        insert_before(nodes, parent, node, groups[group, HEAD] if group else before)
        join_group(nodes, groups, meta, node, before, True)
    else:  # behind those that were there already
        first = groups[nodes[node, GROUP], HEAD]
        leave_group(nodes, groups, meta, node)
        detach(nodes, parent, node)
        insert_before(nodes, parent, node, first)
        before = 0 if nodes[parent, CHILD] == node else nodes[node, PREV]
        if before and nodes[before, COUNT] == count + 1:
            join_group(nodes, groups, meta, node, before, False)


@inlined
def lower_count(nodes, groups, meta, node):  # type: ignore[no-untyped-def]
    """Take one from a count above 1: the node goes right behind its group, in front of the next."""
    parent, count = nodes[node, PARENT], nodes[node, COUNT]
    nodes[node, COUNT] = count - 1
    if parent == ROOT:
        return
    group = nodes[node, GROUP]
    last = groups[group, TAIL] if group else node
    leave_group(nodes, groups, meta, node)
    after = nodes[last, NEXT]
    if last != node:
        detach(nodes, parent, node)
        if after:
            insert_before(nodes, parent, node, after)
        else:
            append_sibling(nodes, parent, node)
    if after and nodes[after, COUNT] == count - 1:
        join_group(nodes, groups, meta, node, after, True)
