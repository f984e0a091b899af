"""The public benchmarks, each by a local file or by its hub id."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from specflow.errors import ConfigError
from specflow.words import did_you_mean
from specflow.workloads.base import Prompt
from specflow.workloads.hub import read_hub
from specflow.workloads.prompt_list import PromptListWorkload, PromptOptions
from specflow.workloads.rows import absolute, check_path, find_turns, read_jsonl, row_id

__all__ = [
    "BenchmarkOptions",
    "BenchmarkWorkload",
    "Gsm8kWorkload",
    "HumanEvalWorkload",
    "Math500Workload",
    "MbppWorkload",
    "MtBenchWorkload",
    "PublicSource",
    "SpecBenchWorkload",
    "SweBenchWorkload",
]

_MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(kw_only=True)
class BenchmarkOptions(PromptOptions):
    """Options of every public benchmark."""

    limit: int | None = 32  # the whole of one takes hours on a CPU; None = all
    path: str | None = None  # local JSON Lines file; None = from the hub
    hub_id: str | None = None  # another data set of the same columns; None = the benchmark's own
    revision: str | None = None  # branch, tag or commit on the hub; None = main
    category: str | tuple[str, ...] | None = None  # only prompts of these categories; None = all
    chat: bool | None = None  # True = chat template, False = plain text; None = conversations where there is a template

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.path is not None:
            check_path(self.path, "workload.path")


@dataclass(frozen=True)
class PublicSource:
    """Where a benchmark is published and which column holds its prompt."""

    hub_id: str | None
    config: str | None
    split: str
    fields: tuple[str, ...]
    text_is_chat: bool = True  # a single text is a question to answer (True) or a text to continue (False)
    aliases: Mapping[str, tuple[str, ...]] | None = None  # names for groups of categories


class BenchmarkWorkload(PromptListWorkload):
    """Rows with `turns` or `messages`, as evaluation suites store them, or with the benchmark's own column."""

    public: ClassVar[PublicSource]

    def __init__(self, options: BenchmarkOptions) -> None:
        super().__init__(options)
        self.template_optional = options.chat is None
        self._path = absolute(options.path) if options.path else None
        self._hub_id = options.hub_id or self.public.hub_id
        self._revision = options.revision
        self._chat = options.chat
        chosen = options.category or ()
        self._categories = (chosen,) if isinstance(chosen, str) else tuple(chosen)
        if self._path is None and self._hub_id is None:
            raise ConfigError(
                f"workload={self.name} is not on the hub under an id of its own: "
                f"download its question file and give workload.path=FILE.jsonl"
            )

    @property
    def source(self) -> str:
        """The local file, or hub id, configuration, split and revision."""
        if self._path:
            return str(self._path)
        parts = [str(self._hub_id), self.public.config, self.public.split, self._revision]
        return " ".join(part for part in parts if part)

    def read(self) -> list[Prompt]:
        """All rows of the wanted categories."""
        prompts: list[Prompt] = []
        for where, row in self._rows():
            fields = ("turns", "messages", *self.public.fields)
            turns, chat = find_turns(row, where, fields, self._chat, self.public.text_is_chat)
            category = str(row.get("category") or row.get("subject") or "")
            prompts.append(Prompt(row_id(row, f"{self.name}-{len(prompts)}"), turns, chat, category))
        return self._of_categories(prompts)

    def describe(self) -> dict[str, str]:
        """As every prompt list, with the categories chosen."""
        facts = super().describe()
        return facts | {"categories": ", ".join(self._categories)} if self._categories else facts

    def _rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        if self._path:
            return read_jsonl(self._path)
        assert self._hub_id is not None
        return read_hub(self._hub_id, self.public.config, self.public.split, self._revision)

    def _of_categories(self, prompts: list[Prompt]) -> list[Prompt]:
        if not self._categories:
            return prompts
        present = {prompt.category for prompt in prompts if prompt.category}
        aliases = self.public.aliases or {}
        wanted: set[str] = set()
        for name in self._categories:
            if name not in present and name not in aliases:
                hint = did_you_mean(name, [*present, *aliases])
                valid = ", ".join([*sorted(present), *aliases]) or "none: its rows have no category"
                raise ConfigError(
                    f"workload.category={name}: {self.source} has no such category.{hint} Valid: {valid}."
                )
            wanted |= set(aliases.get(name, ())) | {name}
        return [prompt for prompt in prompts if prompt.category in wanted]


class Gsm8kWorkload(BenchmarkWorkload):
    """Grade-school mathematics, 1319 questions."""

    name = "gsm8k"
    public = PublicSource("openai/gsm8k", "main", "test", ("question",))


class Math500Workload(BenchmarkWorkload):
    """Competition mathematics, 500 problems; `category` chooses by subject."""

    name = "math500"
    public = PublicSource("HuggingFaceH4/MATH-500", None, "test", ("problem",))


class HumanEvalWorkload(BenchmarkWorkload):
    """164 Python functions to complete; the published column is source code, so it is continued as plain text."""

    name = "humaneval"
    public = PublicSource("openai/openai_humaneval", None, "test", ("prompt",), text_is_chat=False)


class MbppWorkload(BenchmarkWorkload):
    """Short Python tasks: the 257 of the sanitized test split; `text` is the column of the full set."""

    name = "mbpp"
    public = PublicSource("google-research-datasets/mbpp", "sanitized", "test", ("prompt", "text"))


class MtBenchWorkload(BenchmarkWorkload):
    """80 two-turn conversations in eight categories."""

    name = "mt_bench"
    public = PublicSource("HuggingFaceH4/mt_bench_prompts", None, "train", ("prompt",))


class SweBenchWorkload(BenchmarkWorkload):
    """300 issues of Python repositories (SWE-bench Lite), some of them long; the answer is text, no code is run."""

    name = "swe_bench"
    public = PublicSource("princeton-nlp/SWE-bench_Lite", None, "test", ("problem_statement",))


class SpecBenchWorkload(BenchmarkWorkload):
    """480 prompts of six task families; the category `mt_bench` stands for its eight. Published as a file only."""

    name = "spec_bench"
    public = PublicSource(None, None, "train", (), aliases={"mt_bench": _MT_BENCH})
