"""Responses: the ids that the engine chose, row by row, whole or missing."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specflow.core.sampling_params import SamplingParams, seeded
from specflow.errors import ConfigError, PromptError, StorageError
from specflow.training.documents import documents_of, label_counts
from specflow.training.responses import Response, ResponseFile, check_splits, is_held_out, regenerate
from specflow.workloads.base import Prompt
from tests.engine.helpers import generate_by_transformers, make_engine
from tests.training.runs import words

SAMPLING = SamplingParams(max_tokens=12)
SETTINGS = {"target_hash": "x"}


def answer(folder: Path, output: Path, prompts: list[Prompt], **changes: Any) -> tuple[ResponseFile, int]:
    file = ResponseFile(output, SETTINGS)
    options: dict[str, Any] = {"temperatures": (), "held_out": 0.5, "seed": 0, **changes}
    sampling = options.pop("sampling", SAMPLING)
    return file, regenerate(make_engine(folder), prompts, sampling, file, **options)


def test_rows_are_what_the_target_chose(llama_folder: Path, tmp_path: Path) -> None:
    prompts = words(6)
    file, skipped = answer(llama_folder, tmp_path, prompts)
    assert skipped == 0
    tokenizer = make_engine(llama_folder).target.tokenizer
    for prompt in prompts:
        row = file.rows[prompt.id]
        ids = tokenizer(prompt.turns[0])["input_ids"]
        assert list(row.token_ids[: row.num_prompt_tokens]) == ids
        own = list(row.token_ids[row.num_prompt_tokens :])
        assert own == generate_by_transformers(llama_folder, ids, 12)
        assert row.finish_reason == ("stop" if own[-1] == 0 else "length")
        assert row.split == ("held_out" if is_held_out(prompt.id, 0.5) else "train")
        assert row.chat is False
    assert {row.split for row in file.rows.values()} == {"held_out", "train"}
    assert ResponseFile(tmp_path).rows == file.rows


def test_temperatures_take_turns_and_every_answer_has_its_own_seed(llama_folder: Path, tmp_path: Path) -> None:
    prompts = [Prompt(f"p{index}", ("same text",), False) for index in range(6)]
    file, _ = answer(llama_folder, tmp_path, prompts, temperatures=(0.0, 1.5))
    rows = [file.rows[prompt.id] for prompt in prompts]
    assert [row.temperature for row in rows] == [0.0, 1.5] * 3
    assert rows[0].token_ids == rows[2].token_ids == rows[4].token_ids
    assert len({rows[index].token_ids for index in (1, 3, 5)}) == 3
    expected = replace(seeded(replace(SAMPLING, temperature=1.5), 0, 3))
    alone = make_engine(llama_folder).generate(["same text"], expected)[0]
    assert rows[3].token_ids[rows[3].num_prompt_tokens :] == alone.token_ids


@pytest.mark.parametrize("cut", [1, 40, 200])
def test_a_run_that_was_cut_off_is_continued(cut: int, llama_folder: Path, tmp_path: Path) -> None:
    prompts = words(8)
    whole, _ = answer(llama_folder, tmp_path / "whole", prompts, temperatures=(0.0, 1.0))
    content = whole.path.read_bytes()
    folder = tmp_path / "cut"
    ResponseFile(folder, SETTINGS)
    (folder / "responses.jsonl").write_bytes(content[: len(content) // 2 + cut])
    there = set(ResponseFile(folder).rows)
    assert 0 < len(there) < 8
    again, _ = answer(llama_folder, folder, prompts, temperatures=(0.0, 1.0))
    assert again.rows == whole.rows
    assert ResponseFile(folder).rows == whole.rows
    assert again.path.read_bytes().startswith(content[: content[: len(content) // 2 + cut].rfind(b"\n") + 1])


def test_a_damaged_row_is_named_by_its_line(llama_folder: Path, tmp_path: Path) -> None:
    file, _ = answer(llama_folder, tmp_path, words(3))
    lines = file.path.read_text().splitlines()
    file.path.write_text("\n".join([lines[0], '{"id": 1}', lines[2], ""]))
    with pytest.raises(StorageError, match=r"responses\.jsonl:2 is damaged"):
        ResponseFile(tmp_path)


def test_other_settings_or_another_prompt_are_refused(llama_folder: Path, tmp_path: Path) -> None:
    answer(llama_folder, tmp_path, words(3))
    with pytest.raises(ConfigError, match=r"responses made with other settings(.|\n)*target_hash: x there, y now"):
        ResponseFile(tmp_path, {"target_hash": "y"})
    with pytest.raises(ConfigError, match="an answer to another prompt under the id 'p0'"):
        answer(llama_folder, tmp_path, words(3, seed=9))


def test_prompts_without_room_are_left_out_and_counted(llama_folder: Path, tmp_path: Path) -> None:
    prompts = [*words(2), Prompt("long", ("x" * 200,), False)]
    file, skipped = answer(llama_folder, tmp_path, prompts)
    assert skipped == 1
    assert set(file.rows) == {"p0", "p1"}
    with pytest.raises(PromptError, match=r"none of the 1 prompts leaves room"):
        answer(llama_folder, tmp_path / "none", prompts[2:])


TEMPLATE = "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] }}{% endfor %}{{ '<a>' }}"


def test_later_turns_follow_the_targets_own_answers(llama_folder: Path, tmp_path: Path) -> None:
    prompts = [Prompt(f"c{index}", (f"hi {index}", "and then?"), True) for index in range(3)]

    def chat() -> Any:
        engine = make_engine(llama_folder)
        engine.target.tokenizer.chat_template = TEMPLATE
        return engine

    engine, file = chat(), ResponseFile(tmp_path, SETTINGS)
    options: dict[str, Any] = {"temperatures": (), "held_out": 0.5, "seed": 0}
    regenerate(engine, prompts, SAMPLING, file, **options)
    assert set(file.rows) == {f"c{index}{turn}" for index in range(3) for turn in ("", "/turn-2")}
    for index in range(3):
        first, second = file.rows[f"c{index}"], file.rows[f"c{index}/turn-2"]
        history = f"<user>hi {index}<assistant>{first.text}<user>and then?<a>"
        expected = engine.target.tokenizer(history, add_special_tokens=False)["input_ids"]
        assert list(second.token_ids[: second.num_prompt_tokens]) == expected
        assert first.split == second.split
        assert first.chat is second.chat is True
    # The second turns are lost: they are written again, after the same first answers.
    lines = [line for line in file.path.read_text().splitlines() if "/turn-2" not in line]
    whole, file2 = file.rows, tmp_path / "again"
    ResponseFile(file2, SETTINGS)
    (file2 / "responses.jsonl").write_text("".join(f"{line}\n" for line in lines))
    again = ResponseFile(file2, SETTINGS)
    regenerate(chat(), prompts, SAMPLING, again, **options)
    assert again.rows == whole


def test_the_split_is_by_the_id_alone() -> None:
    names = [f"prompt-{index}" for index in range(2000)]
    held_out = [name for name in names if is_held_out(name, 0.1)]
    assert 150 < len(held_out) < 250
    assert {name for name in names if is_held_out(name, 0.05)} < set(held_out)
    row = Response("a", (1, 2, 3), 1, "length", 0.0, "train", "")
    with pytest.raises(ConfigError, match="none of the 1 responses is on the held_out side"):
        check_splits([row], 0.1)


# -- documents -----------------------------------------------------------------------------------------------------
def rows_of(*sizes: tuple[int, int]) -> list[Response]:
    return [
        Response(f"r{index}", tuple(range(10, 10 + total)), prompt, "length", 0.0, "train", "")
        for index, (prompt, total) in enumerate(sizes)
    ]


def test_documents_are_cut_dropped_and_counted() -> None:
    found = documents_of(rows_of((3, 10), (3, 40), (19, 40), (9, 10)), 20)
    assert [(one.id, len(one), one.num_labels) for one in found.documents] == [("r0", 10, 7), ("r1", 20, 17)]
    assert (found.num_cut, found.num_dropped, found.num_tokens) == (2, 2, 30)
    with pytest.raises(ConfigError, match=r"within task\.pack_length=5"):
        documents_of(rows_of((5, 10)), 5)
    assert documents_of(rows_of((3, 10), (3, 12))[::-1], 20) == documents_of(rows_of((3, 10), (3, 12)), 20)


def test_labels_are_the_targets_own_tokens() -> None:
    counts = label_counts(documents_of(rows_of((3, 6), (4, 6)), 20).documents, 20)
    assert json.loads(json.dumps(counts.tolist())) == [0] * 13 + [1, 2, 2] + [0] * 4
