"""Stage 4, insert: accepted drafts, then the last token, then -1."""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import triton
import triton.language as tl


@triton.jit
def insert_request(request, accepted, token, draft_ids, token_ids, num_emitted, num_accepted,
                   K: tl.constexpr, KP: tl.constexpr):  # fmt: skip
    """One request's rows of token_ids [B, K+1], num_emitted [B] and num_accepted [B], all int64."""
    steps = tl.arange(0, KP)
    draft = tl.load(draft_ids + request * K + steps, mask=steps < accepted, other=-1)
    row = tl.where(steps == accepted, token.to(tl.int64), draft)
    tl.store(token_ids + request * (K + 1) + steps, row, mask=steps <= K)
    tl.store(num_emitted + request, accepted.to(tl.int64) + 1)
    tl.store(num_accepted + request, accepted.to(tl.int64))
