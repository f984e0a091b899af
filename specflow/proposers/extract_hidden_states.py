"""The name `extract_hidden_states`, which in vLLM is a drafting method: here it says where the function is."""

from dataclasses import dataclass

from specflow.errors import ConfigError
from specflow.proposers.base import Proposer


@dataclass(frozen=True, kw_only=True)
class ExtractHiddenStatesOptions:
    """Always raises `ConfigError`: hidden states are captured by `task=extract`, without drafting."""

    num_speculative_tokens: int = 1  # as vLLM wants it; ignored

    def __post_init__(self) -> None:
        raise ConfigError(
            "proposer=extract_hidden_states drafts nothing in specflow: hidden states are captured during the normal "
            "forward pass. Write task=extract 'task.layers=[…]' without this proposer."
        )


def refuse(options: ExtractHiddenStatesOptions) -> Proposer:
    """Never reached: its options cannot be made."""
    raise AssertionError(options)
