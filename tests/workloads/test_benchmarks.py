"""Public benchmarks: column mapping, categories, and the hub behind an optional library. Nothing is downloaded."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from specflow.errors import ConfigError, PromptError
from specflow.options import build_options
from specflow.paths import config_root
from specflow.plugins.builtin import specflow_trackers, specflow_workloads
from specflow.workloads import benchmarks
from specflow.workloads.benchmarks import BenchmarkOptions, BenchmarkWorkload

ROWS: dict[type[BenchmarkWorkload], dict[str, Any]] = {
    benchmarks.Gsm8kWorkload: {"question": "How many?", "answer": "4"},
    benchmarks.Math500Workload: {"problem": "Solve.", "subject": "Algebra", "unique_id": "test/1", "answer": "4"},
    benchmarks.HumanEvalWorkload: {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "assert"},
    benchmarks.MbppWorkload: {"task_id": 11, "prompt": "Write a function.", "code": "def f(): pass"},
    benchmarks.SweBenchWorkload: {"instance_id": "a__b-1", "problem_statement": "It fails.", "patch": "+"},
    benchmarks.MtBenchWorkload: {"prompt": ["First.", "Second."], "category": "writing", "prompt_id": 5},
}


def local(folder: Path, *rows: dict[str, Any]) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("workload", ROWS, ids=lambda workload: workload.name)
def test_columns_of_the_hub(workload: type[BenchmarkWorkload], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    library = types.ModuleType("datasets")
    library.load_dataset = lambda *args, **options: asked.append((args, options)) or [ROWS[workload]]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    prompts = workload(BenchmarkOptions(revision="v1")).load()
    columns = ("question", "problem", "prompt", "problem_statement")
    expected = next(value for key, value in ROWS[workload].items() if key in columns)
    assert list(prompts[0].turns) == (expected if isinstance(expected, list) else [expected])
    assert prompts[0].chat == (workload is not benchmarks.HumanEvalWorkload)
    public = workload.public
    assert asked == [((public.hub_id, public.config), {"split": public.split, "revision": "v1"})]


def test_local_file_with_turns(tmp_path: Path) -> None:
    workload = benchmarks.HumanEvalWorkload(BenchmarkOptions(path=local(tmp_path, {"turns": ["Solve this."]})))
    prompt = workload.load()[0]
    assert (prompt.id, prompt.turns, prompt.chat) == ("humaneval-0", ("Solve this.",), True)
    assert workload.template_optional


def test_categories(tmp_path: Path) -> None:
    rows = [{"question_id": n, "category": c, "turns": [c]} for n, c in enumerate(("writing", "stem", "qa", "rag"))]
    path = local(tmp_path, *rows)

    def chosen(category: Any) -> list[str]:
        options = build_options(BenchmarkOptions, {"path": path, "category": category}, "workload")
        return [prompt.category for prompt in benchmarks.SpecBenchWorkload(options).load()]

    assert chosen("qa") == ["qa"]
    assert chosen(["rag", "mt_bench"]) == ["writing", "stem", "rag"]
    assert len(chosen(None)) == 4
    with pytest.raises(ConfigError, match=r"workload.category=writting.*Did you mean writing\?.*Valid: qa, rag"):
        chosen("writting")


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"Install specflow\[hub\], or give a local file"):
        benchmarks.Gsm8kWorkload(BenchmarkOptions()).load()


def test_hub_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise ConnectionError("no route\nto host")

    library = types.ModuleType("datasets")
    library.load_dataset = fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", library)
    with pytest.raises(PromptError, match=r"openai/gsm8k could not be loaded from the hub: no route\n"):
        benchmarks.Gsm8kWorkload(BenchmarkOptions()).load()


def test_benchmark_without_hub_id() -> None:
    with pytest.raises(ConfigError, match=r"workload\.path=FILE\.jsonl"):
        benchmarks.SpecBenchWorkload(BenchmarkOptions())


@pytest.mark.parametrize(
    ("group", "component"),
    [("workload", item) for item in specflow_workloads()] + [("tracking", item) for item in specflow_trackers()],
    ids=lambda value: getattr(value, "name", value),
)
def test_yaml_agrees_with_the_options(group: str, component: Any) -> None:
    """Every option is in the YAML with the default of the dataclass."""
    values = yaml.safe_load((config_root() / group / f"{component.name}.yaml").read_text())
    assert values.pop("name") == component.name
    defaults = {name: field.default for name, field in component.load_options().__dataclass_fields__.items()}
    if group == "workload":
        assert values.pop("seed") == "${seed}"
        defaults.pop("seed")
    if component.name == "bundled":
        defaults["limit"] = values["limit"]  # how many of the bundled prompts fit into a minute
    assert values == defaults
