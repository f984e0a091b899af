"""Prompts from any JSON Lines file."""

from dataclasses import dataclass
from pathlib import Path

from specflow.workloads.base import Prompt
from specflow.workloads.prompt_list import PromptListWorkload, PromptOptions
from specflow.workloads.rows import absolute, check_path, find_turns, read_jsonl, row_id

__all__ = ["JsonlOptions", "JsonlWorkload"]


@dataclass(kw_only=True)
class JsonlOptions(PromptOptions):
    """Options of `workload=jsonl`."""

    path: str = ""  # one JSON object per line
    field: str | None = None  # key that holds the prompt; None = turns, messages or prompt, whichever a line has
    chat: bool | None = None  # True = chat template, False = plain text; None = conversations where there is a template

    def __post_init__(self) -> None:
        super().__post_init__()
        check_path(self.path, "workload.path")


class JsonlWorkload(PromptListWorkload):
    """Each line: `prompt` (text), `turns` (list of user texts) or `messages` (role and content); optional `id` and
    `category`. The target's own answer stands between two turns.
    """

    name = "jsonl"

    def __init__(self, options: JsonlOptions) -> None:
        super().__init__(options)
        self.path: Path = absolute(options.path)
        self.template_optional = options.chat is None
        self._fields = (options.field,) if options.field else ()
        self._chat = options.chat

    @property
    def source(self) -> str:
        """The file."""
        return str(self.path)

    def read(self) -> list[Prompt]:
        """All lines of the file."""
        prompts = []
        for where, row in read_jsonl(self.path):
            turns, chat = find_turns(row, where, self._fields, self._chat)
            name = row_id(row, f"line-{where.rpartition(':')[2]}")
            prompts.append(Prompt(name, turns, chat, str(row.get("category") or "")))
        return prompts
