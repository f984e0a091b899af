"""Fixes the engine's sizes from what the target can do, what the proposer needs and what the user allows."""

from specflow.backends.base import Backend
from specflow.core.limits import EngineLimits
from specflow.errors import ConfigError
from specflow.proposers.base import Proposer, Requirements
from specflow.schedulers.base import SchedulerSizes
from specflow.targets.base import TargetFacts


def fix_limits(sizes: SchedulerSizes, facts: TargetFacts, proposer: Proposer | None, backend: Backend) -> EngineLimits:
    """Compute every size once. Raises `ConfigError` when the composition cannot work."""
    requirements = proposer.requirements() if proposer else Requirements()
    num_drafts = proposer.num_speculative_tokens if proposer else 0
    max_model_len = sizes.max_model_len or facts.max_model_len
    if max_model_len > facts.max_model_len:
        raise ConfigError(
            f"scheduler.max_model_len={max_model_len} is above the {facts.max_model_len} positions of target "
            f"{facts.name!r}. Lower it, or leave it at null for the target's own limit."
        )
    if num_drafts >= max_model_len:
        raise ConfigError(
            f"proposer.num_speculative_tokens={num_drafts} does not fit a context of {max_model_len} tokens: "
            f"a request could never use so many drafts. Use at most {max_model_len - 2}."
        )
    if proposer and num_drafts < 1:
        raise ConfigError(f"proposer.num_speculative_tokens={num_drafts} must be 1 or more.")
    kv_bytes = facts.kv_bytes_per_token + requirements.kv_bytes_per_token
    most_tokens = max_model_len + num_drafts + requirements.lookahead_tokens + 2
    return EngineLimits(
        max_num_seqs=sizes.max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        block_size=sizes.block_size,
        num_blocks=sizes.num_kv_blocks or _num_blocks(sizes, most_tokens, kv_bytes, backend),
        num_speculative_tokens=num_drafts,
        lookahead_tokens=requirements.lookahead_tokens,
        vocab_size=facts.vocab_size,
        device=backend.device,
        dtype=facts.dtype,
        paged_kernels=facts.paged_kernels,
    )


def _num_blocks(sizes: SchedulerSizes, most_tokens: int, kv_bytes_per_token: int, backend: Backend) -> int:
    """Enough for every request at full length, unless that is more than the memory allowed."""
    wanted = -(-most_tokens // sizes.block_size) * sizes.max_num_seqs
    gib = sizes.kv_cache_memory_gib
    num_bytes = backend.kv_cache_bytes() if gib is None else int(gib * 2**30)
    return min(wanted, num_bytes // max(1, kv_bytes_per_token * sizes.block_size)) + 1
