"""A composition as vLLM's arguments, with the fate of every option.

Names are those of vLLM 0.32's `EngineArgs` and `SamplingParams`. Nothing of vLLM is imported here.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, is_dataclass
from pathlib import Path
from typing import Any

from specflow.checkpoints.folder import read_json
from specflow.core.sampling_params import SamplingParams
from specflow.options import build_options, show
from specflow.peers.fates import OptionFate, OptionFates
from specflow.peers.vllm_methods import OLDER_RUNNER, place_of, speculative_config
from specflow.peers.vllm_options import VllmOptions
from specflow.plugins.component import VLLM_METHOD, Kind
from specflow.plugins.registry import Registry
from specflow.zoo.bundle import PREFIX

__all__ = ["VllmPlan", "gib", "plan_vllm"]

_HALF = "vLLM's auto runs a float32 checkpoint in half precision, and the checkpoint is not here to be asked: name it"
_TARGET_OWN = {
    "prove": "a check of specflow's engine",
    "weight_layout": "vLLM lays out weights its own way",
    "attention": "vLLM chooses its own kernels (--attention-backend)",
    "linears": "vLLM chooses its own kernels",
    "experts": "vLLM chooses its own kernels (--moe-backend)",
}
_SAMPLERS = {"standard": "standard", "block": "block", "synthetic": "synthetic"}
_OWN_SAMPLERS = {
    "coupled": "vLLM has no method that keeps plain decoding's output under a seed; sampler=standard keeps its law",
    "typical": "vLLM has no lossy acceptance rule of this kind",
}
# Sampling options that a vLLM server takes as defaults of all requests; the others go with each request.
_SERVED = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_NOT_WITH_DRAFTS = ("min_p", "logit_bias")
_PREFIX_CACHING = (
    "vLLM keeps the KV pages of prompts for later requests, and specflow does not: prompts with a common beginning "
    "start sooner there (--no-enable-prefix-caching switches it off)"
)


def gib(value: float) -> int:
    """GiB as bytes."""
    return round(value * 2**30)


@dataclass
class VllmPlan:
    """Everything that vLLM has to be told, and what it cannot be told."""

    model: str = ""
    engine: dict[str, Any] = field(default_factory=dict)  # `EngineArgs` by name, the model apart
    speculative: dict[str, Any] | None = None  # None: plain decoding
    request: dict[str, Any] = field(default_factory=dict)  # `SamplingParams` of each request by name
    served: dict[str, Any] = field(default_factory=dict)  # those of them that a server has as defaults
    needs: list[str] = field(default_factory=list)  # packages besides vLLM
    notes: list[str] = field(default_factory=list)  # differences that no option stands for
    fates: OptionFates = field(default_factory=OptionFates)

    @property
    def impossible(self) -> list[OptionFate]:
        """Why vLLM cannot run the composition; empty when it can."""
        return self.fates.of("impossible")


def plan_vllm(config: Mapping[str, Any], registry: Registry, options: VllmOptions | None = None) -> VllmPlan:
    """The plan for a checked composition. options: of `engine=vllm`; None: its defaults."""
    plan = VllmPlan()
    _target(*_node(config, registry, Kind.TARGET), plan)
    _proposer(config, registry, plan)
    _sampler(*_node(config, registry, Kind.SAMPLER), plan)
    _scheduler(*_node(config, registry, Kind.SCHEDULER), plan)
    _backend(*_node(config, registry, Kind.BACKEND), plan)
    _sampling(build_options(SamplingParams, config.get("sampling") or {}, "sampling"), plan)
    seed = int(config.get("seed", 0))
    plan.engine["seed"] = seed
    plan.fates.add("seed", seed, "mapped", "--seed; another generator than specflow's, so sampled text differs")
    plan.notes.append(_PREFIX_CACHING)
    _parallel(options or VllmOptions(), plan)
    return plan


def _node(config: Mapping[str, Any], registry: Registry, kind: Kind) -> tuple[str, dict[str, Any]]:
    """Name of a component and all its options, defaults filled in."""
    values = config[kind]
    checked = registry.get(kind, values["name"]).check(values)
    return str(values["name"]), asdict(checked) if is_dataclass(checked) else {}  # type: ignore[arg-type]


def _target(name: str, options: dict[str, Any], plan: VllmPlan) -> None:
    fates = plan.fates
    if name not in ("hf", "bundled"):
        fates.add("target", name, "impossible", "vLLM runs Hugging Face checkpoints only")
        fates.leave_out("target", options, dict.fromkeys(options, "the target has no counterpart"))
        return
    fates.add("target", name, "mapped", "the model that is served")
    path = str(options.get("path") or f"{PREFIX}target")
    plan.model = place_of(path)
    if "path" in options:
        gguf = path.endswith(".gguf")
        text = "vLLM reads .gguf files only by a plugin with rules of its own: give a folder with safetensors"
        fates.add("target.path", path, "impossible" if gguf else "mapped", text if gguf else "the model that is served")
    _dtype(options["dtype"], plan)
    for key in ("revision", "tokenizer"):
        if key in options:
            fates.add(f"target.{key}", options[key], "mapped", f"--{key}")
            plan.engine |= {key: options[key]} if options[key] is not None else {}
    if options.get("tokenizer"):
        plan.engine["tokenizer"] = place_of(options["tokenizer"])
    if "trust_remote_code" in options:
        fates.add("target.trust_remote_code", options["trust_remote_code"], "mapped", "--trust-remote-code")
        plan.engine |= {"trust_remote_code": True} if options["trust_remote_code"] else {}
    if "load_format" in options:
        fates.add("target.load_format", options["load_format"], "mapped", "--load-format")
        plan.engine |= {"load_format": "dummy"} if options["load_format"] == "dummy" else {}
    fates.leave_out("target", options, _TARGET_OWN)


def _dtype(asked: str, plan: VllmPlan) -> None:
    """specflow's `auto` is the checkpoint's own precision, vLLM's is not: it is named where it can be found out."""
    stored = _stored_dtype(plan.model) if asked == "auto" else asked
    plan.engine["dtype"] = stored or "auto"
    if stored is None:
        plan.fates.add("target.dtype", asked, "differs", _HALF)
    else:
        plan.fates.add("target.dtype", asked, "mapped", f"--dtype {stored}")


def _stored_dtype(model: str) -> str | None:
    folder = Path(model)
    if not (folder / "config.json").is_file():
        return None
    raw = read_json(folder / "config.json")
    found = str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")
    return found if found in ("float32", "bfloat16", "float16") else None


def _proposer(config: Mapping[str, Any], registry: Registry, plan: VllmPlan) -> None:
    if config.get(Kind.PROPOSER) is None:
        plan.fates.add("proposer", None, "mapped", "no --speculative-config: plain decoding")
        return
    name, options = _node(config, registry, Kind.PROPOSER)
    known = registry.components(VLLM_METHOD).get(name)
    writer = None if known is None else known.build(config[Kind.PROPOSER])
    plan.speculative = speculative_config(name, options, plan.engine.get("dtype", "auto"), plan.fates, writer)
    if name == "suffix":
        plan.needs.append("arctic-inference")
    if name == "eagle3" and _without_positions(Path(str(plan.speculative.get("model")))):
        plan.notes.append(
            "vLLM 0.32 stops at loading a head whose config.json has no max_position_embeddings: add the target's "
            "context there (in transformer_layer_config, where the file has one)"
        )


def _without_positions(folder: Path) -> bool:
    """Whether a head on this machine lacks an entry that vLLM reads and specflow does not."""
    if not (folder / "config.json").is_file():
        return False
    raw: Mapping[str, Any] = read_json(folder / "config.json")
    return "max_position_embeddings" not in raw.get("transformer_layer_config", raw)


def _sampler(name: str, options: dict[str, Any], plan: VllmPlan) -> None:
    fates = plan.fates
    drafting = plan.speculative is not None
    method = _SAMPLERS.get(name)
    if method is None and drafting:
        fates.add("sampler", name, "impossible", _OWN_SAMPLERS.get(name, "vLLM has no such verification"))
    elif not drafting:
        fates.add("sampler", name, "left out", "nothing is verified in plain decoding")
    else:
        _verification(name, plan)
    for key, value in options.items():
        if key == "use_fp64_gumbel":
            fates.add(f"sampler.{key}", value, "mapped", "--use-fp64-gumbel")
            plan.engine |= {"use_fp64_gumbel": True} if value else {}
        elif key == "kernels":
            fates.add(f"sampler.{key}", value, "left out", "vLLM chooses its own kernels")
        elif method == "synthetic" and drafting:
            fates.add(f"sampler.{key}", value, "mapped", f"speculative_config.{key}")
            assert plan.speculative is not None
            plan.speculative |= {key: list(value) if isinstance(value, tuple) else value} if value is not None else {}
        else:
            fates.add(f"sampler.{key}", value, "left out", "it belongs to a verification that has no counterpart")


def _verification(name: str, plan: VllmPlan) -> None:
    """`rejection_sample_method`, which vLLM's older model runner does not read in full."""
    assert plan.speculative is not None
    plan.speculative["rejection_sample_method"] = _SAMPLERS[name]
    older = plan.speculative.get("method") in OLDER_RUNNER or plan.speculative.get("parallel_drafting")
    if name == "block" and older:
        text = "vLLM runs this proposer with its older model runner, which verifies token by token without a word"
        plan.fates.add("sampler", name, "impossible", text)
        return
    plan.fates.add("sampler", name, "mapped", f"speculative_config.rejection_sample_method={_SAMPLERS[name]}")
    if name == "block":
        plan.notes.append(
            "block verification needs vLLM's newer model runner (GPU, Triton installed); the older one, as on a CPU, "
            "verifies token by token without a word"
        )


_SCHEDULED = {
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "max_model_len": "--max-model-len",
    "long_prefill_token_threshold": "--long-prefill-token-threshold",
    "enable_chunked_prefill": "--enable-chunked-prefill or --no-enable-chunked-prefill",
}


def _scheduler(name: str, options: dict[str, Any], plan: VllmPlan) -> None:
    fates = plan.fates
    if name == "continuous":
        fates.add("scheduler", name, "mapped", "vLLM's own scheduler batches the same way")
    else:
        fates.add("scheduler", name, "differs", "vLLM's own scheduler runs instead; the output is the same")
    blocks = options.get("num_kv_blocks")
    for key, value in options.items():
        if key in _SCHEDULED:
            fates.add(f"scheduler.{key}", value, "mapped", _SCHEDULED[key])
            plan.engine |= {key: value} if value is not None else {}
        elif key == "num_speculative_tokens_per_batch_size":
            fates.add(f"scheduler.{key}", value, "mapped", f"speculative_config.{key}")
            if value is not None and plan.speculative is not None:
                plan.speculative[key] = [list(one) for one in value]
        elif key == "num_kv_blocks":
            fates.add(f"scheduler.{key}", value, "mapped", "--num-gpu-blocks-override")
            plan.engine |= {"num_gpu_blocks_override": value} if value is not None else {}
        elif key == "block_size" and blocks is not None:
            fates.add(f"scheduler.{key}", value, "mapped", "--block-size")
            plan.engine["block_size"] = value
        elif key == "block_size":
            fates.add(f"scheduler.{key}", value, "left out", "vLLM takes the block size that suits its kernels")
        elif key == "kv_cache_memory_gib":
            text = "vLLM takes a share of the memory (engine.gpu_memory_utilization), or engine.kv_cache_memory_gib"
            fates.add(f"scheduler.{key}", value, "left out", text)
        else:
            fates.add(f"scheduler.{key}", value, "differs", "vLLM's scheduler has no such option")


def _backend(name: str, options: dict[str, Any], plan: VllmPlan) -> None:
    fates = plan.fates
    fates.add("backend", name, "left out", "the device is that of the installed vLLM")
    for key, value in options.items():
        option = f"backend.{key}"
        if key == "cuda_graphs":
            fates.add(option, value, "mapped", "vLLM's own graphs" if value else "--enforce-eager")
            plan.engine |= {} if value else {"enforce_eager": True}
        elif key == "device_index":
            text = f"choose the GPU for vLLM by CUDA_VISIBLE_DEVICES={value}"
            fates.add(option, value, "differs" if value else "left out", text)
        elif key == "threads":
            fates.add(option, value, "left out", "vLLM binds its threads itself (VLLM_CPU_OMP_THREADS_BIND)")
        elif key == "allow_tf32":
            fates.add(option, value, "left out", "vLLM leaves it to torch; half precision is not touched by it")
        else:
            fates.add(option, value, "left out", "it says how specflow itself computes")


def _sampling(params: SamplingParams, plan: VllmPlan) -> None:
    """Sampling options bear vLLM's names; those at vLLM's defaults are not repeated in the request."""
    plan.engine["generation_config"] = "vllm"
    plan.notes.append(
        "--generation-config vllm: the model's generation_config.json changes no sampling option, as in specflow"
    )
    neutral = _plain(SamplingParams())
    for key, value in _plain(params).items():
        option = f"sampling.{key}"
        if key in _NOT_WITH_DRAFTS and value and plan.speculative is not None:
            plan.fates.add(option, value, "impossible", "vLLM refuses it beside drafts")
        elif key in _SERVED:
            plan.fates.add(option, value, "mapped", "--override-generation-config, and in each request")
            plan.served[key] = value
        else:
            plan.fates.add(option, value, "mapped", "in each request")
        if key in ("max_tokens", "temperature") or value != neutral[key]:
            plan.request[key] = value
    plan.engine["override_generation_config"] = {
        key: value for key, value in plan.served.items() if key == "temperature" or value != neutral[key]
    }


def _plain(params: SamplingParams) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(params).items()}


def _parallel(options: VllmOptions, plan: VllmPlan) -> None:
    for key in ("tensor_parallel_size", "pipeline_parallel_size"):
        plan.engine |= {key: getattr(options, key)} if getattr(options, key) > 1 else {}
    if options.draft_tensor_parallel_size is not None and plan.speculative is not None:
        if "model" in plan.speculative:
            plan.speculative["draft_tensor_parallel_size"] = options.draft_tensor_parallel_size
        else:
            text = "this proposer has no model that could be spread over GPUs"
            plan.fates.add("engine.draft_tensor_parallel_size", options.draft_tensor_parallel_size, "differs", text)
    if options.gpu_memory_utilization is not None:
        plan.engine["gpu_memory_utilization"] = options.gpu_memory_utilization
    if options.kv_cache_memory_gib is not None:
        plan.engine["kv_cache_memory_bytes"] = gib(options.kv_cache_memory_gib)
    for key, value in options.arguments.items():
        if key in plan.engine:
            plan.notes.append(f"engine.arguments.{key}={show(value)} replaces what the composition says of it")
        plan.engine[key] = value
