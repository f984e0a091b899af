"""Synthetic acceptance of greedy requests in one launch: what `SyntheticSampler` says in torch."""

# mypy: ignore-errors
# Bodies below are Triton's language, which only looks like typed Python.

import torch
import triton
import triton.language as tl

from specflow.core.draft import Verdict, VerifyInputs
from specflow.kernels.launch_overlap import early_start
from specflow.kernels.pieces import int_pieces
from specflow.kernels.rejection.device_noise import coin
from specflow.kernels.rejection.insert import insert_request
from specflow.kernels.rejection.overlap import let_next_start, wait_for_previous
from specflow.kernels.rejection.workspace import power_of_two
from specflow.kernels.triton_choice import device_of


@triton.jit(
    do_not_specialize_on_alignment=[
        "best", "chances", "cu_rows", "draft_ids", "num_drafts", "positions", "seeds", "token_ids",
    ]
)  # fmt: skip
def accept_kernel(
    best, chances, cu_rows, draft_ids, num_drafts, positions, seeds, token_ids, num_emitted, num_accepted,
    K: tl.constexpr, KP: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid (B,)."""
    let_next_start(OVERLAP)
    wait_for_previous(OVERLAP)
    request, step = tl.program_id(0), tl.arange(0, KP)
    inside = step < tl.minimum(tl.load(num_drafts + request), K)
    draft = tl.load(draft_ids + request * K + step, mask=inside, other=-1)
    chance = tl.load(chances + step, mask=inside, other=0.0)
    tossed = coin(tl.load(seeds + request), tl.load(positions + request) + step)
    accepted = tl.min(tl.where((tossed < chance) & (draft >= 0), KP, step))
    token = tl.load(best + tl.load(cu_rows + request) + accepted)
    insert_request(request, accepted, token, draft_ids, token_ids, num_emitted, num_accepted, K, KP)


def accept_by_chance(best: torch.Tensor, chances: torch.Tensor, inputs: VerifyInputs) -> Verdict:
    """best [N] int64: highest entry of each row of logits; chances [K] float32 of each draft, those before it
    accepted."""
    batch, most = inputs.draft_ids.shape
    tokens, emitted, accepted = int_pieces([batch * (most + 1), batch, batch], best.device)
    early = early_start(best.device)
    with device_of(best):
        accept_kernel[(batch,)](
            best, chances, inputs.cu_rows, inputs.draft_ids.contiguous(), inputs.num_drafts, inputs.positions,
            inputs.seeds, tokens, emitted, accepted,
            K=most, KP=power_of_two(most + 1), OVERLAP=bool(early), num_warps=1, **early,
        )  # fmt: skip
    return Verdict(tokens.view(batch, most + 1), emitted, accepted)
