"""The tokenizer: nothing is lost, code is split sensibly, special tokens have their places."""

import inspect
import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specflow.zoo.bundle import model_folder
from specflow.zoo.tokenizer import END_OF_TEXT, MASK, SPECIAL_TOKENS, VOCABULARY_SIZE, save_tokenizer, train_tokenizer

SAMPLES = [
    "def f(x):\n    return x\n",
    "\n\n\n",
    "  two\n\tand a tab\r\nand CRLF \n",
    "x = 3.14159e-10  # π ≈ 3, 日本語, 😀\n",
    "    '''trailing spaces   '''   \n\n\n        deeper",
    "a\x00b\x0cc\u2028d",
    inspect.getsource(textwrap),
]


@pytest.fixture(scope="module")
def bundled() -> Any:
    return AutoTokenizer.from_pretrained(model_folder("target"))


@pytest.mark.parametrize("text", SAMPLES)
def test_round_trip(bundled: Any, text: str) -> None:
    assert bundled.decode(bundled.encode(text)) == text


def test_the_bundled_tokenizer_has_the_models_vocabulary(bundled: Any) -> None:
    assert len(bundled) == VOCABULARY_SIZE
    assert bundled.convert_ids_to_tokens(list(range(8))) == list(SPECIAL_TOKENS)
    assert bundled.eos_token == bundled.pad_token == END_OF_TEXT
    assert bundled.mask_token == MASK
    assert bundled.encode(f"x{END_OF_TEXT}")[-1] == 0


def test_indentation_is_one_token_and_digits_are_single(bundled: Any) -> None:
    assert bundled.tokenize("\n        return")[0] == bundled.tokenize("\n        ")[0]
    assert len(bundled.tokenize("\n        ")) == 1
    assert bundled.tokenize("2024") == ["2", "0", "2", "4"]


def test_both_models_share_it() -> None:
    target, draft = (json.loads((model_folder(name) / "tokenizer.json").read_text()) for name in ("target", "draft"))
    assert target == draft


def test_code_is_compressed(bundled: Any) -> None:
    source = SAMPLES[-1]
    assert len(source.encode()) / len(bundled.encode(source)) > 3


def test_a_new_tokenizer_is_saved_and_loaded_whole(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    save_tokenizer(train_tokenizer(SAMPLES, vocabulary_size=400, max_length=64), tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert len(loaded) <= 400
    assert loaded.model_max_length == 64
    assert all(loaded.decode(loaded.encode(text)) == text for text in SAMPLES)
    assert not recwarn.list
