"""Stop rules, applied token by token inside an accepted run; everything behind a stop is dropped."""

from collections.abc import Sequence

from specflow.core.request import FinishReason, Request
from specflow.engine.detokenizer import Detokenizer


def append_tokens(request: Request, new_ids: Sequence[int], max_model_len: int, detokenizer: Detokenizer | None) -> int:
    """Append emitted ids to the request until a stop rule holds; returns how many were kept (at least one).

    Order of the rules: EOS and stop ids, stop strings, then length. A detokenizer is given when text is needed while
    the request runs; stop strings need one.
    """
    for count, token_id in enumerate(new_ids, start=1):
        request.output_ids.append(token_id)
        if detokenizer is not None:
            detokenizer.add(token_id)
        request.finish_reason = _reason(request, token_id, max_model_len, detokenizer)
        if request.finish_reason is not None:
            return count
    return len(new_ids)


def _reason(
    request: Request, token_id: int, max_model_len: int, detokenizer: Detokenizer | None
) -> FinishReason | None:
    past_minimum = len(request.output_ids) >= request.sampling.min_tokens
    if token_id in request.stop_ids and past_minimum:
        return FinishReason.STOP
    if request.sampling.stop and past_minimum and detokenizer is not None and detokenizer.cut_at_stop(request.sampling):
        return FinishReason.STOP
    if len(request.output_ids) >= request.sampling.max_tokens or request.num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return None
