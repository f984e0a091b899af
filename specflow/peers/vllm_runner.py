"""Runs vLLM's offline engine for `specflow.peers.vllm_engine`; a script of its own.

It is executed by an interpreter that has vLLM and need not have specflow, so it imports nothing of specflow. Commands
come as JSON lines on standard input, answers go as JSON lines to the pipe whose number is the first argument; standard
output and error are vLLM's log.
"""

import json
import os
import sys
import time
from typing import Any

# vLLM's counters, as its Prometheus endpoint names them, without the prefix.
_COUNTERS = ("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
_PER_POSITION = "spec_decode_num_accepted_tokens_per_pos"


def load(engine_args: dict[str, Any]) -> tuple[Any, dict[str, str]]:
    """vLLM's `LLM`, and what really runs."""
    import torch
    import vllm

    llm = vllm.LLM(**engine_args)
    config = llm.llm_engine.vllm_config
    parallel, cache, speculative = config.parallel_config, config.cache_config, config.speculative_config
    facts = {
        "version": vllm.__version__,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": str(config.device_config.device_type),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "model runner": "newer" if getattr(config, "use_v2_model_runner", False) else "older",
        "enforce_eager": str(config.model_config.enforce_eager).lower(),
        "tensor parallel": str(parallel.tensor_parallel_size),
        "pipeline parallel": str(parallel.pipeline_parallel_size),
        "KV block size": str(cache.block_size),
        "prefix caching": str(bool(cache.enable_prefix_caching)).lower(),
        "context": f"{config.model_config.max_model_len} tokens",
    }
    if speculative is not None:
        facts["method"] = str(speculative.method)
        facts["num_speculative_tokens"] = str(speculative.num_speculative_tokens)
        facts["rejection_sample_method"] = str(getattr(speculative, "rejection_sample_method", "standard"))
    return llm, facts


def counters(llm: Any) -> dict[str, Any]:
    """vLLM's own counters of drafts, by name."""
    found: dict[str, Any] = dict.fromkeys(_COUNTERS, 0) | {_PER_POSITION: []}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        if name in _COUNTERS:
            found[name] += int(metric.value)
        elif name == _PER_POSITION:
            found[name] = [int(value) for value in metric.values]
    return found


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was counted in between."""
    found: dict[str, Any] = {name: after[name] - before[name] for name in _COUNTERS}
    earlier = before[_PER_POSITION] or [0] * len(after[_PER_POSITION])
    found[_PER_POSITION] = [new - old for new, old in zip(after[_PER_POSITION], earlier, strict=True)]
    return found


def run(llm: Any, requests: list[dict[str, Any]], concurrency: int, answer: Any) -> dict[str, Any]:
    """All requests, at most `concurrency` in flight; each is answered when it has ended, with the times of its tokens.

    Times are seconds of this process's clock. Tokens that arrive together have the same time.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, before = llm.llm_engine, counters(llm)
    waiting = list(reversed(requests))
    states: dict[str, dict[str, Any]] = {}
    begun = time.perf_counter()
    while waiting or states:
        while waiting and len(states) < concurrency:
            request = waiting.pop()
            params = SamplingParams(**request["sampling"], output_kind=RequestOutputKind.DELTA)
            states[request["id"]] = {"id": request["id"], "arrival": time.perf_counter(), "token_ids": [], "times": []}
            states[request["id"]]["text"] = ""
            engine.add_request(request["id"], {"prompt_token_ids": request["prompt_ids"]}, params)
        for output in engine.step():
            now, state, piece = time.perf_counter(), states[output.request_id], output.outputs[0]
            state["token_ids"] += list(piece.token_ids)
            state["times"] += [now] * len(piece.token_ids)
            state["text"] += piece.text
            if output.finished:
                state |= {"finish_reason": str(piece.finish_reason), "finished": now}
                answer({"event": "finished", "request": states.pop(output.request_id)})
    wall = time.perf_counter() - begun
    return {"event": "done", "wall_seconds": wall, "counters": difference(before, counters(llm))}


def main() -> None:
    """Serve commands until standard input ends: `load`, then `run` any number of times."""
    pipe = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")

    def answer(message: dict[str, Any]) -> None:
        pipe.write(json.dumps(message) + "\n")
        pipe.flush()

    llm = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["op"] == "load":
                llm, facts = load(command["engine_args"])
                answer({"event": "loaded", "facts": facts})
            else:
                answer(run(llm, command["requests"], command["concurrency"], answer))
        except Exception as error:
            answer({"event": "failed", "error": f"{type(error).__name__}: {error}"})
            raise


if __name__ == "__main__":
    main()
