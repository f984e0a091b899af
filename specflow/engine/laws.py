"""The exact law of the next token after a given prefix, from plain decoding by the engine itself. For proofs."""

import dataclasses
from collections.abc import Sequence

import torch

from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.samplers.processors import RequestRows, process_logits


def raw_logits(engine: Engine, prefixes: Sequence[Sequence[int]]) -> torch.Tensor:
    """The target's own logits after each prefix, [P, V] float32 on the host; they come through `logprobs`."""
    vocab_size = engine.limits.vocab_size
    probe = SamplingParams(max_tokens=1, logprobs=vocab_size)
    rows = torch.full((len(prefixes), vocab_size), float("-inf"))
    outputs = engine.generate([list(prefix) for prefix in prefixes], probe, speculate=False)
    for row, output in zip(rows, outputs, strict=True):
        found = output.logprobs[0]
        ids, values = zip(*found.top, strict=True)
        row[list(ids)] = torch.tensor(values) - values[0] + found.max_logit
    return rows


def processed_logits(
    engine: Engine, prompt_ids: Sequence[int], continuations: Sequence[Sequence[int]], sampling: SamplingParams
) -> tuple[torch.Tensor, torch.Tensor]:
    """Raw and processed logits of the token after prompt + continuation, [P, V] float32 each.

    softmax of a processed row is the law that the next token of a request with these options must follow.
    """
    raw = raw_logits(engine, [[*prompt_ids, *continuation] for continuation in continuations])
    processed = raw.clone()
    template = engine.make_request("law", prompt_ids, dataclasses.replace(sampling, logprobs=None), speculate=False)
    for row, continuation in zip(processed, continuations, strict=True):
        request = dataclasses.replace(template, output_ids=list(continuation), slot=0)
        process_logits(row.unsqueeze(0), [RequestRows(request, 0, 1)], torch.tensor([[*prompt_ids, *continuation]]))
    return raw, processed
