"""`task=generate`: text on standard output, and what is said beside it."""

from pathlib import Path

import pytest

from specflow.errors import ConfigError
from specflow.tasks.generate import GenerateOptions, GenerateTask
from specflow.testing.proposers import NoiseProposer
from tests.engine.helpers import generate_by_transformers, make_engine
from tests.tasks.helpers import make_context


@pytest.mark.parametrize("stream", [True, False])
def test_prompt_and_continuation_are_written(
    stream: bool, llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    context = make_context(llama_folder, tmp_path, NoiseProposer(3, 384))
    done = GenerateTask(GenerateOptions(prompts=("the rain",), stream=stream)).run(context)
    tokenizer = make_engine(llama_folder).target.tokenizer
    expected = generate_by_transformers(llama_folder, tokenizer("the rain")["input_ids"], 24)
    written = capsys.readouterr()
    assert written.out == "the rain" + tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert done.metrics["output_tokens"] == len(expected)
    assert "noise" in written.err


@pytest.mark.parametrize("trained_on_chat", [True, False, None])
def test_plain_text_for_a_drafter_that_only_knows_conversations(
    trained_on_chat: bool | None, llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """C39."""
    proposer = NoiseProposer(3, 384)
    proposer.trained_on_chat = trained_on_chat
    GenerateTask(GenerateOptions(prompts=("hello",))).run(make_context(llama_folder, tmp_path, proposer))
    said = " ".join(capsys.readouterr().err.split())
    assert ("warning: noise was trained on conversations" in said) == bool(trained_on_chat)


def test_without_prompts_there_is_nothing_to_do(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"task\.prompts"):
        GenerateTask(GenerateOptions()).run(make_context(llama_folder, tmp_path))
