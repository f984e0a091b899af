"""Seed-coupled verification: under a seed, the output is the one plain decoding gives, token by token.

Every row's token is y = argmax(logits + Gumbel noise keyed by the seed and the position), which is exactly what plain
decoding draws there. A draft is accepted iff it equals y, and y is emitted either way, so a proposer cannot change
the output, whatever it drafts, for every K and in every batch (given equal logits: bitwise only where the target's
logits do not depend on how many tokens a pass holds; float32 comes close enough that only ties can tell).

Deterministic drafts are accepted with probability p(d), as in rejection sampling. Probabilistic drafters draw with the
noise of the position they draft for (Gumbel coupling; Daliri, Musco and Suresh 2024, arXiv 2408.07978), so both sides
tend to pick the same token: acceptance is the sum over x of 1 / sum_y max(p(y)/p(x), q(y)/q(x)), between
(1 - TV)/(1 + TV) and 1 - TV, which rejection sampling reaches; and no draft logits need to be kept.
"""

from dataclasses import dataclass

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.kernels.noise import TARGET, gumbel_argmax, gumbel_noise
from specflow.samplers.base import Sampler
from specflow.samplers.rejection import GumbelOptions, count_leading, finite_or_masked, make_verdict, padded_rows


@dataclass(frozen=True, kw_only=True)
class CoupledOptions(GumbelOptions):
    """Options of `sampler=coupled`."""


class CoupledSampler(Sampler):
    """Lossless, and the same output under a seed as plain decoding under that seed."""

    name = "coupled"
    seed_exact = True
    needs_draft_logits = False
    draft_domain = TARGET

    def __init__(self, options: CoupledOptions) -> None:
        self._noise_dtype = options.noise_dtype

    def verify(self, logits: torch.Tensor, inputs: VerifyInputs) -> Verdict:
        """See `Sampler.verify`; no host read and no branch on values."""
        logits = finite_or_masked(logits)
        tokens = torch.argmax(logits, dim=-1)
        if not inputs.all_greedy:
            owners = row_owners(inputs, logits.shape[0])
            drawn = self._draw(logits, inputs, owners)
            tokens = torch.where(inputs.temperature[owners] == 0, tokens, drawn)
        wanted = tokens[padded_rows(inputs, logits.shape[0])]
        num_accepted = count_leading(wanted[:, :-1] == inputs.draft_ids, inputs)
        final = wanted.gather(1, num_accepted.unsqueeze(1)).squeeze(1)
        return make_verdict(inputs.draft_ids, num_accepted, final)

    def _draw(self, logits: torch.Tensor, inputs: VerifyInputs, owners: torch.Tensor) -> torch.Tensor:
        """The token of every row, [N] int64; B rows at a time, so that the noise takes no more memory than B rows."""
        rows = torch.arange(logits.shape[0], device=logits.device)
        positions = inputs.positions[owners] + rows - inputs.cu_rows[owners]
        seeds, vocab_size = inputs.seeds[owners], logits.shape[1]
        drawn = []
        for part in rows.split(len(inputs.seeds)):
            noise = gumbel_noise(seeds[part], positions[part], TARGET, vocab_size, self._noise_dtype)
            drawn.append(gumbel_argmax(logits[part].float(), noise))
        return torch.cat(drawn)

    def describe(self) -> dict[str, str]:
        """Method and precision."""
        gumbel = str(self._noise_dtype).removeprefix("torch.")
        return {"method": "seed-coupled (output as plain decoding under the same seed)", "gumbel": gumbel}


def row_owners(inputs: VerifyInputs, num_rows: int) -> torch.Tensor:
    """Request of every logits row, [N] int64."""
    rows = torch.arange(num_rows, device=inputs.cu_rows.device)
    return torch.searchsorted(inputs.cu_rows, rows, right=True) - 1
