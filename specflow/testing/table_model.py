"""A language model small enough to know everything about: the next token depends on the last one, by a table.

It runs the verification loop of the engine (draft, verify, commit, again) for many seeds at once without any network,
so a sampler's output over several steps can be tested against the exact joint law. Several steps matter: randomness
that is wrongly used twice shows from the second step on.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from specflow.core.draft import VerifyInputs
from specflow.core.request import Request
from specflow.core.sampling_params import SamplingParams
from specflow.kernels.noise import fresh_seeds, gumbel_argmax, gumbel_noise
from specflow.samplers.base import Sampler
from specflow.samplers.processors import RequestRows, process_logits
from specflow.testing.statistics import ALPHA, Gate, chi_square_gate

Drafter = Literal["one_hot", "probabilistic"]


@dataclass
class TableRun:
    """What a sampler produced for N seeds."""

    tokens: torch.Tensor  # [N, n] int64
    counts: np.ndarray  # [V**n] int64: how often each joint outcome occurred
    drafted: int = 0
    accepted: int = 0
    steps: int = 0  # of the request that took the most

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted."""
        return self.accepted / max(1, self.drafted)


@dataclass(frozen=True)
class TableModel:
    """Target and drafter over V tokens; row t of a table holds the logits after token t."""

    target: torch.Tensor  # [V, V] float32 raw logits
    draft: torch.Tensor  # [V, V] float32 raw logits
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=1.0))  # of every request
    first_token: int = 0  # the prompt

    @classmethod
    def random(
        cls, vocab_size: int, seed: int = 0, distance: float = 1.0, sampling: SamplingParams | None = None
    ) -> "TableModel":
        """Random tables; distance 0: the drafter is the target, 1: a related one, above: less and less related."""
        generator = torch.Generator().manual_seed(seed)
        target, other = torch.randn(2, vocab_size, vocab_size, generator=generator) * 1.2
        return cls(target, target + distance * other, sampling or SamplingParams(temperature=1.0))

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.target.shape[1]

    def processed(self) -> torch.Tensor:
        """The target's logits after the request's options, [V, V]; options must not depend on history."""
        request = Request("table", [self.first_token], self.sampling, seed=0, slot=0)
        table = torch.zeros(1, 1 + self.vocab_size, dtype=torch.int64)
        return process_logits(self.target.clone(), [RequestRows(request, 0, self.vocab_size)], table)

    def law(self, num_tokens: int) -> np.ndarray:
        """Exact probability of every sequence of num_tokens, [V**num_tokens] float64, first token most significant."""
        rows = torch.softmax(self.processed().double(), -1)
        joint = rows[self.first_token]
        for _ in range(num_tokens - 1):
            joint = (joint.view(-1, self.vocab_size, 1) * rows).flatten()
        return joint.numpy()

    def run(
        self,
        sampler: Sampler,
        *,
        num_samples: int,
        num_tokens: int,
        num_drafts: int,
        drafter: Drafter,
        first_seed: int = 0,
        ragged: bool = False,
        device: torch.device | str = "cpu",
    ) -> TableRun:
        """Decode num_tokens for num_samples seeds, num_drafts per step (ragged: 0 … num_drafts, changing by step)."""
        seeds = torch.arange(first_seed, first_seed + num_samples, device=device)
        tokens = torch.full((num_samples, num_tokens + num_drafts + 2), self.first_token, device=device)
        length, rounds = torch.ones_like(seeds), torch.zeros_like(seeds)
        result = TableRun(tokens, np.zeros(0))
        rows = self.processed().to(device)
        while len(active := (length <= num_tokens).nonzero().squeeze(1)):
            result.steps += 1
            counts = torch.full_like(active, num_drafts)
            if ragged:
                counts = (seeds[active] + rounds[active]) % (num_drafts + 1)
            inputs = self._draft(sampler, tokens, active, length, seeds, rounds, counts, num_drafts, drafter)
            places = length[active].unsqueeze(1) + torch.arange(num_drafts, device=device)
            tokens[active.unsqueeze(1), places] = inputs.draft_ids.clamp(min=0)
            contexts = tokens[active.unsqueeze(1), torch.cat([places - 1, places[:, -1:]], 1)]
            wanted = torch.arange(num_drafts + 1, device=device) <= counts.unsqueeze(1)
            verdict = sampler.verify(rows[contexts[wanted]], inputs)
            places = length[active].unsqueeze(1) + torch.arange(num_drafts + 1, device=device)
            tokens[active.unsqueeze(1), places] = verdict.token_ids.clamp(min=0)
            length[active] += verdict.num_emitted
            rounds[active] += 1
            result.drafted += int(counts.sum())
            result.accepted += int(verdict.num_accepted.sum())
        result.tokens = tokens[:, 1 : num_tokens + 1].to("cpu")
        powers = self.vocab_size ** torch.arange(num_tokens - 1, -1, -1)
        result.counts = np.bincount((result.tokens * powers).sum(1).numpy(), minlength=self.vocab_size**num_tokens)
        return result

    def gate(self, sampler: Sampler, *, alpha: float = ALPHA, **options: Any) -> Gate:
        """Chi-square of the joint tokens against the exact law; options as for `run`."""
        run = self.run(sampler, **options)
        return chi_square_gate(run.counts, self.law(run.tokens.shape[1]), alpha)

    def _draft(
        self,
        sampler: Sampler,
        tokens: torch.Tensor,
        active: torch.Tensor,
        length: torch.Tensor,
        seeds: torch.Tensor,
        rounds: torch.Tensor,
        counts: torch.Tensor,
        num_drafts: int,
        drafter: Drafter,
    ) -> VerifyInputs:
        """Draft as a well-behaved proposer does, by what the sampler asks of it."""
        seeds, rounds, positions = seeds[active], rounds[active], length[active]
        keys = fresh_seeds(seeds, rounds) if sampler.fresh_draft_noise else seeds
        last, drafts, laws = tokens[active, positions - 1], [], []
        table, device = self.draft.to(tokens.device), tokens.device
        for index in range(num_drafts):
            scaled = table[last] / self.sampling.temperature
            last = scaled.argmax(-1)
            if drafter == "probabilistic":
                noise = gumbel_noise(keys, positions + index, sampler.draft_domain, self.vocab_size)
                last = gumbel_argmax(scaled, noise)
            drafts.append(last)
            laws.append(scaled)
        draft_ids = torch.stack(drafts, 1)
        keeps = drafter == "probabilistic" and sampler.needs_draft_logits
        return VerifyInputs(
            cu_rows=torch.nn.functional.pad(torch.cumsum(counts + 1, 0), (1, 0)),
            draft_ids=draft_ids.masked_fill(torch.arange(num_drafts, device=device) >= counts.unsqueeze(1), -1),
            num_drafts=counts,
            positions=positions,
            temperature=torch.full((len(active),), self.sampling.temperature, device=device),
            seeds=seeds,
            rounds=rounds,
            draft_logits=torch.stack(laws, 1) if keeps else None,
            all_greedy=False,
        )
