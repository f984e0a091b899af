"""Log-probabilities of output tokens, from the target's raw logits (vLLM's `raw_logprobs`)."""

import torch

from specflow.core.request import Request, TokenLogprobs
from specflow.engine.border import read_logprobs


def append_logprobs(request: Request, raw_rows: torch.Tensor, token_ids: list[int]) -> None:
    """Add one entry per kept token; raw_rows [n, V] are the unprocessed logits that produced token_ids ([n])."""
    if request.sampling.logprobs is None:
        return
    logits = raw_rows[: len(token_ids)].float()
    logprobs = torch.log_softmax(logits, -1)
    chosen = logprobs.gather(1, torch.tensor(token_ids, device=logprobs.device).unsqueeze(1)).squeeze(1)
    values, ids = logprobs.topk(min(request.sampling.logprobs, logprobs.shape[1]), dim=-1)
    host = read_logprobs(chosen, logits.amax(-1), values, ids)
    for one, highest, top_values, top_ids in zip(*host, strict=True):
        request.logprobs.append(TokenLogprobs(one, highest, tuple(zip(top_ids, top_values, strict=True))))
