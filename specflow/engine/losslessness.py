"""The proof that speculation changed nothing: outputs against plain decoding, token for token.

In half precision the target's own logits depend on how many tokens a pass holds, so an argmax may flip at a tie. Every
first difference is therefore reported with the gap between the target's two best logits: a gap within a few units in
the last place of the best one is a tie, anything larger is a fault.

Sampled tokens can be compared as well where the sampler promises the same tokens under the same seed (`seed_exact`):
a token is then the argmax of processed logits plus Gumbel noise, and the gap is that between the two best sums. A token
at the border of top-k, top-p or min-p may also flip by rounding; that shows no small gap and counts as a fault.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.engine.laws import processed_logits
from specflow.engine.outputs import RequestOutput
from specflow.kernels.noise import TARGET, gumbel_noise

LATER_TURN = "/turn-"  # between the name of a conversation and the number of its turn, in the name of a request
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
    gap: float | None  # between the two best processed logits there (sampling: noise added); None: cannot be had
    tolerance: float

    @property
    def is_tie(self) -> bool:
        """True when rounding alone explains the difference."""
        return self.gap is not None and self.gap <= self.tolerance


def find_differences(
    engine: Engine, plain: Sequence[RequestOutput], speculative: Sequence[RequestOutput], sampling: SamplingParams
) -> list[Difference]:
    """First differences between two runs of the same prompts; empty when all outputs are equal.

    A later turn of a conversation whose answers differed before has another prompt in each run, so its answers say
    nothing and are passed over (see `comparable`); the earlier difference is in the list.
    """
    differences: list[Difference] = []
    for before, after in zip(plain, speculative, strict=True):
        followed = before.prompt_ids != after.prompt_ids and any(
            _conversation(one.request_id) == _conversation(before.request_id) for one in differences
        )
        if before.token_ids != after.token_ids and not followed:
            differences.append(_examine(engine, before, after, sampling))
    return differences


def comparable(plain: Sequence[RequestOutput], speculative: Sequence[RequestOutput]) -> tuple[int, int]:
    """Requests that had the same prompt in both runs, and the tokens of their speculative outputs."""
    alike = [after for before, after in zip(plain, speculative, strict=True) if before.prompt_ids == after.prompt_ids]
    return len(alike), sum(len(output.token_ids) for output in alike)


def _conversation(request_id: str) -> str:
    return request_id.partition(LATER_TURN)[0]


def _examine(engine: Engine, plain: RequestOutput, speculative: RequestOutput, sampling: SamplingParams) -> Difference:
    position = _first_difference(plain.token_ids, speculative.token_ids)
    gap, tolerance = None, 0.0
    if len(plain.prompt_ids) + position <= engine.limits.max_model_len:
        raw, processed = processed_logits(engine, plain.prompt_ids, [plain.token_ids[:position]], sampling)
        if not sampling.greedy:
            key = torch.tensor([plain.seed]), torch.tensor([len(plain.prompt_ids) + position])
            processed += gumbel_noise(*key, TARGET, processed.shape[1])
        best, second = processed.topk(2).values[0].tolist()
        gap = best - second
        ulp = _ulp(raw.max().item(), engine.limits.dtype)
        tolerance = TIE_ULPS[engine.limits.dtype] * ulp / (sampling.temperature or 1.0)
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
