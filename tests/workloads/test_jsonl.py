"""Prompt files: every accepted shape, and errors that name file and line."""

import json
from pathlib import Path
from typing import Any

import pytest

from specflow.errors import ConfigError, PromptError
from specflow.options import build_options
from specflow.workloads.base import Prompt
from specflow.workloads.bundled import BundledOptions, BundledWorkload
from specflow.workloads.jsonl import JsonlOptions, JsonlWorkload
from specflow.workloads.prompt_list import fit_template


def write(folder: Path, *lines: Any) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
    return str(path)


def load(path: str, **options: Any) -> list[Prompt]:
    return list(JsonlWorkload(JsonlOptions(path=path, **options)).load())


def test_accepted_shapes(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt": "once upon"},
        "",
        {"id": "two", "turns": ["hello", "and then?"], "category": "chat"},
        {"messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "a recorded answer"},
            {"role": "user", "content": "bye"},
        ]},
    )  # fmt: skip
    assert load(path) == [
        Prompt("line-1", ("once upon",), False),
        Prompt("two", ("hello", "and then?"), True, "chat"),
        Prompt("line-4", ("Be brief.\n\nhi", "bye"), True),
    ]


def test_chat_can_be_forced_or_refused(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "a"}, {"turns": ["b", "c"]})
    assert [(one.turns, one.chat) for one in load(path, chat=True)] == [(("a",), True), (("b", "c"), True)]
    assert [(one.turns, one.chat) for one in load(path, chat=False)] == [(("a",), False), (("b",), False)]


def test_another_key(tmp_path: Path) -> None:
    assert load(write(tmp_path, {"question": "why?", "prompt": "no"}), field="question")[0].turns == ("why?",)


def test_limit_and_shuffle(tmp_path: Path) -> None:
    path = write(tmp_path, *({"prompt": f"p{number}"} for number in range(20)))
    assert [one.turns[0] for one in load(path, limit=3)] == ["p0", "p1", "p2"]
    first, again, other = (load(path, limit=5, shuffle=True, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_ids_are_unique(tmp_path: Path) -> None:
    path = write(tmp_path, {"id": "a", "prompt": "x"}, {"id": "a", "prompt": "y"})
    assert [one.id for one in load(path)] == ["a", "a#2"]


def test_description_identifies_the_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt": "x"}, {"prompt": "y"})
    workload = JsonlWorkload(JsonlOptions(path=path, limit=1, request_rate=2.0))
    facts = workload.describe()
    assert facts["source"] == path
    assert facts["prompts"] == "1 of 2"
    assert facts["arrivals"] == "2 per second, seed 0"
    assert len(facts["sha256"]) == 64
    assert facts["sha256"] != JsonlWorkload(JsonlOptions(path=path)).describe()["sha256"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "cut', r"prompts\.jsonl:2: malformed JSON"),
        ("[1, 2]", r"prompts\.jsonl:2: the line is a JSON list"),
        ({"text": "x"}, r"prompts\.jsonl:2: none of the keys turns, messages, prompt; the line has: text"),
        ({"prompt": " "}, r"prompts\.jsonl:2: 'prompt' is empty"),
        ({"turns": []}, r"prompts\.jsonl:2: 'turns' is empty"),
        ({"turns": ["a", ""]}, r"prompts\.jsonl:2: 'turns' is empty"),
        ({"prompt": 7}, r"prompts\.jsonl:2: 'prompt' must be a text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"prompts\.jsonl:2: 'messages': each message needs a role"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        load(write(tmp_path, {"prompt": "fine"}, line))


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "fine"}\n{"prompt": "caf\xe9"}\n')
    with pytest.raises(PromptError, match=r"latin\.jsonl:2: not UTF-8 \(byte 0xe9"):
        load(str(path))


def test_byte_order_mark_is_no_error(tmp_path: Path) -> None:
    path = tmp_path / "bom.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "fine"}\r\n')
    assert load(str(path))[0].turns == ("fine",)


def test_zero_prompts(tmp_path: Path) -> None:
    """C58: nothing to run is an error, not a success."""
    with pytest.raises(PromptError, match="holds no prompt"):
        load(write(tmp_path, ""))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": ""}, "workload.path must be set"),
        ({"path": "nowhere.jsonl"}, r"workload.path=nowhere.jsonl: .* does not exist"),
        ({"path": "."}, "is a folder"),
        ({"limit": 0}, "workload.limit=0: must be 1 or more"),
        ({"request_rate": -1.0}, "workload.request_rate=-1.0: must be above 0"),
        ({"limit": "many"}, "workload.limit"),
    ],
)
def test_wrong_options(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    values = {"name": "jsonl", "path": write(tmp_path, {"prompt": "x"})} | options
    with pytest.raises(ConfigError, match=message):
        build_options(JsonlOptions, values, "workload")


def test_tokenizer_without_template(tmp_path: Path) -> None:
    path = write(tmp_path, {"turns": ["a", "b"]}, {"prompt": "c"})
    workload = JsonlWorkload(JsonlOptions(path=path))
    plain, note = fit_template(workload, workload.load(), has_template=False)
    assert [(one.turns, one.chat) for one in plain] == [(("a",), False), (("c",), False)]
    assert note == "the tokenizer has no chat template: prompts are plain text, 1 later turns are left out"
    assert fit_template(workload, workload.load(), has_template=True) == (list(workload.load()), None)
    insisting = JsonlWorkload(JsonlOptions(path=path, chat=True))
    assert fit_template(insisting, insisting.load(), has_template=False)[0][0].chat


def test_bundled_prompts(tmp_path: Path) -> None:
    path = tmp_path / "bundled.jsonl"
    path.write_text('{"id": "heapq-0", "prompt": "def f(", "source": "heapq.py"}\n')
    workload = BundledWorkload(BundledOptions(), path)
    assert workload.load() == [Prompt("heapq-0", ("def f(",), False, "heapq.py")]
    assert workload.describe()["source"] == "specflow/workloads/data/bundled.jsonl"
    with pytest.raises(PromptError, match="installation is incomplete"):
        BundledWorkload(BundledOptions(), tmp_path / "none.jsonl").load()
