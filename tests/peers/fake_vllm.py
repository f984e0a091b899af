"""A package `vllm` that answers at once, for the runner script: no model, tokens by rule, counters as vLLM names them.

Token n of an answer is the last id of the prompt plus n + 1. With a speculative config two tokens come per step, of
three drafts the first is accepted. A prompt that starts with 13 makes the engine fail, one with 66 ends the process.
"""

from pathlib import Path

_PACKAGE = """
import dataclasses, json, os, sys
from types import SimpleNamespace as _Bag
__version__ = "0.fake"

@dataclasses.dataclass
class SamplingParams:
    max_tokens: int = 16
    output_kind: object = None
    def __init__(self, **options):
        self.options = options
        self.max_tokens, self.output_kind = options["max_tokens"], options["output_kind"]

class _Engine:
    def __init__(self, arguments):
        self.arguments, self.requests, self.most = arguments, {}, 0
        self.drafts = 3 if arguments.get("speculative_config") else 0
        self.rounds = 0
        speculative = _Bag(method="ngram", num_speculative_tokens=3) if self.drafts else None
        self.vllm_config = _Bag(
            model_config=_Bag(dtype="torch.float32", enforce_eager=True, max_model_len=99),
            parallel_config=_Bag(tensor_parallel_size=1, pipeline_parallel_size=1),
            cache_config=_Bag(block_size=16, enable_prefix_caching=arguments["enable_prefix_caching"]),
            speculative_config=speculative, device_config=_Bag(device_type="cpu"),
        )
    def add_request(self, name, prompt, params):
        ids = prompt["prompt_token_ids"]
        print("request", name, json.dumps({k: v for k, v in params.options.items() if k != "output_kind"}), flush=True)
        if ids[0] == 13:
            print("worker: KeyError: 'what really happened'", flush=True)
            raise ValueError("unlucky")
        if ids[0] == 66: os._exit(5)
        if ids[0] == 77: __import__("time").sleep(30)
        self.requests[name] = [ids[-1], 0, params.max_tokens]
        self.most = max(self.most, len(self.requests))
        print("in flight", len(self.requests), flush=True)
    def step(self):
        outputs = []
        for name, state in list(self.requests.items()):
            count = min(2 if self.drafts else 1, state[2] - state[1])
            self.rounds += bool(self.drafts)
            new = [state[0] + state[1] + n + 1 for n in range(count)]
            state[1] += count
            done = state[1] >= state[2]
            if done: del self.requests[name]
            piece = _Bag(token_ids=new, text="".join(f"<{n}>" for n in new), finish_reason="length" if done else None)
            outputs.append(_Bag(request_id=name, outputs=[piece], finished=done))
        return outputs

class LLM:
    def __init__(self, **arguments):
        print("arguments", json.dumps(arguments), flush=True)
        if arguments["model"] == "missing": raise OSError("no such model")
        self.llm_engine = _Engine(arguments)
    def get_metrics(self):
        rounds, engine = self.llm_engine.rounds, self.llm_engine
        if not engine.drafts: return []
        named = {"num_drafts": rounds, "num_draft_tokens": 3 * rounds, "num_accepted_tokens": rounds}
        found = [_Bag(name=f"vllm:spec_decode_{name}", value=value) for name, value in named.items()]
        return [*found, _Bag(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=[rounds, 0, 0]),
                _Bag(name="vllm:other", value=1)]
"""


def write_fake_vllm(folder: Path) -> Path:
    """Write the package; the folder has to be on PYTHONPATH of the interpreter that runs it."""
    package = folder / "vllm"
    package.mkdir()
    (package / "__init__.py").write_text(_PACKAGE)
    (package / "sampling_params.py").write_text("class RequestOutputKind:\n    DELTA = 1\n")
    return folder
