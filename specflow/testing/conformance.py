"""Checks that every proposer has to pass; each raises AssertionError with what went wrong."""

from collections.abc import Callable, Sequence
from typing import Any

from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.engine.outputs import RequestOutput

EngineFactory = Callable[..., Engine]


def assert_idle(engine: Engine) -> None:
    """Nothing is left behind: every block and slot is free again."""
    assert list(engine.scheduler.check_idle()) == []


def assert_same(first: Sequence[RequestOutput], second: Sequence[RequestOutput]) -> None:
    """Tokens, text and finish reasons are equal, request by request."""
    for one, other in zip(first, second, strict=True):
        assert one.token_ids == other.token_ids, (
            f"request {one.request_id}: {list(one.token_ids)} != {list(other.token_ids)}"
        )
        assert (one.text, one.finish_reason) == (other.text, other.finish_reason)


def assert_lossless(
    engine: Engine,
    prompts: Sequence[Any],
    sampling: SamplingParams | Sequence[SamplingParams],
    **options: Any,
) -> list[RequestOutput]:
    """Greedy output with speculation equals plain decoding by the same engine, which ends idle."""
    plain = engine.generate(prompts, sampling, speculate=False, **options)
    speculative = engine.generate(prompts, sampling, **options)
    assert_same(plain, speculative)
    assert_idle(engine)
    return speculative


def assert_lossless_at_every_length(
    make_engine: EngineFactory, prompts: Sequence[Any], sampling: SamplingParams, lengths: Sequence[int] = (1, 2, 3, 8)
) -> None:
    """`assert_lossless` for several numbers of drafts, in one batch and one by one."""
    for length in lengths:
        engine = make_engine(num_speculative_tokens=length)
        assert_lossless(engine, prompts, sampling)
        assert_lossless(engine, prompts, sampling, concurrency=1)
