"""What a head's config.json says of its training prompts (user case C39)."""

import json
from pathlib import Path
from typing import Any

import pytest

from specflow.checkpoints.trained_on import note_trained_on_chat, trained_on_chat


@pytest.mark.parametrize("chat", [True, False])
def test_what_is_noted_is_read_and_the_rest_stays(chat: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"block_size": 4}')
    assert trained_on_chat(tmp_path) is None
    note_trained_on_chat(tmp_path, chat)
    assert trained_on_chat(tmp_path) is chat
    assert json.loads((tmp_path / "config.json").read_text()) == {"block_size": 4, "trained_on_chat": chat}


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_anything_else_says_nothing(value: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"trained_on_chat": value}))
    assert trained_on_chat(tmp_path) is None
