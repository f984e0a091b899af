"""Proof that the engine's attention fits a model: packed, paged and in several steps against the model's own code.

Two requests of different lengths run as ragged prompt chunks, then as blocks of several tokens, over shuffled pages.
Each is compared with itself alone in the model's eager attention without any cache. That catches what a model hides
from the attention function: chunked masks, lost soft-caps, positions counted from the cache, states that leak from
one packed request into the next.
"""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from specflow.core.attention import AttentionInputs
from specflow.core.limits import PagedKernelsName
from specflow.errors import UnsupportedModelError
from specflow.kernels.paged_attention import plan_groups
from specflow.targets import transformers_facts as facts
from specflow.targets.paged_layers import FusedLayers, PagedAttention
from specflow.targets.probe import LayerShape

LENGTHS = (13, 21)
# (first, last) token of each request in each step
CHUNKS = (((0, 8), (0, 16)), ((8, 12), (16, 20)), ((12, 13), (20, 21)))
BLOCK_SIZE = 4

# Relative error of a row's logits that rounding explains. In half precision one row may flip an expert, so there the
# mean over rows counts and not the worst row.
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}
HALF_TOLERANCE = 0.1


@dataclass(frozen=True)
class Proof:
    """Outcome of the comparison."""

    error: float  # relative, worst row in float32, mean of rows in half precision
    max_abs_diff: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether rounding alone explains the difference."""
        return self.error <= self.tolerance

    def __str__(self) -> str:
        return f"packed against eager: max difference {self.max_abs_diff:.1e}"


def prove(
    model: PreTrainedModel,
    shapes: tuple[LayerShape, ...],
    fused: FusedLayers,
    kernels: PagedKernelsName = "torch",
) -> tuple[Proof, FusedLayers]:
    """Compare both ways on random tokens; leaves the model with its eager attention. kernels: what serves the pages.

    Returns the proof and the fused layers it holds for: none where only the layers of transformers agree.
    Raises `UnsupportedModelError` with the largest difference when those do not agree either.
    """
    result = compare(model, shapes, fused, kernels)
    if fused and not result.holds:
        fused = ()
        result = compare(model, shapes, kernels=kernels)
    if not result.holds:
        raise UnsupportedModelError(
            f"{type(model).__name__} gives other logits through packed attention than through its own: largest "
            f"difference {result.max_abs_diff:.3g}, relative {result.error:.2g}, allowed {result.tolerance:g}.\n"
            "It follows a rule that its attention calls do not tell, so its output would be wrong."
        )
    return result, fused


def compare(
    model: PreTrainedModel,
    shapes: tuple[LayerShape, ...],
    fused: FusedLayers = (),
    kernels: PagedKernelsName = "torch",
) -> Proof:
    """Logits of both ways, side by side."""
    parameter = next(model.parameters())
    vocab = facts.text_config(model).vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(vocab, (length,), generator=generator).to(parameter.device) for length in LENGTHS]
    dtype = model.dtype
    with torch.inference_mode():
        facts.use_attention(model, "eager")
        expected = torch.cat([_alone(model, prompt) for prompt in prompts])
        like = torch.empty(0, dtype=dtype, device=parameter.device)
        blocks_per_request = -(-max(LENGTHS) // BLOCK_SIZE)
        pages = PagedAttention(shapes, 1 + len(LENGTHS) * blocks_per_request, BLOCK_SIZE, like, fused, kernels)
        found = _packed(model, pages, prompts)
    return _difference(expected.double(), found.double(), dtype)


def _difference(expected: torch.Tensor, found: torch.Tensor, dtype: torch.dtype) -> Proof:
    rows = (expected - found).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-9)
    exact = dtype in TOLERANCE
    error = rows.max() if exact else rows.mean()
    error = error if torch.isfinite(found).all() else torch.tensor(float("inf"))
    return Proof(float(error), float((expected - found).abs().max()), TOLERANCE.get(dtype, HALF_TOLERANCE))


def _alone(model: PreTrainedModel, prompt: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(prompt), device=prompt.device).unsqueeze(0)
    return model(input_ids=prompt.unsqueeze(0), position_ids=positions, use_cache=False).logits[0]


def _packed(model: PreTrainedModel, attention: PagedAttention, prompts: list[torch.Tensor]) -> torch.Tensor:
    """Logits of all prompts, [sum of lengths, V], computed in the steps of `CHUNKS` over interleaved blocks."""
    per_request = -(-max(LENGTHS) // BLOCK_SIZE)
    blocks = 1 + np.random.default_rng(0).permutation(per_request * len(prompts))
    table = blocks.reshape(len(prompts), per_request)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    try:
        attention.enter(model)
        for spans in CHUNKS:
            positions = torch.cat([torch.arange(first, last) for first, last in spans]).to(prompts[0].device)
            tokens = torch.cat([prompt[first:last] for prompt, (first, last) in zip(prompts, spans, strict=True)])
            attention.inputs = _inputs(spans, table, positions)
            output = model(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False)
            for part, rows in zip(parts, output.logits[0].split([last - first for first, last in spans]), strict=True):
                part.append(rows)
    finally:
        attention.leave(model)
    return torch.cat([rows for part in parts for rows in part])


def _inputs(spans: tuple[tuple[int, int], ...], table: np.ndarray, positions: torch.Tensor) -> AttentionInputs:
    lengths = np.array([last - first for first, last in spans])
    ends = np.array([last for _, last in spans])
    owners = np.repeat(np.arange(len(spans)), lengths)
    host = positions.cpu().numpy()
    slots = table[owners, host // BLOCK_SIZE] * BLOCK_SIZE + host % BLOCK_SIZE
    device = positions.device
    return AttentionInputs(
        positions=positions,
        slot_mapping=torch.from_numpy(slots).to(device),
        block_table=torch.from_numpy(table).to(device),
        seq_len=torch.from_numpy(ends).to(device),
        groups=plan_groups(lengths, ends, table, BLOCK_SIZE),
    )
