"""Rejection sampling on a GPU: block statistics, rejection, two-level Gumbel draw, insert, in two or four launches.

Nothing of size [N, V] is written and nothing is read twice but the rows whose sampled draft was rejected. Every stage
stands in its own file; `reference` holds the same stages in plain torch. Triton is imported by the kernel files alone,
so that this package can be imported without it.

    block_stats_kernel   1 block statistics
    reject_kernel        2 rejection; only where drafts were sampled, as is the next
    masses_kernel        3a masses of the last token's law
    finish_kernel        2 rejection unless done, 3b draw of a chunk and of an id inside it, 4 insert
"""
