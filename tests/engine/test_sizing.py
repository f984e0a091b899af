"""How many pages of keys and values an engine gets."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.backends.cuda import CudaBackend, CudaOptions
from specflow.engine.sizing import fix_limits
from specflow.schedulers.base import SchedulerSizes

# 64 KiB a token, 1 MiB a block.
FACTS: Any = SimpleNamespace(
    max_model_len=8190,
    kv_bytes_per_token=2**16,
    vocab_size=100,
    name="some",
    dtype=torch.float32,
    paged_kernels="torch",
)


def num_blocks(backend: Any, **sizes: Any) -> int:
    return fix_limits(SchedulerSizes(**sizes), FACTS, None, backend).num_blocks - 1  # block 0 is nobody's


def test_enough_for_all_within_the_memory() -> None:
    """All requests at full length where that fits; else what is allowed, 2 GiB unless told; or the number itself."""
    backend = CpuBackend(CpuOptions())
    assert num_blocks(backend, max_num_seqs=2) == 2 * 512
    assert num_blocks(backend, max_num_seqs=16) == 2048
    assert num_blocks(backend, max_num_seqs=16, kv_cache_memory_gib=0.5) == 512
    assert num_blocks(backend, max_num_seqs=16, kv_cache_memory_gib=100.0) == 16 * 512
    assert num_blocks(backend, max_num_seqs=16, num_kv_blocks=8) == 7


def test_a_gpu_gives_half_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = CudaBackend(CudaOptions(device_index=1))
    free = {backend.device: 12 * 2**30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 80 * 2**30))
    assert num_blocks(backend, max_num_seqs=16) == 6 * 1024
    assert num_blocks(backend, max_num_seqs=4) == 4 * 512
    assert num_blocks(backend, max_num_seqs=16, kv_cache_memory_gib=1.0) == 1024
