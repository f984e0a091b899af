"""Checks of the output: it is plain decoding's, whatever is drafted, accepted, stopped or cut."""

import dataclasses
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from specflow.core.request import FinishReason
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.engine.outputs import RequestOutput
from specflow.testing.conformance import assert_idle, assert_same
from specflow.testing.proofs import prove_law
from specflow.testing.statistics import ALPHA
from specflow.testing.subject import PROMPTS, Subject, greedy
from specflow.testing.wrappers import Steered, Watched

__all__ = [
    "check_context_and_budget",
    "check_every_length",
    "check_ragged_batches",
    "check_request_options",
    "check_rollback",
    "check_sampled_law",
    "check_sampled_tokens",
    "check_stop_rules",
]

ALL = 10**6  # more drafts than there are: all of them


def check_every_length(subject: Subject, lengths: Sequence[int], must_draft: bool) -> None:
    """Greedy output is plain decoding's for every K, in a batch and one by one; shapes are the contract's."""
    plain = subject.plain(PROMPTS, greedy(16))
    for length in lengths:
        engine = subject.engine(Watched, num_drafts=length)
        outputs = engine.generate(PROMPTS, greedy(16))
        assert_same(plain, outputs)
        assert_same(plain[:2], engine.generate(PROMPTS[:2], greedy(16), concurrency=1))
        assert_contract(engine)
        most = engine.limits.num_speculative_tokens
        assert most == length, f"K={length} was asked for, but proposer.num_speculative_tokens is {most}"
        drafted = sum(output.drafted for output in outputs)
        assert drafted or not must_draft, (
            f"nothing was drafted with K={length} on {len(PROMPTS)} prompts with repeats: the checks would say little. "
            "Choose options that draft, or set must_draft = False if that is as it should be."
        )


def check_ragged_batches(subject: Subject) -> None:
    """Requests of all lengths come, stop and go in one batch, in chunks; each gets what it gets alone."""
    prompts = [[(3 * i + 7 * j) % 60 + 2 for i in range(1 + 3 * j)] for j in range(7)] + PROMPTS
    each = [greedy(3 + 4 * (index % 4)) for index in range(len(prompts))]
    each[1] = each[6] = SamplingParams(max_tokens=9, temperature=1.0, seed=1, ignore_eos=True)  # among greedy ones
    plain = subject.plain(prompts, each)
    engine = subject.engine(Watched, max_num_seqs=3, max_num_batched_tokens=13)
    rows = [index for index, one in enumerate(each) if one.greedy]
    for order in (range(len(prompts)), rows[::-2] + rows[-2::-2]):
        found = engine.generate([prompts[row] for row in order], [each[row] for row in order])
        pairs = [(plain[row], one) for row, one in zip(order, found, strict=True) if row in rows]
        assert_same([one for one, _ in pairs], [one for _, one in pairs])
    assert_contract(engine)


def check_rollback(subject: Subject) -> None:
    """The output stays right when the target accepts nothing, a part, or all of what was drafted."""
    engine, steered = steered_engine(subject)
    names = [f"steered-{index}" for index in range(len(PROMPTS))]
    plain = learn(subject, steered, [greedy(16)] * len(PROMPTS), names)
    most = engine.limits.num_speculative_tokens
    plans: dict[str, Callable[[str, int], int]] = {
        "nothing": lambda name, call: 0,
        "all drafts": lambda name, call: ALL,
        "a changing part": lambda name, call: (zlib.crc32(name.encode()) + 5 * call) % (most + 2),
    }
    for what, plan in plans.items():
        steered.accept = plan
        found = engine.generate(PROMPTS, greedy(16), request_ids=names)
        try:
            assert_same(plain, found)
        except AssertionError as error:
            raise AssertionError(f"when {what} of a round is accepted: {error}") from None
        drafted, accepted = sum(one.drafted for one in found), sum(one.accepted for one in found)
        assert what != "all drafts" or accepted == drafted > 0
        assert what != "nothing" or accepted == 0 < drafted
    assert_contract(engine)


def check_stop_rules(subject: Subject) -> None:
    """EOS list, stop ids, stop strings, max_tokens, min_tokens, ignore_eos: inside, at the end of, behind a block."""
    engine, steered = steered_engine(subject, max_num_seqs=16, max_num_batched_tokens=256)
    cases = _stop_cases(engine, subject.plain(PROMPTS[:2], greedy(24)))
    names = [f"stop-{index}" for index in range(len(cases))]
    prompts = [PROMPTS[place] for place, _, _ in cases]
    each = [sampling for _, sampling, _ in cases]
    plain = learn(subject, steered, each, names, prompts)
    for one, (_, sampling, reason) in zip(plain, cases, strict=True):
        assert one.finish_reason is reason, f"{sampling} ended by {one.finish_reason}: the check is not what it says"
    assert_same(plain, engine.generate(prompts, each, request_ids=names))
    steered.accept = lambda name, call: (zlib.crc32(name.encode()) + call) % 3
    assert_same(plain, engine.generate(prompts, each, request_ids=names))
    assert_contract(engine)


def _stop_cases(engine: Engine, free: Sequence[RequestOutput]) -> list[tuple[int, SamplingParams, FinishReason]]:
    """Prompt number, options and how plain decoding ends."""
    stop, length = FinishReason.STOP, FinishReason.LENGTH
    cases = [(0, greedy(limit), length) for limit in range(6)]
    for place, one in enumerate(free):
        token = one.token_ids[2 + place]
        cases.append((place, greedy(12, stop_token_ids=[token]), stop))
        cases.append((place, greedy(12, stop_token_ids=[one.token_ids[-1], one.token_ids[5]]), stop))
        cases.append((place, greedy(12, stop_token_ids=[token], min_tokens=7, logit_bias={token: 20.0}), stop))
        text = one.text[2:]
        readable = [text[at : at + 2] for at in range(len(text) - 1) if "\ufffd" not in text[at : at + 2]]
        for word in readable[:1]:
            cases.append((place, greedy(24, stop=[word]), stop))
            cases.append((place, greedy(24, stop=[word], include_stop_str_in_output=True), stop))
        for end in engine.target.facts.eos_token_ids:
            biased = {"logit_bias": {end: 20.0}}
            cases.append((place, greedy(12, ignore_eos=False, **biased), stop))
            cases.append((place, greedy(12, ignore_eos=False, min_tokens=5, **biased), stop))
            cases.append((place, greedy(7, **biased), length))
    return cases


def check_context_and_budget(subject: Subject) -> None:
    """K is cut at the end of the context and by the budget of a step; output and reason are plain decoding's."""
    engine, steered = steered_engine(subject)
    most, k = engine.limits.max_model_len, engine.limits.num_speculative_tokens
    prompts = [[(7 * i) % 60 + 2 for i in range(most - left)] for left in (0, 1, 2, k, k + 1, k + 2, 2 * k + 3)]
    names = [f"end-{index}" for index in range(len(prompts))]
    plain = learn(subject, steered, [greedy(30)] * len(prompts), names, prompts)
    found = engine.generate(prompts, greedy(30), request_ids=names)
    assert_same(plain, found)
    assert all(one.finish_reason is FinishReason.LENGTH for one in found)
    assert_contract(engine)
    own = subject.engine(Watched)
    assert_same(plain, own.generate(prompts, greedy(30)))
    assert_contract(own)
    for each in (engine, own):
        assert isinstance(each.proposer, Watched)
        for one in each.proposer.asked:
            room = most - len(one.tokens) - 1
            assert one.max_drafts <= max(room, 0), f"{one.max_drafts} drafts were asked for with room for {room}"
    tight = subject.engine(Watched, max_num_seqs=4, max_num_batched_tokens=4 + k)  # one request's drafts fit, not all
    assert_same(subject.plain(PROMPTS, greedy(16)), tight.generate(PROMPTS, greedy(16)))
    assert_contract(tight)


def check_request_options(subject: Subject) -> None:
    """Penalties, biases and bans act on the target's rows alone; mixed in one batch."""
    each = [
        greedy(16, repetition_penalty=1.3),
        greedy(16, frequency_penalty=0.5, min_tokens=5, ignore_eos=False),
        greedy(16, logit_bias={3: 4.0, 7: float("-inf")}),
        greedy(16, presence_penalty=0.7, logprobs=2),
    ]
    engine = subject.engine(Watched)
    assert_same(subject.plain(PROMPTS, each), engine.generate(PROMPTS, each))
    assert_contract(engine)


def check_sampled_tokens(subject: Subject) -> None:
    """With `sampler=coupled` the sampled tokens of a seed are plain decoding's, whatever was drafted."""
    each = [
        SamplingParams(max_tokens=16, ignore_eos=True, temperature=temperature, seed=seed, top_k=top_k)
        for seed, (temperature, top_k) in enumerate([(0.3, 0), (0.7, 20), (1.0, 0), (1.5, 5)])
    ]
    engine = subject.engine(Watched, sampler="coupled")
    assert_same(subject.plain(PROMPTS, each, "coupled"), engine.generate(PROMPTS, each))
    assert_contract(engine)


def check_sampled_law(subject: Subject, must_draft: bool = True, num_samples: int = 400, alpha: float = ALPHA) -> None:
    """With `sampler=standard` three sampled tokens follow the target's exact joint law (chi-square).

    The first is sampled before anything is drafted, the second is where a draft is judged, the third follows it. The
    law is biased to tokens of the prompt, so that drafts from the text are possible. Where drafts come with the law
    they were drawn from, the whole vocabulary is sampled as well, so that it matters.
    """
    engine = subject.engine(max_num_seqs=64, max_num_batched_tokens=2048)
    prompt = PROMPTS[0]
    biased = SamplingParams(temperature=2.0, top_k=4, logit_bias=dict.fromkeys(set(prompt), 60.0))
    assert engine.proposer is not None
    samplings = [biased, SamplingParams(temperature=1.0)] if engine.proposer.requirements().draft_logits else [biased]
    for sampling in samplings:
        proof = prove_law(engine, prompt, sampling, num_samples=num_samples, num_tokens=3, first_seed=1, alpha=alpha)
        text = "; ".join(f"{what}: {gate.sentence()}" for what, gate in proof.gates.items() if not gate.passed)
        assert proof.passed, f"sampled output does not follow the target's law ({proof.impossible} impossible): {text}"
        assert proof.drafted or not must_draft, "nothing was drafted where tokens are sampled: the check says little"


# -- steering ------------------------------------------------------------------------------------------------------
def steered_engine(subject: Subject, **scheduler: Any) -> tuple[Engine, Steered]:
    """An engine whose drafts are overwritten by a `Steered`; its texts are still to be learnt."""
    engine = subject.engine(lambda proposer: Steered(proposer, {}, lambda name, call: ALL), **scheduler)
    assert isinstance(engine.proposer, Steered)
    return engine, engine.proposer


def learn(
    subject: Subject,
    steered: Steered,
    each: Sequence[SamplingParams],
    names: Sequence[str],
    prompts: Sequence[Sequence[int]] = PROMPTS,
) -> list[RequestOutput]:
    """Plain outputs under these options; the steered proposer knows them, and what would have followed a stop."""
    plain = subject.plain(prompts, each)
    free = [dataclasses.replace(one, stop=(), stop_token_ids=(), ignore_eos=True, min_tokens=0) for one in each]
    longer = [dataclasses.replace(one, max_tokens=one.max_tokens + 8) for one in free]
    endless = subject.plain(prompts, longer)
    for name, one, more in zip(names, plain, endless, strict=True):
        follows = more.token_ids[: len(one.token_ids)] == one.token_ids
        steered.texts[name] = [*one.prompt_ids, *(more if follows else one).token_ids]
    return plain


def assert_contract(engine: Engine) -> None:
    """No breach of the contract was seen, and nothing is left behind."""
    assert_idle(engine)
    proposer = engine.proposer
    assert isinstance(proposer, Watched)
    assert not proposer.problems, "\n".join(dict.fromkeys(proposer.problems))
    assert not proposer.running, f"requests that never got finish(): {sorted(proposer.running)}"
    assert not engine.incidents, f"the engine had to put up with: {dict(engine.incidents)}"
