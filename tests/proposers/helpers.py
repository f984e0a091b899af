"""Draft models and contexts made by hand, so that a proposer can be driven without an engine."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.kernels.triton_choice import triton_available
from specflow.proposers.base import HostView, ProposeContext
from specflow.proposers.draft_model import DraftModelOptions, DraftModelProposer
from specflow.proposers.pard import PardOptions, PardProposer

METHODS: dict[str, tuple[Any, Any]] = {
    "draft_model": (DraftModelProposer, DraftModelOptions),
    "pard": (PardProposer, PardOptions),
}
BLOCK = 4
SLOTS = 4
MAX_LEN = 64


def skip_without_interpreter() -> None:
    """Skip a test that runs Triton kernels on a CPU where they are compiled, or where there is no Triton."""
    if not triton_available() or torch.cuda.is_available():
        pytest.skip("runs Triton kernels on a CPU, in the interpreter")


def make_limits(k: int, vocab: int, lookahead: int = 0, max_len: int = MAX_LEN, num_blocks: int = 200) -> EngineLimits:
    return EngineLimits(
        max_num_seqs=SLOTS,
        max_model_len=max_len,
        max_num_batched_tokens=256,
        block_size=BLOCK,
        num_blocks=num_blocks,
        num_speculative_tokens=k,
        lookahead_tokens=lookahead,
        vocab_size=vocab,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def fake_target(folder: Path, vocab: int, tokenizer: Any = None, dtype: torch.dtype = torch.float32) -> Any:
    """What a proposer reads of a loaded target."""
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(folder)
    facts = SimpleNamespace(name="target", vocab_size=vocab, num_token_ids=len(tokenizer), dtype=dtype)
    return SimpleNamespace(tokenizer=tokenizer, facts=facts)


@dataclass
class Row:
    """One request of a hand-made step."""

    slot: int
    tokens: list[int]
    chunk: tuple[int, int]  # positions the target has just processed: first, one past the last
    max_drafts: int
    temperature: float = 0.0
    seed: int = 0
    name: str = field(default="")


class Bench:
    """A proposer that is a language model, with tables and blocks, driven step by step."""

    def __init__(
        self,
        folder: Path,
        k: int = 4,
        shuffled: bool = True,
        vocab: int | None = None,
        method: str = "draft_model",
        **options: Any,
    ) -> None:
        self.k = k
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        vocab = vocab or self.model.config.vocab_size
        make, schema = METHODS[method]
        self.proposer = make(schema(path=str(folder), num_speculative_tokens=k, **options))
        target = fake_target(folder, vocab)
        self.proposer.load(target, SimpleNamespace(device=torch.device("cpu")))
        self.limits = make_limits(k, vocab, self.proposer.requirements().lookahead_tokens)
        self.proposer.attach(target, self.limits)
        blocks = np.arange(1, 1 + SLOTS * self.limits.max_blocks_per_seq)
        if shuffled:
            np.random.default_rng(0).shuffle(blocks)
        self.blocks = np.zeros((SLOTS + 1, self.limits.max_blocks_per_seq), dtype=np.int64)
        self.blocks[:SLOTS] = blocks.reshape(SLOTS, -1)
        self.table = np.zeros((SLOTS + 1, self.limits.table_width), dtype=np.int64)

    def start(self, slot: int) -> None:
        self.proposer.start(f"request-{slot}", slot, [])

    def step(self, *rows: Row) -> Draft:
        for row in rows:
            self.table[row.slot, : len(row.tokens)] = row.tokens
        return self.proposer.propose(make_context(self.table, self.blocks, rows))

    def greedy(self, tokens: list[int], count: int | None = None) -> list[int]:
        """What the draft model says when everything is computed afresh by transformers."""
        tokens = list(tokens)
        first = len(tokens)
        with torch.no_grad():
            for _ in range(count or self.k):
                tokens.append(int(self.model(torch.tensor([tokens])).logits[0, -1].argmax()))
        return tokens[first:]

    def parallel_logits(self, tokens: list[int], mask: int) -> torch.Tensor:
        """The same with masks in place of drafts: logits [K, V] of the last token and of K-1 masks behind it."""
        with torch.no_grad():
            return self.model(torch.tensor([[*tokens, *[mask] * (self.k - 1)]])).logits[0, len(tokens) - 1 :]

    def parallel(self, tokens: list[int], mask: int) -> list[int]:
        """The likeliest of them."""
        return self.parallel_logits(tokens, mask).argmax(-1).tolist()


def make_context(table: np.ndarray, blocks: np.ndarray, rows: tuple[Row, ...]) -> ProposeContext:
    """The context of one call for these requests."""
    slots = np.array([row.slot for row in rows], dtype=np.int64)
    num_tokens = np.array([len(row.tokens) for row in rows], dtype=np.int64)
    most = np.array([row.max_drafts for row in rows], dtype=np.int64)
    host = HostView(
        request_ids=[row.name or f"request-{row.slot}" for row in rows],
        num_tokens=num_tokens,
        prompt_len=num_tokens,
        chunk_start=np.array([row.chunk[0] for row in rows], dtype=np.int64),
        chunk_len=np.array([row.chunk[1] - row.chunk[0] for row in rows], dtype=np.int64),
        wants_drafts=most > 0,
        max_drafts=most,
        token_table=table,
        slots=slots,
        block_table=blocks[slots],
    )
    return ProposeContext(
        slots=torch.from_numpy(slots),
        num_tokens=torch.from_numpy(num_tokens),
        max_drafts=torch.from_numpy(most),
        token_table=torch.from_numpy(table),
        block_table=torch.from_numpy(blocks[slots]),
        temperature=torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        seeds=torch.tensor([row.seed for row in rows], dtype=torch.int64),
        all_greedy=all(row.temperature == 0 for row in rows),
        features=None,
        host=host,
    )


def after(tokens: list[int], draft: list[int], kept: int, new: int) -> tuple[list[int], tuple[int, int]]:
    """The target accepted `kept` of the drafts and added `new`: the next tokens and the chunk it has processed."""
    first = len(tokens) - 1
    return [*tokens, *draft[:kept], new], (first, first + 1 + kept)
