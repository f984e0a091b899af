"""Checks of what a proposer keeps: starts and ends, slots that change hands, nothing of what was rolled back.

All raise AssertionError.
"""

import itertools
from collections.abc import Generator, Sequence

from specflow.engine.engine import Engine
from specflow.engine.outputs import RequestOutput
from specflow.testing.conformance import assert_same
from specflow.testing.output_checks import assert_contract
from specflow.testing.subject import PROMPTS, Subject, greedy
from specflow.testing.wrappers import Watched

__all__ = [
    "check_abort",
    "check_drafts_follow_the_text",
    "check_pre_emption",
    "check_reset",
    "check_two_engines",
]

_COMPARED = 12  # moments of a run that are compared with a fresh start


def check_pre_emption(subject: Subject) -> None:
    """Requests that lose their blocks and start anew: `start` and `finish` pair, output stays the same."""
    blocks = subject.engine().limits.max_blocks_per_seq + 1  # one request at full length, and hardly more
    engine = subject.engine(Watched, num_kv_blocks=blocks)
    outputs = engine.generate(PROMPTS, greedy(44))
    assert_same(subject.plain(PROMPTS, greedy(44)), outputs)
    watched = _watched(engine)
    pre_empted = watched.num_starts - len(PROMPTS)
    assert pre_empted > 0, "no request was pre-empted: the check is not what it says"
    _assert_ends(watched, outputs)
    assert_contract(engine)


def check_abort(subject: Subject) -> None:
    """An aborted request is finished with the tokens it has; the others, and the next, are as if it had not been."""
    engine = subject.engine(Watched)
    names = [f"abort-{index}" for index in range(len(PROMPTS))]
    plain = subject.plain(PROMPTS, greedy(16))
    steps: list[int] = []

    def stop(_: object) -> None:
        steps.append(1)
        if len(steps) == 3:
            engine.abort(names[1])

    found = engine.generate(PROMPTS, greedy(16), request_ids=names, on_step=stop)
    assert len(found[1].token_ids) < 16, "the request ended before it was aborted: the check is not what it says"
    assert found[1].token_ids == plain[1].token_ids[: len(found[1].token_ids)]
    others = (0, 2, 3)
    assert_same([plain[row] for row in others], [found[row] for row in others])
    _assert_ends(_watched(engine), found)
    stream = engine.stream(PROMPTS, greedy(16))
    next(stream)
    assert isinstance(stream, Generator)
    stream.close()  # everything that ran is abandoned
    assert_contract(engine)
    assert_same(plain, engine.generate(PROMPTS, greedy(16), request_ids=names))
    assert_contract(engine)


def check_reset(subject: Subject) -> None:
    """After `reset` the same requests get the same drafts again: nothing of the first pass is remembered."""
    engine = subject.engine(Watched)
    watched, passes = _watched(engine), []
    names = [f"pass-{index}" for index in range(len(PROMPTS))]
    for _ in range(2):
        watched.asked.clear()
        watched.ended.clear()
        engine.generate(PROMPTS, greedy(16), request_ids=names)
        passes.append(list(watched.asked))
        assert engine.proposer is not None
        engine.proposer.reset()
    first, second = passes
    for one, again in zip(first, second, strict=False):
        assert one == again, (
            f"after reset() the drafts differ from the first pass: {one.drafts} became {again.drafts} behind the same "
            f"{len(one.tokens)} tokens. reset() must forget what was learnt from requests that have ended."
        )
    assert len(first) == len(second)


def check_two_engines(subject: Subject, same_drafts: bool = True) -> None:
    """Two engines in one process take turns: no state is shared by way of the class or the module.

    same_drafts: each also gets the drafts it gets alone.
    """
    names = ["first", "second"]
    alone = subject.engine(Watched)
    expected = alone.generate(PROMPTS[:2], greedy(16), request_ids=names)
    engines = [subject.engine(Watched), subject.engine(Watched)]
    ids: list[list[list[int]]] = [[[], []], [[], []]]
    streams = [engine.stream(PROMPTS[:2], greedy(16)) for engine in engines]
    for chunks in itertools.zip_longest(*streams):
        for found, chunk in zip(ids, chunks, strict=True):
            if chunk is not None:
                found[chunk.index] += chunk.token_ids
    for engine, found in zip(engines, ids, strict=True):
        assert found == [list(one.token_ids) for one in expected], "two engines in one process disturb each other"
        drafts, wanted = ([(one.tokens, one.drafts) for one in _watched(each).asked] for each in (engine, alone))
        assert drafts == wanted or not same_drafts, "two engines in one process change each other's drafts"
        assert_contract(engine)


def check_drafts_follow_the_text(subject: Subject) -> None:
    """In the middle of a run, after rejections, a request gets the drafts it would get if its text were a new prompt.

    Anything else is a trace of tokens that were rolled back, or of another request. The sampler here accepts the
    proposer's drafts by chance, so that all numbers of accepted drafts occur however good they are.
    """
    k = subject.num_drafts
    rates = [0.85 - 0.5 * draft / k for draft in range(k)]
    engine = subject.engine(Watched, sampler="synthetic", sampler_options={"synthetic_acceptance_rates": rates})
    engine.generate(PROMPTS, [greedy(24, seed=seed) for seed in range(len(PROMPTS))])
    moments = [one for one in _watched(engine).asked if one.max_drafts == k and not one.ended_before]
    moments = moments[:: max(1, len(moments) // _COMPARED)][:_COMPARED]
    assert moments, "no request could use all K drafts: the check is not what it says"
    fresh = subject.engine(Watched, max_num_seqs=_COMPARED, max_num_batched_tokens=2048)
    watched = _watched(fresh)
    # The target chose the last token of every text, so it chooses it again behind the others.
    names = [f"moment-{index}" for index in range(len(moments))]
    fresh.generate([list(one.tokens[:-1]) for one in moments], greedy(k + 2), request_ids=names)
    for name, moment in zip(names, moments, strict=True):
        begun = next(one for one in watched.asked if one.request_id == name and one.max_drafts)
        assert begun.tokens == moment.tokens
        assert begun.drafts == moment.drafts, (
            f"behind the same {len(moment.tokens)} tokens a running request gets the drafts {list(moment.drafts)}, a "
            f"new one {list(begun.drafts)}: something of rejected drafts or of other requests is left. If drafts are "
            "meant to depend on more than the text, set drafts_follow_the_text = False."
        )


def _assert_ends(watched: Watched, outputs: Sequence[RequestOutput]) -> None:
    """Every output was announced by the last `finish` of its request; earlier ones are its beginnings."""
    texts = {one.request_id: (*one.prompt_ids, *one.token_ids) for one in outputs}
    last: dict[str, tuple[int, ...]] = {}
    for end in watched.ended:
        whole = texts[end.request_id]
        assert end.tokens == whole[: len(end.tokens)], f"finish({end.request_id!r}) came with tokens of another text"
        last[end.request_id] = end.tokens
    for name, whole in texts.items():
        assert last.get(name) == whole, f"the last finish({name!r}) did not bring all of its tokens"


def _watched(engine: Engine) -> Watched:
    assert isinstance(engine.proposer, Watched)
    return engine.proposer
