"""An installed vLLM drafts what we draft with our heads, token by token (marker `peer`).

vLLM may be installed in another environment: SPECFLOW_VLLM_PYTHON names its interpreter. Runs on a CPU.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow import Engine, SamplingParams
from specflow.peers.vllm_process import has_vllm, interpreter
from specflow.workloads.bundled import BundledOptions, BundledWorkload
from specflow.zoo.bundle import PREFIX, resolve

pytestmark = pytest.mark.peer
PYTHON = interpreter(None)
PROMPTS, TOKENS, ROUNDS = 2, 40, 6

# Drafts are caught where they are made. `mend`: vLLM 0.32's norm for CPUs takes the first layer's weight for all layers
# of a DFlash head's context.
_CODE = """
import json, sys, torch, vllm
import vllm.model_executor.models.qwen3_dflash as dflash
from vllm.v1.spec_decode import llm_base_proposer
given, drafts = json.loads(sys.stdin.readline()), []
def normalize(self, keys):
    normed = keys * torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
    return normed * self._k_norm_weights.view(len(keys), 1, 1, -1)
for kind in vars(dflash).values():
    if given["mend"] and isinstance(kind, type) and hasattr(kind, "_normalize_context_k"):
        kind._normalize_context_k = normalize
for kind in vars(llm_base_proposer).values():
    if isinstance(kind, type) and "propose" in vars(kind):
        def propose(self, *args, real=kind.propose, **rest):
            made = real(self, *args, **rest)
            drafts.append(made.tolist()[0])
            return made
        kind.propose = propose
engine = vllm.LLM(given["target"], dtype="float32", max_model_len=1024, max_num_seqs=1, enforce_eager=True,
                  enable_prefix_caching=False, speculative_config=given["speculative"])
for prompt in given["prompts"]:
    drafts.clear()
    sampling = vllm.SamplingParams(temperature=0, max_tokens=given["tokens"], ignore_eos=True, detokenize=False)
    done = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    print("ANSWER " + json.dumps({"tokens": list(done[0].outputs[0].token_ids), "drafts": drafts}), flush=True)
"""


def ours(method: str, drafts: int, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Answers and drafts of our engine."""
    engine = Engine.from_config({"proposer": {"name": method, "num_speculative_tokens": drafts}})
    proposer: Any = engine.proposer
    made: list[list[int]] = []
    real = proposer.propose

    def propose(context: Any) -> Any:
        draft = real(context)
        made.append(draft.token_ids[0].tolist())
        return draft

    monkeypatch.setattr(proposer, "propose", propose)
    found = []
    for prompt in prompts:
        made.clear()
        (output,) = engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True))
        found.append({"tokens": list(output.token_ids), "drafts": list(made)})
    return found


def theirs(method: str, drafts: int, prompts: list[list[int]], mend: bool) -> list[dict[str, Any]]:
    """The same of vLLM."""
    given = {
        "target": str(resolve(f"{PREFIX}target")), "prompts": prompts, "tokens": TOKENS, "mend": mend,
        "speculative": {
            "method": method, "model": str(resolve(f"{PREFIX}{method}")), "num_speculative_tokens": drafts,
        },
    }  # fmt: skip
    quiet = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [PYTHON, "-c", _CODE], input=json.dumps(given), capture_output=True, text=True, check=False,
        env={**os.environ, **quiet}, cwd=Path(PYTHON).parent, timeout=280,
    )  # fmt: skip
    said = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(said) == len(prompts), done.stderr[-2000:]
    return said


@pytest.mark.skipif(torch.cuda.is_available(), reason="compares float32 on a CPU")
@pytest.mark.parametrize(("method", "drafts"), [("dflash", 7), ("eagle3", 5)])
def test_the_same_drafts(method: str, drafts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_vllm(PYTHON):
        pytest.skip(f"{PYTHON} has no vLLM (SPECFLOW_VLLM_PYTHON names another interpreter)")
    plain = Engine.from_config({})
    texts = [prompt.turns[0] for prompt in BundledWorkload(BundledOptions()).read()][:PROMPTS]
    prompts = [list(plain.target.tokenizer.encode(text)) for text in texts]
    expected = ours(method, drafts, prompts, monkeypatch)
    for mine, other in zip(expected, theirs(method, drafts, prompts, mend=True), strict=True):
        assert mine["tokens"] == other["tokens"]
        assert mine["drafts"][:ROUNDS] == other["drafts"][:ROUNDS]
