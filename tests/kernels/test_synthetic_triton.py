"""Synthetic acceptance in one launch against the sampler; interpreted on a CPU, compiled where there is a GPU."""

from dataclasses import replace

import pytest
import torch

from specflow.core.draft import VerifyInputs
from specflow.kernels.argmax import lowest_argmax
from specflow.samplers.rejection import SequentialSampler
from specflow.samplers.synthetic import SyntheticOptions, SyntheticSampler
from tests.kernels.rejection_cases import DEVICE
from tests.proposers.helpers import make_limits
from tests.samplers.helpers import make_inputs

pytest.importorskip("triton")

from specflow.kernels.synthetic_triton import accept_by_chance

K, VOCAB = 4, 50


def on_device(inputs: VerifyInputs) -> VerifyInputs:
    tensors = {name: part.to(DEVICE) for name, part in vars(inputs).items() if isinstance(part, torch.Tensor)}
    return replace(inputs, **tensors)


def test_says_what_the_sampler_says() -> None:
    """Requests with all drafts, with some and with none, a draft that is none, chances of 1, between and 0."""
    generator = torch.Generator().manual_seed(0)
    batch = 60
    drafts = torch.randint(0, VOCAB, (batch, K), generator=generator)
    drafts[::7, 2] = -1
    counts = torch.randint(0, K + 1, (batch,), generator=generator)
    seeds = torch.randint(-(2**62), 2**62, (batch,), generator=generator)
    inputs = on_device(make_inputs(drafts, num_drafts=counts, temperature=0.0, seeds=seeds))
    logits = torch.randn(int(counts.sum()) + batch, VOCAB, generator=generator).to(DEVICE)
    sampler = SyntheticSampler(SyntheticOptions(synthetic_acceptance_rates=(1.0, 0.6, 0.3, 0.0)))
    limits = replace(make_limits(K, VOCAB), device=DEVICE)
    sampler.configure(limits)
    expected = SequentialSampler.verify(sampler, logits, inputs)
    found = accept_by_chance(lowest_argmax(logits, skip_nan=True), sampler._chances, inputs)
    assert set(expected.num_accepted.tolist()) == {0, 1, 2, 3}
    for name, theirs in vars(expected).items():
        assert torch.equal(getattr(found, name), theirs), name
