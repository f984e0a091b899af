"""Hand-made inputs for samplers and the exact laws they must follow."""

import numpy as np
import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.kernels.noise import DRAFT, gumbel_argmax, gumbel_noise
from specflow.samplers.standard import StandardOptions, StandardSampler

P = torch.tensor([0.5, 0.3, 0.15, 0.04, 0.01])
Q = torch.tensor([0.7, 0.2, 0.05, 0.03, 0.02])


def make_inputs(
    draft_ids: torch.Tensor,
    *,
    num_drafts: torch.Tensor | None = None,
    draft_logits: torch.Tensor | None = None,
    temperature: float = 1.0,
    seeds: torch.Tensor | None = None,
    position: int = 10,
) -> VerifyInputs:
    """Inputs for B requests that all drafted K tokens unless num_drafts says otherwise."""
    batch, width = draft_ids.shape
    counts = torch.full((batch,), width) if num_drafts is None else num_drafts
    return VerifyInputs(
        cu_rows=torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(counts + 1, 0)]),
        draft_ids=draft_ids,
        num_drafts=counts,
        positions=torch.full((batch,), position),
        temperature=torch.full((batch,), temperature),
        seeds=torch.arange(batch) + 1 if seeds is None else seeds,
        rounds=torch.zeros(batch, dtype=torch.int64),
        draft_logits=draft_logits,
        all_greedy=temperature == 0,
    )


def standard() -> StandardSampler:
    return StandardSampler(StandardOptions())


def draw_drafts(q: torch.Tensor, seeds: torch.Tensor, position: int) -> torch.Tensor:
    """One draft per seed from the law q, with the drafter's own noise."""
    noise = gumbel_noise(seeds, torch.full_like(seeds, position), DRAFT, q.shape[-1])
    return gumbel_argmax(q.log().expand(len(seeds), -1), noise)


def first_tokens(verdict: Verdict) -> np.ndarray:
    return verdict.token_ids[:, 0].numpy()


def total_variation(samples: np.ndarray, law: torch.Tensor) -> float:
    observed = np.bincount(samples, minlength=len(law)) / len(samples)
    return 0.5 * float(np.abs(observed - law.numpy()).sum())


def bound(vocab: int, num_samples: int, alpha: float = 1e-6) -> float:
    """Total variation that a right sampler exceeds with probability at most alpha (verification note 7.2)."""
    return 0.5 * (vocab / num_samples) ** 0.5 + (np.log(1 / alpha) / (2 * num_samples)) ** 0.5
