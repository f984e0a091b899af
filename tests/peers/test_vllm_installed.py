"""The export against an installed vLLM's own parser and config classes (marker `peer`).

vLLM may be installed in another environment: SPECFLOW_VLLM_PYTHON names its interpreter.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specflow.peers.vllm_command import serve_words
from specflow.peers.vllm_plan import plan_vllm
from specflow.peers.vllm_process import has_vllm, interpreter
from tests.peers.compositions import compose

pytestmark = pytest.mark.peer
PYTHON = interpreter(None)

# vLLM reads the words of every `vllm serve`, makes its configuration of them and says what it understood.
_CODE = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
for line in sys.stdin:
    given = json.loads(line)
    try:
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        args = EngineArgs.from_cli_args(parser.parse_args(["--model", *given["words"]]))
        config = args.create_engine_config()
        speculative = config.speculative_config
        found = None if speculative is None else {
            key: getattr(speculative, key) for key in given["speculative"]
            if not key.startswith("draft_load") and key != "synthetic_acceptance_length"
        }
        SamplingParams(**given["request"])
        said = {"speculative": found, "dtype": str(config.model_config.dtype),
                "max_num_seqs": config.scheduler_config.max_num_seqs,
                "defaults": config.model_config.get_diff_sampling_param()}
    except SystemExit:
        said = {"error": "the words were refused"}
    except Exception as error:
        said = {"error": f"{type(error).__name__}: {error}"}
    print("ANSWER " + json.dumps(said, default=str), flush=True)
"""

COMPOSITIONS: dict[str, list[str]] = {
    "plain": ["sampling.temperature=0.7", "sampling.top_p=0.9", "sampling.presence_penalty=0.5"],
    "ngram": ["+proposer=ngram", "proposer.prompt_lookup_max=4", "proposer.prompt_lookup_min=2"],
    "ngram_gpu": ["+proposer=ngram_gpu"],
    "suffix": ["+proposer=suffix"],
    "draft_model": ["+proposer=draft_model", "proposer.draft_sample_method=probabilistic"],
    "pard": ["+proposer=pard"],
    "eagle3": ["+proposer=eagle3", "proposer.load_format=dummy"],
    "dflash": ["+proposer=dflash"],
    "block": ["+proposer=eagle3", "sampler=block", "sampler.use_fp64_gumbel=true"],
    "synthetic": ["+proposer=eagle3", "sampler=synthetic", "sampler.synthetic_acceptance_length=2.5"],
    "limits": [
        "scheduler.max_num_seqs=3", "scheduler.max_model_len=512", "scheduler.num_kv_blocks=99",
        "scheduler.long_prefill_token_threshold=64", "scheduler.block_size=32", "seed=5",
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """For each composition the plan, and what vLLM made of it; one process for all, since importing vLLM is slow."""
    if not has_vllm(PYTHON):
        pytest.skip(f"{PYTHON} has no vLLM (SPECFLOW_VLLM_PYTHON names another interpreter)")
    plans = {name: plan_vllm(*compose(*words)) for name, words in COMPOSITIONS.items()}
    lines = [
        json.dumps({"words": serve_words(one)[2:], "speculative": list(one.speculative or ()), "request": one.request})
        for one in plans.values()
    ]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run(
        [PYTHON, "-c", _CODE], input="\n".join(lines), capture_output=True, text=True, check=False, env=environment,
        cwd=Path(PYTHON).parent, timeout=280,
    )  # fmt: skip
    said = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(said) == len(plans), done.stderr[-2000:]
    return {name: (vars(plan), answer) for (name, plan), answer in zip(plans.items(), said, strict=True)}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_vllm_understands_the_export(name: str, answers: dict[str, tuple[dict[str, Any], dict[str, Any]]]) -> None:
    plan, said = answers[name]
    if name == "suffix" and "Arctic Inference" in said.get("error", ""):
        pytest.skip("arctic-inference is not installed beside vLLM")
    assert "error" not in said, said
    assert said["dtype"] == f"torch.{plan['engine']['dtype']}"
    assert said["max_num_seqs"] == plan["engine"]["max_num_seqs"]
    expected = dict(plan["engine"]["override_generation_config"])
    assert said["defaults"] == expected
    if plan["speculative"] is None:
        assert said["speculative"] is None
        return
    kept = {key: value for key, value in plan["speculative"].items() if key in said["speculative"]}
    assert said["speculative"] == kept
    assert {"method", "num_speculative_tokens", "rejection_sample_method"} <= set(kept)
