"""One turn of a conversation as the engine takes it."""

from specflow.engine.prompts import PromptLike
from specflow.workloads.base import Prompt

__all__ = ["render_turn"]


def render_turn(prompt: Prompt, turn: int, conversation: list[dict[str, str]]) -> PromptLike:
    """The prompt of turn `turn` (from 0): plain text, or the chat messages so far, to which the user's turn is added.

    conversation: the messages before, the target's own answers included; it grows by this turn.
    """
    if not prompt.chat:
        return prompt.turns[turn]
    conversation.append({"role": "user", "content": prompt.turns[turn]})
    return list(conversation)
