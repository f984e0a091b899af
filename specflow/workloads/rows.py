"""Rows of prompt files: reading JSON lines, and finding the conversation in a row."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specflow.errors import ConfigError, PromptError

__all__ = ["Turns", "absolute", "find_turns", "read_jsonl", "row_id"]

Turns = tuple[tuple[str, ...], bool]  # the user's turns, and whether they are a conversation
_DEFAULT_FIELDS = ("turns", "messages", "prompt")


def absolute(path: str | Path) -> Path:
    """The path as the user meant it: relative to the folder the command was started in, even if the run moved."""
    from hydra.utils import to_absolute_path  # here: not needed where paths are absolute or nothing is read

    return Path(to_absolute_path(str(Path(path).expanduser())))


def read_jsonl(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """("FILE:LINE", object) for every line that is not blank. Raises `PromptError` naming file and line."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except FileNotFoundError:
        raise PromptError(f"there is no prompt file {path}. Check workload.path.") from None
    except OSError as error:
        raise PromptError(f"the prompt file {path} cannot be read: {error.strerror}.") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            yield f"{path}:{number}", _parse(line, f"{path}:{number}")


def _parse(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise PromptError(
            f"{where}: not UTF-8 (byte {error.object[error.start]:#04x} at column {error.start + 1}). "
            "Save the file in UTF-8."
        ) from None
    except json.JSONDecodeError as error:
        raise PromptError(
            f"{where}: malformed JSON ({error.msg} at column {error.colno}). Each line must be one whole JSON object."
        ) from None
    if not isinstance(row, dict):
        raise PromptError(f'{where}: the line is a JSON {type(row).__name__}, not an object such as {{"prompt": …}}.')
    return row


def row_id(row: Mapping[str, Any], fallback: str) -> str:
    """The row's own id (`id`, `task_id`, `question_id`, `prompt_id`, `unique_id`, `instance_id`) or the fallback."""
    for key in ("id", "task_id", "question_id", "prompt_id", "unique_id", "instance_id"):
        if isinstance(row.get(key), str | int):
            return str(row[key])
    return fallback


def find_turns(
    row: Mapping[str, Any], where: str, fields: Sequence[str] = (), chat: bool | None = None, text_is_chat: bool = False
) -> Turns:
    """The user's turns in a row.

    fields: keys to look for, first match wins; empty = `turns`, `messages`, `prompt`.
    chat: None = lists of turns and messages are conversations, a single text is one only if `text_is_chat`.
    Raises `PromptError` for a row without any of the fields, of another shape, or with an empty turn.
    """
    wanted = fields or _DEFAULT_FIELDS
    key = next((field for field in wanted if row.get(field) is not None), None)
    if key is None:
        found = ", ".join(map(str, row)) or "nothing"
        raise PromptError(f"{where}: none of the keys {', '.join(wanted)}; the line has: {found}.")
    turns, is_list = _turns_of(row[key], f"{where}: {key!r}")
    if not turns or not all(turn.strip() for turn in turns):
        raise PromptError(f"{where}: {key!r} is empty: there is nothing to continue.")
    is_chat = (is_list or text_is_chat) if chat is None else chat
    return (turns if is_chat else turns[:1]), is_chat


def _turns_of(value: Any, where: str) -> tuple[tuple[str, ...], bool]:
    if isinstance(value, str):
        return (value,), False
    if isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value), True
    if isinstance(value, list) and all(isinstance(item, dict) for item in value):
        return _user_turns(value, where), True
    raise PromptError(f"{where} must be a text, a list of texts or a list of messages with role and content.")


def _user_turns(messages: Sequence[Mapping[str, Any]], where: str) -> tuple[str, ...]:
    """The user's messages. A leading system message goes before the first of them; recorded answers are left out,
    because the target gives its own.
    """
    turns: list[str] = []
    system = ""
    for message in messages:
        role, content = message.get("role"), message.get("content")
        if not isinstance(content, str) or role not in ("system", "user", "assistant"):
            raise PromptError(f"{where}: each message needs a role (system, user, assistant) and a text as content.")
        if role == "user":
            turns.append(f"{system}\n\n{content}" if system and not turns else content)
        elif role == "system":
            if turns or system:
                raise PromptError(f"{where}: only one system message is supported, in front of the first turn.")
            system = content
    return tuple(turns)


def check_path(path: str | None, option: str) -> None:
    """Refuse an absent or unusable path before anything is loaded."""
    if not path:
        raise ConfigError(f"{option} must be set: {option}=FILE.jsonl")
    if not absolute(path).is_file():
        what = "is a folder, not a file" if absolute(path).is_dir() else "does not exist"
        raise ConfigError(f"{option}={path}: {absolute(path)} {what}.")
