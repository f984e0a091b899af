"""The proof that speculation changed nothing: greedy outputs against plain decoding, token for token.

In half precision the target's own logits depend on how many tokens a pass holds, so an argmax may flip at a tie. Every
first difference is therefore reported with the gap between the target's two best logits: a gap within a few units in
the last place of the best one is a tie, anything larger is a fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.engine.outputs import RequestOutput

# Units in the last place of the highest logit within which two logits count as equal. Float32 sums of a few thousand
# products differ by tens of units between matrix shapes; in half precision the rounding of the output itself dominates.
TIE_ULPS = {torch.float32: 64, torch.float16: 2, torch.bfloat16: 2}


@dataclass(frozen=True)
class Difference:
    """The first token at which two outputs of one request differ."""

    request_id: str
    position: int  # index in the output
    plain_token: int | None  # None: the output had ended
    speculative_token: int | None
    gap: float | None  # between the two best raw logits there; None when it cannot be had
    tolerance: float

    @property
    def is_tie(self) -> bool:
        """True when rounding alone explains the difference."""
        return self.gap is not None and self.gap <= self.tolerance


def find_differences(
    engine: Engine, plain: Sequence[RequestOutput], speculative: Sequence[RequestOutput], sampling: SamplingParams
) -> list[Difference]:
    """First differences between two runs of the same prompts; empty when all outputs are equal."""
    differences = []
    for before, after in zip(plain, speculative, strict=True):
        if before.token_ids != after.token_ids:
            differences.append(_examine(engine, before, after, sampling))
    return differences


def _examine(engine: Engine, plain: RequestOutput, speculative: RequestOutput, sampling: SamplingParams) -> Difference:
    position = _first_difference(plain.token_ids, speculative.token_ids)
    prefix = list(plain.prompt_ids + plain.token_ids[:position])
    gap, tolerance = None, 0.0
    raw = not (sampling.has_penalties or sampling.logit_bias or sampling.bad_words or sampling.min_tokens)
    if raw and len(prefix) <= engine.limits.max_model_len:
        probe = SamplingParams(max_tokens=1, logprobs=2)
        row = engine.generate([prefix], probe, speculate=False)[0].logprobs[0]
        gap = row.top[0][1] - row.top[1][1]
        tolerance = TIE_ULPS[engine.limits.dtype] * _ulp(row.max_logit, engine.limits.dtype)
    return Difference(
        plain.request_id,
        position,
        _at(plain.token_ids, position),
        _at(speculative.token_ids, position),
        gap,
        tolerance,
    )


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    for index, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return index
    return min(len(first), len(second))


def _at(ids: Sequence[int], position: int) -> int | None:
    return ids[position] if position < len(ids) else None


def _ulp(value: float, dtype: torch.dtype) -> float:
    """Distance between neighbouring numbers of the dtype near value."""
    return float(torch.finfo(dtype).eps) * 2.0 ** torch.tensor(abs(value)).clamp(min=2**-14).log2().floor().item()
