"""Proofs about a whole engine: equal tokens where they must be equal, the exact law where tokens are sampled."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specflow.core.draft import Draft
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.engine.laws import processed_logits
from specflow.engine.losslessness import Difference, find_differences
from specflow.engine.prompts import PromptLike
from specflow.kernels.noise import uniform
from specflow.proposers.base import ProposeContext, Proposer
from specflow.testing.statistics import Gate, chi_square_gate
from specflow.testing.wrappers import Wrapper

_LENGTHS = 77  # domain of the uniforms that cut drafts
# Share of samples that may lie outside the law: in half precision a token at the border of top-k can flip.
_EXCLUDED_TOLERATED = {torch.float32: 0.0, torch.float16: 0.02, torch.bfloat16: 0.02}
_ECHO_TOKENS, _ECHOES = 5, 4

Sequences = Mapping[tuple[int, ...], float]


class RandomLengths(Wrapper):
    """A proposer whose drafts are cut to random lengths, 0 … K, while `active`; otherwise it is the inner one.

    The lengths depend on seed and position alone, not on the drafts: that is allowed to a lossless method.
    """

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.active = False

    def propose(self, context: ProposeContext) -> Draft:
        """The inner proposer's drafts, fewer of them."""
        draft = self.inner.propose(context)
        if not self.active:
            return draft
        share = uniform(context.seeds, context.num_tokens, _LENGTHS)
        most = (share * (self.num_speculative_tokens + 1)).to(torch.int64)
        return dataclasses.replace(draft, num_drafts=torch.minimum(draft.num_drafts, most))


@dataclass(frozen=True)
class Equality:
    """Outputs with and without speculation, compared token by token."""

    what: str
    requests: int
    tokens: int
    drafted: int
    accepted: int
    differences: tuple[Difference, ...]

    @property
    def faults(self) -> list[Difference]:
        """Differences that rounding does not explain."""
        return [difference for difference in self.differences if not difference.is_tie]

    @property
    def passed(self) -> bool:
        """True when all outputs are equal, up to ties."""
        return not self.faults


def prove_equal(
    engine: Engine,
    what: str,
    prompts: Sequence[PromptLike],
    sampling: SamplingParams,
    concurrency: int,
    first_seed: int,
) -> Equality:
    """Decode every prompt plainly and with speculation, each with its own seed, and compare."""
    each = [dataclasses.replace(sampling, seed=first_seed + index) for index in range(len(prompts))]
    plain = engine.generate(prompts, each, speculate=False, concurrency=concurrency)
    found = engine.generate(prompts, each, concurrency=concurrency)
    return Equality(
        what,
        len(found),
        sum(len(output.token_ids) for output in found),
        sum(output.drafted for output in found),
        sum(output.accepted for output in found),
        tuple(find_differences(engine, plain, found, sampling)),
    )


@dataclass(frozen=True)
class LawProof:
    """Sampled outputs with speculation against the target's exact law."""

    gates: Mapping[str, Gate]  # by what was tested: all tokens together, and every position alone
    num_samples: int
    drafted: int
    accepted: int
    steps: float  # verification steps with drafts, mean per sample
    impossible: int  # samples that the law excludes

    @property
    def passed(self) -> bool:
        """True when every gate passed."""
        return all(gate.passed for gate in self.gates.values())

    @property
    def detectable(self) -> float:
        """Smallest bias of the joint law that would have been caught."""
        return self.gates["joint"].detectable


def exact_law(
    engine: Engine, prompt_ids: Sequence[int], sampling: SamplingParams, num_tokens: int, least_mass: float
) -> Sequences:
    """Probability of every continuation of num_tokens, computed from plain decoding of all its prefixes.

    Prefixes below least_mass are not followed further: they stand in the result as they are, shorter than the others.
    """
    open_prefixes: dict[tuple[int, ...], float] = {(): 1.0}
    done: dict[tuple[int, ...], float] = {}
    for _ in range(num_tokens):
        _, rows = processed_logits(engine, prompt_ids, list(open_prefixes), sampling)
        grown: dict[tuple[int, ...], float] = {}
        for (prefix, mass), law in zip(open_prefixes.items(), torch.softmax(rows.double(), -1), strict=True):
            for token in law.nonzero().squeeze(1).tolist():
                grown[(*prefix, token)] = mass * float(law[token])
        open_prefixes = {prefix: mass for prefix, mass in grown.items() if mass >= least_mass}
        done |= {prefix: mass for prefix, mass in grown.items() if mass < least_mass}
        if not open_prefixes:
            break
    return open_prefixes | done


def prove_law(
    engine: Engine,
    prompt_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    num_samples: int,
    num_tokens: int,
    first_seed: int,
    alpha: float,
) -> LawProof:
    """Sample one prompt under many seeds with speculation, and test the first num_tokens against the exact law.

    Tested are all tokens together and, which sees smaller biases, every position by itself; alpha is shared among the
    tests, so that a right engine fails all of this with probability alpha.
    """
    free = {"min_tokens": 0, "ignore_eos": True, "stop": (), "stop_token_ids": (), "logprobs": None}
    options = dataclasses.replace(sampling, max_tokens=num_tokens, **free)  # type: ignore[arg-type]
    law = exact_law(engine, prompt_ids, options, num_tokens, least_mass=2.0 / num_samples)
    each = [dataclasses.replace(options, seed=first_seed + index) for index in range(num_samples)]
    outputs = engine.generate([list(prompt_ids)] * num_samples, each)
    observed = Counter(_cell(output.token_ids, law) for output in outputs)
    share = alpha / (num_tokens + 1)
    impossible = observed.pop((), 0)
    excluded = 0 if impossible <= _EXCLUDED_TOLERATED[engine.limits.dtype] * num_samples else impossible
    gates = {"joint": _gate(observed, law, slice(None), share, excluded)}
    for place in range(num_tokens):
        gates[f"token {place + 1}"] = _gate(observed, law, slice(place, place + 1), share)
    return LawProof(
        gates,
        num_samples,
        sum(output.drafted for output in outputs),
        sum(output.accepted for output in outputs),
        sum(output.rounds for output in outputs) / num_samples,
        impossible,
    )


def _cell(tokens: tuple[int, ...], law: Sequences) -> tuple[int, ...]:
    """The entry of the law that a sample belongs to: itself, or the prefix that was not followed; () for none."""
    return next((tokens[:size] for size in range(len(tokens), 0, -1) if tokens[:size] in law), ())


def _gate(observed: Counter[tuple[int, ...]], law: Sequences, part: slice, alpha: float, excluded: int = 0) -> Gate:
    """Test the part of every sequence that the slice takes; excluded samples make the gate fail."""
    masses: dict[tuple[int, ...], float] = {}
    counts: Counter[tuple[int, ...]] = Counter()
    for cell, mass in law.items():
        masses[cell[part]] = masses.get(cell[part], 0.0) + mass
        counts[cell[part]] += observed[cell]
    cells = list(masses)
    numbers = np.array([*(counts[cell] for cell in cells), excluded], dtype=np.float64)
    return chi_square_gate(numbers, np.array([*(masses[cell] for cell in cells), 0.0]), alpha)


def echoing_prompt(engine: Engine, prompt: PromptLike, sampling: SamplingParams, num_tokens: int) -> list[int]:
    """A short prompt that every kind of proposer has something to say about.

    The end of the given prompt stands in it several times, each time followed by a continuation that the target
    sampled: whatever is sampled now has likely occurred before, and only sometimes continues as it did then.
    """
    base = list(engine.make_request("echo", prompt, sampling, speculate=False).prompt_ids)[-_ECHO_TOKENS:]
    each = [dataclasses.replace(sampling, seed=seed, max_tokens=num_tokens, ignore_eos=True) for seed in range(_ECHOES)]
    outputs = engine.generate([base] * _ECHOES, each, speculate=False)
    return [*(token for output in outputs for token in (*base, *output.token_ids)), *base]
