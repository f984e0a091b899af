"""`workload=corpus`: pieces of training files, the same for the same options."""

from pathlib import Path

import pytest

from specflow.errors import ConfigError
from specflow.workloads.corpus import CorpusOptions, CorpusWorkload


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "heapq.py").write_text("HELD_OUT = 1\n" * 200)
    (tmp_path / "one.py").write_text("".join(f"first_{number} = {number}\n" for number in range(200)))
    (tmp_path / "two.py").write_text("".join(f"second_{number} = {number}\n" for number in range(400)))
    return tmp_path


def workload(root: Path, **options: int) -> CorpusWorkload:
    return CorpusWorkload(CorpusOptions(root=str(root), **options))


def test_prompts_are_pieces_of_training_files(root: Path) -> None:
    prompts = workload(root, num_prompts=40, prompt_tokens=12).load()
    texts = [(root / name).read_text() for name in ("one.py", "two.py")]
    assert 30 < len(prompts) <= 40
    assert len({prompt.id for prompt in prompts}) == len(prompts)
    for prompt in prompts:
        (turn,) = prompt.turns
        assert not prompt.chat
        assert "HELD_OUT" not in turn
        assert any(f"\n{turn}" in f"\n{text}" for text in texts), "a prompt begins where a line does"
    assert {turn.turns[0].split("_")[0] for turn in prompts} >= {"first", "second"}


def test_every_prompt_has_so_many_tokens(root: Path) -> None:
    from transformers import AutoTokenizer

    from specflow.zoo.bundle import model_folder

    tokenizer = AutoTokenizer.from_pretrained(model_folder("target"))
    counts = [len(tokenizer(prompt.turns[0])["input_ids"]) for prompt in workload(root, prompt_tokens=12).load()]
    assert sorted(counts)[len(counts) // 10] == 12  # but for some at the end of a file
    assert max(counts) == 12


def test_options_decide_everything(root: Path) -> None:
    few, many = workload(root, num_prompts=10).load(), workload(root, num_prompts=30).load()
    assert list(many[: len(few)]) == list(few)
    assert workload(root, num_prompts=10, seed=1).load() != few
    assert workload(root, num_prompts=10).describe()["sha256"] == workload(root, num_prompts=10).describe()["sha256"]
    with pytest.raises(ConfigError, match=r"workload\.prompt_tokens=0"):
        workload(root, prompt_tokens=0)
