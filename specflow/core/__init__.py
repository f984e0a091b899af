"""The data that every room shares: sampling options, requests, the packed batch, drafts and verdicts.

Letters used in every shape comment: B requests of a step, T packed tokens, N logits rows, K drafts, V vocabulary,
H heads, D head size, E hidden size, S key positions, M tokens a request may have.
*p* is always the target's distribution, *q* the one the draft was drawn from.
"""
