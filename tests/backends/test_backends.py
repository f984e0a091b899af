"""Backends: what they set, measure and say; and how an absent device is refused."""

from pathlib import Path

import pytest
import torch

from specflow.backends import cpu as cpu_module
from specflow.backends.auto import AutoOptions, auto_backend
from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.backends.cuda import CudaBackend, CudaOptions
from specflow.backends.gpu import GpuBackend
from specflow.backends.rocm import RocmBackend, RocmOptions
from specflow.errors import ConfigError


def test_threads_are_set_and_described() -> None:
    before = torch.get_num_threads()
    try:
        backend = CpuBackend(CpuOptions(threads=1))
        backend.setup()
        assert torch.get_num_threads() == 1
        facts = backend.describe()
        assert facts["threads"] == "1"
        assert facts["backend"] == "cpu"
        assert facts["torch"] == torch.__version__
        assert facts["device"]
    finally:
        torch.set_num_threads(before)


def test_threads_left_alone_by_default() -> None:
    before = torch.get_num_threads()
    CpuBackend(CpuOptions()).setup()
    assert torch.get_num_threads() == before


def test_no_threads_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="threads=0"):
        CpuOptions(threads=0)


def test_peak_memory_sees_an_allocation() -> None:
    backend = CpuBackend(CpuOptions())
    backend.reset_peak_memory()
    before = backend.peak_memory_bytes()
    block = torch.ones(64 * 2**20, dtype=torch.uint8)
    grown = backend.peak_memory_bytes() - before
    assert block.sum() == 64 * 2**20
    assert before > 2**20
    assert grown > 32 * 2**20


def test_peak_memory_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_module, "_PROC", tmp_path)
    backend = CpuBackend(CpuOptions())
    backend.reset_peak_memory()
    assert backend.peak_memory_bytes() > 2**20
    assert cpu_module.processor_name()


@pytest.mark.parametrize(
    ("backend", "version"), [(CudaBackend(CudaOptions()), "cuda"), (RocmBackend(RocmOptions()), "hip")]
)
def test_a_gpu_asked_for_and_absent(backend: GpuBackend, version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, version, None)
    with pytest.raises(ConfigError, match=rf"backend={backend.name} is not available.*built without.*backend=cpu"):
        backend.setup()
    monkeypatch.setattr(torch.version, version, "13.0")
    with pytest.raises(ConfigError, match="finds no GPU"):
        backend.setup()


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(ConfigError, match=r"device_index=3, but torch sees 1 device"):
        CudaBackend(CudaOptions(device_index=3)).setup()
    with pytest.raises(ConfigError, match="device_index=-1"):
        CudaOptions(device_index=-1)


@pytest.mark.parametrize(
    ("cuda", "hip", "available", "expected"),
    [
        ("13.0", None, True, CudaBackend),
        (None, "7.0", True, RocmBackend),
        ("13.0", None, False, CpuBackend),
        (None, None, False, CpuBackend),
    ],
)
def test_auto_takes_the_best_at_hand(
    cuda: str | None, hip: str | None, available: bool, expected: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    assert type(auto_backend(AutoOptions())) is expected


def test_auto_says_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    backend = auto_backend(AutoOptions())
    assert backend.describe()["backend"] == "cpu (chosen by backend=auto)"
    assert backend.name == "cpu"
