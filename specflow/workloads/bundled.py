"""The prompts that come with the package: held-out Python source to be continued by the bundled model."""

from dataclasses import dataclass
from pathlib import Path

from specflow.errors import PromptError
from specflow.workloads.base import Prompt
from specflow.workloads.prompt_list import PromptListWorkload, PromptOptions
from specflow.workloads.rows import find_turns, read_jsonl, row_id

__all__ = ["BUNDLED_FILE", "BundledOptions", "BundledWorkload"]

BUNDLED_FILE = Path(__file__).parent / "data" / "bundled.jsonl"


@dataclass(kw_only=True)
class BundledOptions(PromptOptions):
    """Options of `workload=bundled`."""

    limit: int | None = 8  # number of prompts; None = all 24


class BundledWorkload(PromptListWorkload):
    """Plain text prompts (`id`, `prompt`, `source` per line), no chat."""

    name = "bundled"

    def __init__(self, options: BundledOptions, file: Path = BUNDLED_FILE) -> None:
        super().__init__(options)
        self._file = file

    @property
    def source(self) -> str:
        """The package's own name for the file: where it is installed says nothing."""
        return f"specflow/workloads/data/{self._file.name}"

    def read(self) -> list[Prompt]:
        """All bundled prompts."""
        if not self._file.is_file():
            raise PromptError(f"{self._file} is missing: the installation is incomplete. Install specflow again.")
        prompts = []
        for where, row in read_jsonl(self._file):
            turns, _ = find_turns(row, where, ("prompt",), chat=False)
            prompts.append(Prompt(row_id(row, where), turns, False, str(row.get("source") or "")))
        return prompts
