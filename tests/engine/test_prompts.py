"""From what a user writes to token ids: chat templates bring their special tokens, and nothing adds them again."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from specflow.engine.prompts import encode_prompt
from specflow.errors import PromptError
from specflow.workloads.base import Prompt
from specflow.workloads.turns import render_turn
from tests.engine.helpers import make_engine
from tests.models import EOS, make_tokenizer

BOS = 0  # the tiny tokenizer has one special id
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TALK = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "and then?"},
]


def chat_tokenizer() -> Any:
    """One that puts BOS before every text, as Llama's does, beside a template that renders it too."""
    tokenizer = make_tokenizer()
    tokenizer.bos_token = EOS
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, BOS)])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_messages_are_what_the_template_says_with_one_bos() -> None:
    """C39."""
    tokenizer = chat_tokenizer()
    ids = encode_prompt(tokenizer, TALK, 384)
    assert ids == tokenizer.apply_chat_template(TALK, add_generation_prompt=True)["input_ids"]
    assert ids.count(BOS) == 1
    assert ids[0] == BOS
    assert tokenizer.decode(ids[1:]).endswith("<user>and then?<assistant>")
    twice = tokenizer(tokenizer.apply_chat_template(TALK, tokenize=False))["input_ids"]
    assert twice[:2] == [BOS, BOS]  # what encoding the rendered text like any other would give


def test_plain_text_gets_the_tokenizers_own_bos() -> None:
    """C39."""
    tokenizer = chat_tokenizer()
    assert encode_prompt(tokenizer, "hello", 384) == tokenizer("hello")["input_ids"]
    assert encode_prompt(tokenizer, "hello", 384).count(BOS) == 1


def test_turns_of_a_workload_are_rendered_the_same_way() -> None:
    """C39: the second turn of a conversation, the target's answer before it."""
    conversation: list[dict[str, str]] = []
    prompt = Prompt("talk", ("hello there", "and then?"), chat=True)
    assert render_turn(prompt, 0, conversation) == TALK[:1]
    conversation.append(TALK[1])
    assert render_turn(prompt, 1, conversation) == TALK
    assert render_turn(Prompt("text", ("hello",), chat=False), 0, []) == "hello"


def test_messages_without_a_template_are_refused(llama_folder: Path) -> None:
    with pytest.raises(PromptError, match="no chat template"):
        encode_prompt(make_engine(llama_folder).target.tokenizer, TALK, 384)


def test_ids_are_taken_as_they_are() -> None:
    assert encode_prompt(chat_tokenizer(), [5, 9], 384) == [5, 9]
    with pytest.raises(PromptError, match="id 384"):
        encode_prompt(chat_tokenizer(), [384], 384)
