"""Settings of every test: no network, few threads, quiet libraries; and small saved models to load."""

import os

# Before transformers is imported anywhere: it reads these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from pathlib import Path

import pytest
import torch
import transformers

from tests.models import tiny_llama, tiny_qwen3

if not torch.cuda.is_available():
    # Before triton is imported anywhere: kernels run in its interpreter.
    os.environ["TRITON_INTERPRET"] = "1"

transformers.logging.disable_progress_bar()


@pytest.fixture(autouse=True, scope="session")
def _few_threads() -> None:
    """Tiny matrices gain nothing from threads, and threads that wait for a busy core cost far more than they bring."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Llama with tokenizer; read only, shared by all tests."""
    return tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def qwen3_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved tiny Qwen3 with tokenizer; read only, shared by all tests."""
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3"))
