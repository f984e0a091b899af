"""The split of the corpus, what it leaves out, and the bundled prompts."""

import json
from pathlib import Path

import pytest

import specflow
from specflow.errors import ConfigError
from specflow.zoo.corpus import (
    HELD_OUT_MODULES,
    bundled_prompts,
    held_out_files,
    read_documents,
    read_source,
    standard_library,
    training_files,
)

BUNDLED = Path(specflow.__file__).parent / "workloads" / "data" / "bundled.jsonl"


def write(folder: Path, name: str, text: str = "x = 1\n") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="")


def test_held_out_modules_and_their_tests_are_not_trained_on(tmp_path: Path) -> None:
    for name in ("bisect.py", "test/test_bisect.py", "abc.py", "json/decoder.py", "test/test_abc.py"):
        write(tmp_path, name)
    assert held_out_files(tmp_path) == [tmp_path / "bisect.py", tmp_path / "test/test_bisect.py"]
    names = [path.relative_to(tmp_path).as_posix() for path in training_files(tmp_path)]
    assert names == ["abc.py", "json/decoder.py", "test/test_abc.py"]


def test_tables_and_other_peoples_packages_are_left_out(tmp_path: Path) -> None:
    for name in ("encodings/cp037.py", "pydoc_data/topics.py", "site-packages/a/b.py", "test/bad_coding.py", "ok.py"):
        write(tmp_path, name)
    assert [path.name for path in training_files(tmp_path)] == ["ok.py"]


def test_files_that_are_not_utf8_are_counted_and_newlines_kept(tmp_path: Path) -> None:
    write(tmp_path, "a.py", "x = 'é'\r\ny\n")
    (tmp_path / "b.py").write_bytes(b"x = '\xe9'\n")
    write(tmp_path, "empty.py", "\n")
    documents = read_documents(training_files(tmp_path))
    assert documents.texts == ["x = 'é'\r\ny\n"]
    assert documents.undecodable == 1
    assert documents.total_bytes == 12


def test_a_missing_root_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a folder"):
        training_files(tmp_path / "nowhere")


def test_the_standard_library_of_this_python_has_both_sides() -> None:
    held_out, training = held_out_files(), training_files()
    assert {path.stem for path in held_out} >= set(HELD_OUT_MODULES)
    assert len(training) > 200
    assert not set(held_out) & set(training)


def test_prompts_are_cut_from_held_out_modules_only() -> None:
    prompts = bundled_prompts()
    assert prompts == bundled_prompts()
    assert len({prompt["id"] for prompt in prompts}) == len(prompts) >= len(HELD_OUT_MODULES)
    for prompt in prompts:
        source = read_source(standard_library() / prompt["source"])
        assert "\n".join(source.split("\n")[: prompt["line"]]).endswith(prompt["prompt"])


def test_the_committed_prompts_cover_every_held_out_module() -> None:
    rows = [json.loads(line) for line in BUNDLED.read_text(encoding="utf-8").splitlines()]
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == len(rows) == 24
    assert {row["source"] for row in rows} == {f"{module}.py" for module in HELD_OUT_MODULES}
    assert len({row["source"] for row in rows[:12]}) == 12
    for row in rows:
        assert row["prompt"] == row["prompt"].rstrip("\n")
