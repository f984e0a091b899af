"""Decode steps captured in graphs on a GPU: same tokens and counters as operation by operation."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.core.sampling_params import SamplingParams
from specflow.engine.build import build_engine
from specflow.engine.engine import Engine
from specflow.testing.conformance import assert_idle
from specflow.workloads.bundled import BundledOptions, BundledWorkload
from tests.engine.test_decode_loop import assert_alike, loop_of
from tests.heads.eagle3_helpers import make_head, save_head

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GREEDY = SamplingParams(max_tokens=40, ignore_eos=True)
LOOKUP = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}
BUNDLED: dict[str, dict[str, Any]] = {
    "plain": {},
    "ngram": LOOKUP,
    "ngram_gpu": LOOKUP,
    "draft_model": {"draft_sample_method": "probabilistic"},
    "pard": {},
    "dflash": {},
    "eagle3": {},
}


def engine(graphs: bool, target: dict[str, Any], name: str, options: dict[str, Any]) -> Engine:
    parts: dict[str, Any] = {
        "target": target,
        "backend": {"name": "cuda", "cuda_graphs": graphs},
        "scheduler": {"max_num_seqs": 32, "max_model_len": 256},
    }
    if name != "plain":
        parts["proposer"] = {"name": name, **options}
    return build_engine(parts)


def compare(target: dict[str, Any], name: str, options: dict[str, Any], prompts: list[Any]) -> Engine:
    """Batches of 1, 8 and 32; requests come in and end at different steps."""
    eager, graphs = (engine(on, target, name, options) for on in (False, True))
    for batch in (1, 8, 32):
        some = [prompts[index % len(prompts)] for index in range(batch + batch // 2)]
        sampling = [replace(GREEDY, max_tokens=24 + index % 17) for index in range(len(some))]
        names = [f"{batch}-{index}" for index in range(len(some))]
        before, after = (one.generate(some, sampling, request_ids=names, concurrency=batch) for one in (eager, graphs))
        assert_alike(before, after)
    before, after = (
        one.generate(
            prompts[:4],
            [replace(GREEDY, temperature=0.8, top_p=top_p, seed=7) for top_p in (1.0, 0.9, 1.0, 1.0)],
            request_ids=list("abcd"),
        )
        for one in (eager, graphs)
    )
    assert_alike(before, after)
    assert not graphs.incidents
    assert loop_of(graphs).num_steps > 0
    assert_idle(graphs)
    return graphs


@pytest.mark.parametrize("name", list(BUNDLED))
def test_graphs_change_nothing(name: str) -> None:
    prompts = [prompt.turns[0][:200] for prompt in BundledWorkload(BundledOptions()).load()]
    graphs = compare({"name": "bundled", "dtype": "float32"}, name, BUNDLED[name], prompts)
    assert "CUDA graphs" in graphs.describe()["backend"]["decode steps"]


def test_an_eagle3_head(llama_folder: Path, tmp_path: Path) -> None:
    head = str(save_head(tmp_path, make_head(own_embedding=False, own_head=False)))
    target = {"name": "hf", "path": str(llama_folder), "dtype": "float32"}
    prompts = [[(7 * i + j) % 300 + 1 for j in range(3 + 5 * i)] for i in range(12)]
    compare(target, "eagle3", {"path": head, "num_speculative_tokens": 3}, prompts)


def test_a_proposer_that_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named, the rest stays in a graph, and no error of the failed capture is left behind."""
    from specflow.proposers.ngram_gpu import NgramGpuProposer

    propose = NgramGpuProposer.propose

    def waits(self: NgramGpuProposer, context: Any) -> Any:
        draft = propose(self, context)
        assert int(draft.num_drafts.sum()) >= 0
        return draft

    monkeypatch.setattr(NgramGpuProposer, "propose", waits)
    graphs = engine(True, {"name": "bundled", "dtype": "float32"}, "ngram_gpu", LOOKUP)
    outputs = graphs.generate(["def add(a, b):\n    return a + b\n\ndef add"], GREEDY)
    assert len(outputs[0].token_ids) == 40
    assert [name.partition(" was not captured")[0] for name in graphs.incidents] == ["ngram_gpu"]
    assert "drafting in between" in graphs.describe()["backend"]["decode steps"]
