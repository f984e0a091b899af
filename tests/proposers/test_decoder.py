"""The plain decoder and its fused CPU steps against transformers, on tiny random models in float32."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specflow.checkpoints.decoder import load_decoder
from specflow.checkpoints.decoder_config import read_decoder_config
from specflow.core.limits import PagedKernelsName
from specflow.proposers.cpu_decoder_steps import CpuDecoderSteps
from specflow.proposers.decoder import Decoder
from specflow.proposers.draft_round import chunk_inputs
from tests.models import tiny_llama, tiny_mistral, tiny_qwen2, tiny_qwen3

BLOCK = 4
CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "llama": (tiny_llama, {}),
    "llama, biases, tied": (tiny_llama, {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "llama3 rope": (tiny_llama, {"rope_parameters": LLAMA3}),
    "linear rope": (tiny_llama, {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "one kv head": (tiny_llama, {"num_key_value_heads": 1}),
    "mistral": (tiny_mistral, {}),
    "qwen2": (tiny_qwen2, {}),
    "qwen3": (tiny_qwen3, {}),
}


class Case:
    """A saved model, run by transformers and by us."""

    def __init__(self, folder: Path) -> None:
        self.reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        randomise_vectors(self.reference)
        self.reference.save_pretrained(folder)
        self.reference.eval()
        self.config = read_decoder_config(folder)
        self.weights = load_decoder(folder, self.config, CPU, torch.float32)

    def expected(self, tokens: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.reference(tokens.unsqueeze(0)).logits[0]

    def decoder(self, kernels: PagedKernelsName = "torch") -> Decoder:
        return Decoder(self.weights, num_blocks=60, block_size=BLOCK, num_positions=64, kernels=kernels)


def randomise_vectors(model: torch.nn.Module) -> None:
    """Norm weights and biases are ones and zeros at first, which would hide a forgotten one."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            noise = torch.randn(parameter.shape, generator=generator) * 0.3
            parameter.data = noise + (1.0 if "norm" in name else 0.0)


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    make, options = MODELS[request.param]
    return Case(make(tmp_path_factory.mktemp("decoder"), layers=2, **options))


def tables(count: int) -> np.ndarray:
    """Block tables of `count` requests, blocks in no order; block 0 is nobody's."""
    blocks = np.random.default_rng(0).permutation(np.arange(1, 1 + count * 16))[: count * 14]
    return blocks.reshape(count, 14).astype(np.int64)


def run(
    decoder: Decoder, sequences: list[torch.Tensor], first: list[int], last: list[int], blocks: np.ndarray
) -> torch.Tensor:
    spans = np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)
    inputs, _ = chunk_inputs(*spans, blocks, decoder.rotary, BLOCK, CPU)
    packed = torch.cat([sequence[a:b] for sequence, a, b in zip(sequences, first, last, strict=True)])
    return decoder.logits(decoder.forward(packed, inputs))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def sequences(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(1, 384, (length,), generator=generator) for length in lengths]


def test_whole_prompt(case: Case) -> None:
    (tokens,) = sequences(40)
    close(run(case.decoder(), [tokens], [0], [40], tables(1)), case.expected(tokens))


def test_batch_in_chunks_over_shuffled_blocks(case: Case) -> None:
    rows = sequences(30, 17, 30)
    decoder, blocks = case.decoder(), tables(3)
    early = run(decoder, rows, [0, 0, 0], [9, 9, 4], blocks)
    late = run(decoder, rows, [9, 9, 4], [30, 17, 30], blocks)
    parts = zip(early.split([9, 9, 4]), late.split([21, 8, 26]), rows, strict=True)
    for first, second, tokens in parts:
        close(torch.cat([first, second]), case.expected(tokens))


@pytest.mark.parametrize("per_request", [1, 2])
def test_fused_steps(case: Case, per_request: int) -> None:
    rows = sequences(30, 17, 23)
    decoder, blocks = case.decoder(), tables(3)
    steps = CpuDecoderSteps(decoder, 64)
    ends = [30 - per_request, 17 - per_request, 23 - per_request]
    run(decoder, rows, [0, 0, 0], ends, blocks)
    fed = torch.cat([tokens[end:] for tokens, end in zip(rows, ends, strict=True)])
    found = steps.run(fed, np.array(ends), blocks)
    close(found, torch.stack([case.expected(tokens)[-1] for tokens in rows]))


def test_fused_steps_leave_the_same_pages_as_the_plain_decoder(case: Case) -> None:
    (tokens,) = sequences(20)
    plain, fused = case.decoder(), case.decoder()
    run(plain, [tokens], [0], [20], tables(1))
    run(fused, [tokens], [0], [18], tables(1))
    CpuDecoderSteps(fused, 64).run(tokens[18:], np.array([18]), tables(1))
    for expected, found in zip(plain.pages, fused.pages, strict=True):
        close(found[1:], expected[1:])


def test_triton_kernels(qwen3_folder: Path) -> None:
    """Rotation, pages and attention by kernels: the same logits and pages."""
    pytest.importorskip("triton")
    rows, blocks = sequences(9, 6), tables(2)
    weights = load_decoder(qwen3_folder, read_decoder_config(qwen3_folder), CPU, torch.float32)
    kinds: tuple[PagedKernelsName, ...] = ("torch", "triton")
    plain, compiled = (
        Decoder(weights, num_blocks=60, block_size=BLOCK, num_positions=64, kernels=kernels) for kernels in kinds
    )
    assert compiled.kernels.name == "Triton"
    for first, last in (([0, 0], [5, 4]), ([5, 4], [9, 6])):
        close(run(compiled, rows, first, last, blocks), run(plain, rows, first, last, blocks))
    for expected, found in zip(plain.pages, compiled.pages, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_positions_without_a_block_write_to_block_zero(qwen3_folder: Path) -> None:
    config = read_decoder_config(qwen3_folder)
    decoder = Decoder(
        load_decoder(qwen3_folder, config, CPU, torch.float32), num_blocks=4, block_size=BLOCK, num_positions=64
    )
    steps = CpuDecoderSteps(decoder, 64)
    blocks = np.array([[1, 0]], dtype=np.int64)
    for position in (2, 5, 11):  # the second has no block yet, the third not even a column
        steps.run(torch.tensor([7]), np.array([position]), blocks)
    written = [bool(block.any()) for block in decoder.pages[0]]
    assert written == [True, True, False, False]


def test_bfloat16_is_near_float32(qwen3_folder: Path) -> None:
    (tokens,) = sequences(20)
    config = read_decoder_config(qwen3_folder)
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        weights = load_decoder(qwen3_folder, config, CPU, dtype)
        decoder = Decoder(weights, num_blocks=60, block_size=BLOCK, num_positions=64)
        assert CpuDecoderSteps.serves(decoder) == (dtype == torch.float32)
        results.append(run(decoder, [tokens], [0], [20], tables(1)))
    assert results[1].dtype == torch.bfloat16
    assert torch.corrcoef(torch.stack([result.float().flatten() for result in results]))[0, 1] > 0.98
