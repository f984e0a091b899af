"""What a head was trained on, noted in its config.json: one that only knows conversations drafts plain text badly."""

import json
from pathlib import Path

from specflow.checkpoints.folder import read_json

KEY = "trained_on_chat"


def note_trained_on_chat(folder: Path, chat: bool) -> None:
    """Add to the head's config.json whether its training prompts were rendered with a chat template."""
    content = read_json(folder / "config.json") | {KEY: chat}
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def trained_on_chat(folder: Path) -> bool | None:
    """True for conversations in a chat template, False for plain text, None where config.json does not say."""
    value = read_json(folder / "config.json").get(KEY)
    return value if isinstance(value, bool) else None
