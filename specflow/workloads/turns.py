"""One turn of a conversation as the engine takes it."""

from dataclasses import replace

from specflow.core.sampling_params import SamplingParams
from specflow.engine.prompts import PromptLike
from specflow.workloads.base import Prompt

__all__ = ["answer_sampling", "render_turn"]


def render_turn(prompt: Prompt, turn: int, conversation: list[dict[str, str]]) -> PromptLike:
    """The prompt of turn `turn` (from 0): plain text or token ids, or the chat messages so far, to which the user's
    turn is added.

    conversation: the messages before, the target's own answers included; it grows by this turn.
    """
    if prompt.token_ids:
        return list(prompt.token_ids)
    if not prompt.chat:
        return prompt.turns[turn]
    conversation.append({"role": "user", "content": prompt.turns[turn]})
    return list(conversation)


def answer_sampling(prompt: Prompt, sampling: SamplingParams) -> SamplingParams:
    """The sampling options of a prompt's answers: those given, with what the prompt itself says of their length."""
    if prompt.max_tokens is None and not prompt.ignore_eos:
        return sampling
    most = sampling.max_tokens if prompt.max_tokens is None else prompt.max_tokens
    least = min(sampling.min_tokens, most)
    return replace(sampling, max_tokens=most, min_tokens=least, ignore_eos=prompt.ignore_eos or sampling.ignore_eos)
