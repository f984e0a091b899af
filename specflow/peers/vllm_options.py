"""Options of `engine=vllm`: what vLLM needs to know besides the composition."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specflow.errors import ConfigError

__all__ = ["VllmOptions"]

_OF_THE_COMPOSITION = {
    "model": "target.path",
    "revision": "target.revision",
    "dtype": "target.dtype",
    "tokenizer": "target.tokenizer",
    "max_model_len": "scheduler.max_model_len",
    "max_num_seqs": "scheduler.max_num_seqs",
    "max_num_batched_tokens": "scheduler.max_num_batched_tokens",
    "speculative_config": "+proposer=NAME",
}


@dataclass(frozen=True, kw_only=True)
class VllmOptions:
    """Options of `engine=vllm`. Raises `ConfigError` when a value is out of range."""

    python: str | None = None  # interpreter that has vLLM; None = SPECFLOW_VLLM_PYTHON, or else the running one
    tensor_parallel_size: int = 1  # GPUs that share every layer
    pipeline_parallel_size: int = 1  # groups of GPUs that share the layers among them
    draft_tensor_parallel_size: int | None = None  # GPUs of the drafter: 1 or tensor_parallel_size; None = the latter
    gpu_memory_utilization: float | None = None  # share of the memory that vLLM may take; None = vLLM's default
    kv_cache_memory_gib: float | None = (
        None  # memory of the KV pages; None: scheduler.kv_cache_memory_gib when run here
    )
    arguments: Mapping[str, Any] = field(default_factory=dict)  # other engine arguments of vLLM, by its names
    environment: Mapping[str, str] = field(default_factory=dict)  # variables of its process, besides those of this one
    start_timeout: float = 900.0  # seconds that loading and compiling may take

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name}={getattr(self, name)} must be 1 or more.")
        if self.draft_tensor_parallel_size not in (None, 1, self.tensor_parallel_size):
            raise ConfigError(
                f"engine.draft_tensor_parallel_size={self.draft_tensor_parallel_size} must be 1 or "
                f"engine.tensor_parallel_size={self.tensor_parallel_size}."
            )
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"engine.gpu_memory_utilization={share} must be above 0 and at most 1.")
        if self.kv_cache_memory_gib is not None and self.kv_cache_memory_gib <= 0:
            raise ConfigError(f"engine.kv_cache_memory_gib={self.kv_cache_memory_gib} must be above 0.")
        if self.start_timeout <= 0:
            raise ConfigError(f"engine.start_timeout={self.start_timeout} must be above 0.")
        for name in self.arguments:
            if name in _OF_THE_COMPOSITION:
                raise ConfigError(f"engine.arguments.{name} is said by {_OF_THE_COMPOSITION[name]}: set that instead.")
            if not name.isidentifier():
                raise ConfigError(f"engine.arguments.{name} is no name of Python: write data_parallel_size=2, say.")
