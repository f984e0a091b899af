"""Engines over tiny models, and Hugging Face's own `generate` as the outside referee."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.core.batch import PackedBatch, TargetOutput
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.proposers.base import Proposer
from specflow.samplers.base import Sampler
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.schedulers.continuous import ContinuousOptions, ContinuousScheduler
from specflow.targets.hf import HfOptions, HfTarget
from specflow.testing.proposers import OracleProposer

PROMPTS: list[list[int]] = [[5, 9, 17, 3], [40, 41, 42, 43, 44, 45, 46, 47, 48], [7], [300, 2, 300, 2, 300, 2, 11]]


def make_engine(
    folder: Path,
    proposer: Proposer | None = None,
    sampler: Sampler | None = None,
    *,
    run_ahead: bool = False,
    **scheduler: Any,
) -> Engine:
    """An engine on a saved model; scheduler options by name. run_ahead: see `CpuOptions`."""
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 4, "max_model_len": 128, **scheduler}
    return Engine(
        HfTarget(HfOptions(path=str(folder), dtype="float32", prove=False)),
        proposer,
        sampler or StandardSampler(StandardOptions()),
        ContinuousScheduler(ContinuousOptions(**options)),
        CpuBackend(CpuOptions(run_ahead=run_ahead)),
    )


@lru_cache(maxsize=4)
def reference_model(folder: Path) -> Any:
    """The same checkpoint in transformers alone."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def generate_by_transformers(folder: Path, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> list[int]:
    """Greedy continuation by transformers' `generate`, without the prompt."""
    model = reference_model(folder)
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=max_new_tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )
    return output[0, len(prompt) :].tolist()


def plain(folder: Path, prompts: Sequence[Any], sampling: Any, **options: Any) -> list[Any]:
    """Outputs of plain decoding."""
    return make_engine(folder, **options).generate(prompts, sampling)


def oracle_engine(
    folder: Path,
    prompts: Sequence[Sequence[int]],
    num_drafts: int,
    wrong_at: Any = None,
    length: int = 70,
    **options: Any,
) -> tuple[Engine, list[str]]:
    """An engine whose proposer knows each prompt's greedy continuation (EOS ignored); and the request ids to use."""
    free = plain(folder, prompts, SamplingParams(max_tokens=length, ignore_eos=True))
    names = [f"r{index}" for index in range(len(prompts))]
    sequences = {name: [*prompt, *output.token_ids] for name, prompt, output in zip(names, prompts, free, strict=True)}
    if isinstance(wrong_at, list):
        wrong_at = dict(zip(names, wrong_at, strict=True))
    return make_engine(folder, OracleProposer(sequences, num_drafts, wrong_at, vocab_size=384), **options), names


def watch_positions(engine: Engine) -> list[int]:
    """The highest position of every target pass from now on."""
    highest: list[int] = []
    forward = engine.target.forward

    def watched(batch: PackedBatch) -> TargetOutput:
        highest.append(int(batch.positions.max()))
        return forward(batch)

    engine.target.forward = watched
    return highest


def layer_outputs(folder: Path, ids: list[int]) -> dict[int, torch.Tensor]:
    """Output of every decoder layer, and of the embedding as -1, by hooks on transformers' own model: [T, E] each."""
    model, seen = reference_model(folder), {}

    def keep(layer: int) -> Any:
        return lambda _module, _inputs, output: seen.update({layer: (output if torch.is_tensor(output) else output[0])})

    modules = [model.model.embed_tokens, *model.model.layers]
    handles = [module.register_forward_hook(keep(index - 1)) for index, module in enumerate(modules)]
    with torch.no_grad():
        model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return {layer: states[0] for layer, states in seen.items()}
