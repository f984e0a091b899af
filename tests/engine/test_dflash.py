"""DFlash in the engine: right where the head has learnt the text; tests/proposers/test_conformance has the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.checkpoints.dflash import save_dflash
from specflow.core.sampling_params import SamplingParams
from specflow.heads.dflash import DFlashHead
from specflow.proposers.dflash import DFlashOptions, DFlashProposer
from specflow.targets.base import TargetFacts, TokenTables
from specflow.targets.hf import HfOptions, HfTarget
from specflow.testing.conformance import assert_lossless
from specflow.training.dflash import DFlashTraining, DFlashTrainingOptions
from specflow.training.objective import TrainBatch
from tests.engine.helpers import PROMPTS, generate_by_transformers, make_engine, reference_model

SIZES: dict[str, Any] = {"num_layers": 2, "block_size": 9, "mask_token_id": 383}
LAYOUTS = {"fill-in": False, "next-token": True}


def target_parts(folder: Path) -> tuple[TargetFacts, TokenTables]:
    target = HfTarget(HfOptions(path=str(folder), dtype="float32", prove=False))
    target.load(CpuBackend(CpuOptions()))
    return target.facts, target.token_tables()


def make_training(folder: Path, **options: Any) -> DFlashTraining:
    training = DFlashTraining(DFlashTrainingOptions(**SIZES | options))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        training.build(*target_parts(folder), None, torch.device("cpu"))
    return training


def dflash(folder: Path, num_drafts: int | None = None, method: Any = "greedy") -> DFlashProposer:
    return DFlashProposer(
        DFlashOptions(path=str(folder), num_speculative_tokens=num_drafts, draft_sample_method=method)
    )


# -- a head that has learnt a text --------------------------------------------------------------------------------


def learnt_batch(folder: Path, prompts: list[list[int]], length: int) -> TrainBatch:
    """The target's greedy answers to prompts as one pack, with its states as transformers computes them."""
    model = reference_model(folder)
    texts = [[*prompt, *generate_by_transformers(folder, prompt, length)] for prompt in prompts]
    taps, hidden, last = make_training(folder).layers, [], []
    for text in texts:
        with torch.no_grad():
            states = model(torch.tensor([text]), output_hidden_states=True).hidden_states
        hidden.append(torch.stack([states[layer + 1][0] for layer in taps], 1))
        last.append(states[-1][0])
    places = [(number, place) for number, text in enumerate(texts) for place in range(len(text))]
    return TrainBatch(
        token_ids=torch.tensor([token for text in texts for token in text]),
        predicted=torch.tensor([place >= len(prompts[number]) for number, place in places]),
        documents=torch.tensor([number for number, _ in places]),
        positions=torch.tensor([place for _, place in places]),
        hidden=torch.cat(hidden),
        last_hidden=torch.cat(last),
        sample_ids=("a",) * len(texts),
        seed=0,
    )


def learn(training: DFlashTraining, batch: TrainBatch, steps: int) -> DFlashHead:
    optimiser = torch.optim.AdamW(training.module.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        parts = training.loss(batch)
        optimiser.zero_grad()
        (parts.total / parts.weight).backward()
        optimiser.step()
        schedule.step()
    return training.module


@pytest.mark.parametrize(("layout", "loss"), [("fill-in", "ce"), ("next-token", "kl")])
def test_a_head_that_learnt_the_text_is_accepted(layout: str, loss: Any, llama_folder: Path, tmp_path: Path) -> None:
    """C36: mask, labels, positions, layout and layers agree from training through the checkpoint to the engine."""
    prompts = PROMPTS[1:2]
    batch = learnt_batch(llama_folder, prompts, 40)
    training = make_training(llama_folder, sample_from_anchor=LAYOUTS[layout], num_anchors=40, loss=loss, block_size=6)
    save_dflash(tmp_path, learn(training, batch, 300))
    measures = training.loss(batch).measures
    last = training.num_speculative_tokens - 1
    total, count = measures[f"accuracy/{last}"]
    engine = make_engine(llama_folder, dflash(tmp_path))
    outputs = assert_lossless(engine, prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    rate = sum(output.accepted for output in outputs) / sum(output.drafted for output in outputs)
    assert rate > 0.95, f"{rate:.2f} accepted; the last draft was right in {total / count:.2f} of training"
