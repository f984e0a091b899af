"""`engine=transformers`: a composition run by Hugging Face's `generate`.

Prompt lookup and an assistant model are what it drafts with, for one request at a time. What it drafted and accepted is
read off from outside: a hook sees how many tokens a pass of the target checks, a streamer how many came out of it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from specflow.checkpoints.location import find_folder
from specflow.core.request import FinishReason
from specflow.core.sampling_params import SamplingParams
from specflow.engine.outputs import RequestOutput
from specflow.errors import ConfigError, SpecflowError
from specflow.metrics.acceptance import AcceptanceCounts
from specflow.options import build_options, show
from specflow.peers.base import DecodingEngine, OnFinish, PeerPass, PeerRequest, PeerSession, PeerSetup
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry
from specflow.targets.hf import HfOptions
from specflow.targets.loading import load_checkpoint
from specflow.targets.transformers_facts import eos_token_ids
from specflow.zoo.bundle import PREFIX

__all__ = ["TransformersEngine", "TransformersOptions", "generation_options"]

# Sampling options that are not passed to generate; all others are.
_WHY_NOT = {
    "presence_penalty": "generate has no such penalty",
    "frequency_penalty": "generate has no such penalty",
    "logit_bias": "it is not passed on",
    "bad_words": "it is not passed on",
    "stop": "it is not passed on",
    "include_stop_str_in_output": "it is not passed on",
    "logprobs": "it is not passed on",
}


@dataclass(frozen=True, kw_only=True)
class TransformersOptions:
    """Options of `engine=transformers`."""

    attn_implementation: str = "sdpa"  # its attention: sdpa, eager or what else it knows


class TransformersEngine(DecodingEngine):
    """`generate` in this process."""

    name = "transformers"

    def __init__(self, options: TransformersOptions) -> None:
        self.options = options

    def check(self, config: Mapping[str, Any], registry: Registry) -> None:
        """See `DecodingEngine.check`."""
        problems = [*_target_problems(config), *_proposer_problems(config, registry), *_sampling_problems(config)]
        batch_sizes = list((config.get(Kind.TASK) or {}).get("batch_sizes") or [1])
        if batch_sizes != [1]:
            problems.append(
                f"task.batch_sizes={batch_sizes}: it runs one request at a time; write task.batch_sizes=[1]"
            )
        if problems:
            raise ConfigError("\n".join(f"engine=transformers: {problem}" for problem in problems))

    def caveats(self, config: Mapping[str, Any], registry: Registry) -> Sequence[str]:
        """See `DecodingEngine.caveats`."""
        return ["scheduler: transformers has none and runs one request after the other"]

    @contextmanager
    def open(self, setup: PeerSetup) -> Iterator[PeerSession]:
        """See `DecodingEngine.open`."""
        session = _Session(setup, self.options)
        try:
            yield session
        finally:
            session.close()


# -- what it cannot do ---------------------------------------------------------------------------------------------
def _target_problems(config: Mapping[str, Any]) -> Iterator[str]:
    target = config[Kind.TARGET]
    if target["name"] not in ("hf", "bundled"):
        yield f"target={target['name']}: it runs Hugging Face checkpoints only"


def _proposer_problems(config: Mapping[str, Any], registry: Registry) -> Iterator[str]:
    node = config.get(Kind.PROPOSER)
    if node is None:
        return
    name = node["name"]
    options = registry.get(Kind.PROPOSER, name).check(node)
    if name == "ngram":
        if options.lookup_min != 1:
            value = show(options.prompt_lookup_min)
            yield (
                f"proposer.prompt_lookup_min={value}: it looks for n-grams down to one token; "
                "write proposer.prompt_lookup_min=1, and proposer.prompt_lookup_max as well"
            )
        if options.match_policy != "earliest":
            yield f"proposer.match_policy={options.match_policy}: it takes the earliest match"
    elif name == "draft_model":
        if options.dtype != "auto":
            yield f"proposer.dtype={options.dtype}: its assistant runs in the target's precision; write auto"
        sampled = _sampling(config).temperature > 0
        if sampled and options.draft_sample_method == "greedy":
            yield "proposer.draft_sample_method=greedy: its assistant samples as the target does; write probabilistic"
    else:
        yield f"proposer={name}: it has no such method; there are ngram (prompt lookup) and draft_model (assistant)"
    if config[Kind.SAMPLER]["name"] != "standard":
        yield f"sampler={config[Kind.SAMPLER]['name']}: it has its own rejection sampling; write sampler=standard"


def _sampling(config: Mapping[str, Any]) -> SamplingParams:
    return build_options(SamplingParams, config.get("sampling") or {}, "sampling")


def _sampling_problems(config: Mapping[str, Any]) -> Iterator[str]:
    params = _sampling(config)
    for key, reason in _WHY_NOT.items():
        value = getattr(params, key)
        if value not in (getattr(SamplingParams(), key), [], ()):
            yield f"sampling.{key}={show(value)}: {reason}"


# -- running -------------------------------------------------------------------------------------------------------
def _stops(params: SamplingParams, eos_ids: Sequence[int]) -> list[int]:
    """Ids that end an answer. eos_ids: of the model."""
    return sorted({*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)})


def generation_options(params: SamplingParams, stops: Sequence[int]) -> dict[str, Any]:
    """Arguments of `generate` for one request. stops: ids that end the answer."""
    options: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "min_new_tokens": params.min_tokens or None,
        "do_sample": not params.greedy,
        "repetition_penalty": params.repetition_penalty,
        "eos_token_id": list(stops) or None,
        "pad_token_id": stops[0] if stops else 0,
    }
    if not params.greedy:
        options |= {
            "temperature": params.temperature,
            "top_k": max(params.top_k, 0),
            "top_p": params.top_p,
            "min_p": params.min_p or None,
        }
    return options


class _Session(PeerSession):
    def __init__(self, setup: PeerSetup, options: TransformersOptions) -> None:
        self._device = setup.device
        node = setup.config[Kind.TARGET]
        self._source: HfOptions = setup.registry.get(Kind.TARGET, node["name"]).build(node).options
        self._model, self._tokenizer = _load(self._source, setup.device, options.attn_implementation)
        self._eos = eos_token_ids(self._model, self._tokenizer)
        self._attention = options.attn_implementation
        self._assistant: Any = None
        self._drafting: dict[str, Any] = {}
        if setup.speculate:
            self._prepare_drafts(setup)

    def _prepare_drafts(self, setup: PeerSetup) -> None:
        options = setup.registry.get(Kind.PROPOSER, setup.config[Kind.PROPOSER]["name"]).check(
            setup.config[Kind.PROPOSER]
        )
        drafts = options.num_speculative_tokens
        if setup.config[Kind.PROPOSER]["name"] == "ngram":
            self._drafting = {"prompt_lookup_num_tokens": drafts, "max_matching_ngram_size": options.lookup_max}
            return
        folder = find_folder(options.path or f"{PREFIX}draft", options.revision, "proposer.path")
        dtype: Any = str(self._model.dtype).removeprefix("torch.")
        source = HfOptions(path=str(folder), dtype=dtype, tokenizer=self._source.tokenizer or self._source.path)
        self._assistant, _ = _load(source, self._device, self._attention)
        # The assistant's own generation config says how it drafts: a fixed number, whatever it thinks of its chances.
        config = self._assistant.generation_config
        config.num_assistant_tokens, config.num_assistant_tokens_schedule = drafts, "constant"
        config.assistant_confidence_threshold = 0.0
        self._drafting = {"assistant_model": self._assistant}

    def close(self) -> None:
        """Give the memory back."""
        self._model = self._assistant = None
        self._drafting = {}

    def run(self, requests: Sequence[PeerRequest], concurrency: int, on_finish: OnFinish) -> PeerPass:
        """See `PeerSession.run`."""
        counts, outputs = AcceptanceCounts(), []
        begun = time.perf_counter()
        for request in requests:
            outputs.append(self._answer(request, counts))
            on_finish(outputs[-1])
        return PeerPass(outputs, time.perf_counter() - begun, counts)

    @torch.inference_mode()
    def _answer(self, request: PeerRequest, counts: AcceptanceCounts) -> RequestOutput:
        params, arrival = request.sampling, time.perf_counter()
        stops = _stops(params, self._eos)
        ids = torch.tensor([request.prompt_ids], dtype=torch.int64, device=self._device)
        if params.seed is not None:
            torch.manual_seed(params.seed)
        watch = _Watch(len(request.prompt_ids), self._synchronize)
        hook = self._model.register_forward_pre_hook(watch.before_pass, with_kwargs=True)
        try:
            options = generation_options(params, stops)
            self._model.generate(
                ids, attention_mask=torch.ones_like(ids), streamer=watch, use_cache=True, **options, **self._drafting
            )
        except (ValueError, RuntimeError, TypeError) as error:
            raise SpecflowError(f"engine=transformers failed at request {request.request_id}: {error}") from error
        finally:
            hook.remove()
        rounds = watch.rounds if self._drafting else []
        for drafted, accepted in rounds:
            counts.add(drafted, accepted)
        real = [one for one in rounds if one[0]]
        stopped = bool(watch.tokens) and watch.tokens[-1] in stops
        return RequestOutput(
            request_id=request.request_id,
            prompt_ids=request.prompt_ids,
            token_ids=tuple(watch.tokens),
            text=self._tokenizer.decode(watch.tokens, skip_special_tokens=True),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            logprobs=(),
            rounds=len(real),
            drafted=sum(drafted for drafted, _ in real),
            accepted=sum(accepted for _, accepted in real),
            arrival=arrival,
            token_times=tuple(watch.times),
            finished=time.perf_counter(),
            seed=params.seed or 0,
        )

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def describe(self) -> Mapping[str, str]:
        """See `PeerSession.describe`."""
        facts = {
            "version": transformers.__version__,
            "torch": torch.__version__,
            "device": str(self._device),
            "dtype": str(self._model.dtype).removeprefix("torch."),
            "attention": str(self._model.config._attn_implementation),
            "threads": str(torch.get_num_threads()),
        }
        if self._drafting:
            named = {key: value for key, value in self._drafting.items() if key != "assistant_model"}
            facts["method"] = "assisted generation" if self._assistant is not None else "prompt lookup"
            facts |= {key: str(value) for key, value in named.items()}
        if self._assistant is not None:
            facts["num_assistant_tokens"] = str(self._assistant.generation_config.num_assistant_tokens)
        return facts


class _Watch:
    """A streamer, and a hook before every pass: tokens with their times, and (drafted, accepted) of every round."""

    def __init__(self, prompt_tokens: int, synchronize: Callable[[], None]) -> None:
        self._prompt_tokens, self._synchronize = prompt_tokens, synchronize
        self._prompt_seen = False
        self._drafted = 0
        self.tokens: list[int] = []
        self.times: list[float] = []
        self.rounds: list[tuple[int, int]] = []

    def before_pass(self, _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The first pass has the prompt and the drafts, each later one the newest token and the drafts."""
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        self._drafted = ids.shape[1] - (1 if self.tokens else self._prompt_tokens)

    def put(self, value: torch.Tensor) -> None:
        """The prompt first, then what came out of each pass."""
        if not self._prompt_seen:
            self._prompt_seen = True
            return
        self._synchronize()
        new = value.flatten().tolist()
        self.tokens += new
        self.times += [time.perf_counter()] * len(new)
        self.rounds.append((self._drafted, min(len(new) - 1, self._drafted)))

    def end(self) -> None:
        """The answer is complete."""


def _load(source: HfOptions, device: torch.device, attention: str) -> tuple[Any, Any]:
    """A checkpoint as specflow reads it, with the attention of transformers, and its tokenizer."""
    model, tokenizer = load_checkpoint(source, device)
    try:
        model.set_attn_implementation(attention)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"engine.attn_implementation={attention} does not work for {source.path}: {error}") from error
    return model, tokenizer
