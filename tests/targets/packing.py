"""Driving a target step by step without an engine."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

from specflow.core.attention import AttentionInputs
from specflow.core.batch import PackedBatch, TargetOutput
from specflow.core.limits import EngineLimits
from specflow.kernels.paged_attention import plan_groups
from specflow.targets.base import Taps
from specflow.targets.hf import HfOptions, HfTarget

CPU: Any = SimpleNamespace(device=torch.device("cpu"), name="cpu")


def load(folder: Path, **options: Any) -> HfTarget:
    """A loaded target of a saved folder."""
    target = HfTarget(HfOptions(path=str(folder), **options))
    target.load(CPU)
    return target


def limits_for(target: HfTarget, **changes: Any) -> EngineLimits:
    """Limits large enough for the tests here."""
    sizes: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_model_len": 96,
        "max_num_batched_tokens": 256,
        "block_size": 4,
        "num_blocks": 80,
        "num_speculative_tokens": 7,
        "lookahead_tokens": 8,
    }
    facts = target.facts
    return EngineLimits(
        **sizes | changes,
        vocab_size=facts.vocab_size,
        device=CPU.device,
        dtype=facts.dtype,
        paged_kernels=facts.paged_kernels,
    )


class Runner:
    """Some requests on an attached target; their blocks are shuffled and interleaved unless told otherwise."""

    def __init__(self, target: HfTarget, num_requests: int, taps: Taps | None = None, shuffled: bool = True) -> None:
        self.target, limits = target, limits_for(target)
        target.attach(limits, taps or Taps())
        per_request = 76 // num_requests
        blocks = np.arange(1, 1 + per_request * num_requests)
        if shuffled:
            blocks = np.random.default_rng(0).permutation(blocks)
        self.table = blocks.reshape(num_requests, per_request)
        self.size = limits.block_size

    def batch(self, spans: list[tuple[int, torch.Tensor]]) -> PackedBatch:
        """A step in which request b runs tokens spans[b][1] from position spans[b][0] on; empty ones sit it out."""
        active = [index for index, (_, tokens) in enumerate(spans) if len(tokens)]
        lengths = np.array([len(spans[index][1]) for index in active])
        starts = np.array([spans[index][0] for index in active])
        table = self.table[active]
        positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        owners = np.repeat(np.arange(len(active)), lengths)
        slots = table[owners, positions // self.size] * self.size + positions % self.size
        total, query_start = int(lengths.sum()), torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]))
        as_tensor = torch.from_numpy
        return PackedBatch(
            token_ids=torch.cat([spans[index][1] for index in active]),
            positions=as_tensor(positions),
            slots=torch.tensor(active),
            query_start=query_start,
            logit_rows=torch.arange(total),
            attention=AttentionInputs(
                positions=as_tensor(positions),
                slot_mapping=as_tensor(slots),
                block_table=as_tensor(table),
                seq_len=as_tensor(starts + lengths),
                groups=plan_groups(lengths, starts + lengths, table, self.size),
                query_start=query_start,
            ),
            query_len_host=lengths,
        )

    def step(self, spans: list[tuple[int, torch.Tensor]]) -> list[torch.Tensor]:
        """Logits [tokens, V] of each request that ran, one row per token."""
        batch = self.batch(spans)
        return list(self.target.forward(batch).logits.clone().split(batch.query_len_host.tolist()))

    def output(self, spans: list[tuple[int, torch.Tensor]]) -> TargetOutput:
        """The whole output of one step."""
        return self.target.forward(self.batch(spans))

    def teacher_force(self, prompts: list[torch.Tensor], cuts: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """Run each prompt in the pieces that end at cuts[b]; returns logits [len(prompt), V] of each."""
        pieces: list[list[torch.Tensor]] = [[] for _ in prompts]
        before = [0] * len(prompts)
        for step in range(len(cuts[0])):
            spans = [
                (first, prompt[first : cut[step]]) for prompt, first, cut in zip(prompts, before, cuts, strict=True)
            ]
            for piece, rows in zip(pieces, self.step(spans), strict=True):
                piece.append(rows)
            before = [cut[step] for cut in cuts]
        return [torch.cat(piece) for piece in pieces]


def eager_model(folder: Path, **options: Any) -> Any:
    """The same checkpoint through transformers alone."""
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", **options).eval()


def alone(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    """Logits [len(prompt), V] of one sequence without cache."""
    with torch.inference_mode():
        return model(prompt.unsqueeze(0), use_cache=False).logits[0]


def random_prompts(*lengths: int, vocab: int = 384, seed: int = 1) -> list[torch.Tensor]:
    """Random token ids, one tensor per length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab, (length,), generator=generator) for length in lengths]
