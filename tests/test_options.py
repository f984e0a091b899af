"""Plain values to options dataclasses: what is accepted, and how each mistake is answered."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError
from specflow.options import build_options


@dataclass(frozen=True, kw_only=True)
class Nested:
    depth: int = 1


@dataclass(frozen=True, kw_only=True)
class Options:
    num_speculative_tokens: int = 5
    ratio: float = 0.5
    path: Path | None = None
    text: str | None = None
    policy: Literal["earliest", "latest"] = "earliest"
    sizes: tuple[int, ...] = (1, 8)
    words: Sequence[str] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    on: bool = False
    nested: Nested = Nested()

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ConfigError(f"num_speculative_tokens={self.num_speculative_tokens} must be 1 or more.")


@dataclass(frozen=True, kw_only=True)
class Required:
    path: str


def message(schema: type, values: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        build_options(schema, values, "proposer")
    return str(caught.value)


def test_yaml_values_become_typed_options() -> None:
    built = build_options(
        Options,
        {
            "name": "ngram",
            "ratio": 1,
            "path": "/some/where",
            "sizes": [1, 2],
            "words": ["a"],
            "bias": {5: float("-inf")},
            "nested": {"depth": 3},
        },
        "proposer",
    )
    assert built == Options(
        ratio=1.0,
        path=Path("/some/where"),
        sizes=(1, 2),
        words=["a"],
        bias={5: float("-inf")},
        nested=Nested(depth=3),
    )
    assert isinstance(built.ratio, float)


def test_an_empty_node_gives_the_defaults() -> None:
    assert build_options(SamplingParams, {}, "sampling") == SamplingParams()


def test_unknown_key_names_key_component_nearest_and_valid_ones_with_types() -> None:
    text = message(Options, {"name": "ngram", "num_speculative_token": 4})
    assert "proposer.num_speculative_token=4" in text
    assert "proposer=ngram has no option" in text
    assert "Did you mean num_speculative_tokens" in text
    assert "policy (earliest | latest)" in text
    assert "sizes (list of int)" in text


def test_unknown_key_of_a_nested_group() -> None:
    assert "proposer.nested.deep=3" in message(Options, {"nested": {"deep": 3}})


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("num_speculative_tokens", "four", "proposer.num_speculative_tokens=four is not valid: it must be int."),
        ("num_speculative_tokens", "4", "it must be int"),
        ("num_speculative_tokens", 4.0, "it must be int"),
        ("num_speculative_tokens", True, "proposer.num_speculative_tokens=true is not valid: it must be int."),
        ("num_speculative_tokens", None, "proposer.num_speculative_tokens=null"),
        ("on", 1, "it must be bool"),
        ("ratio", "x", "it must be float"),
        ("policy", "newest", "it must be earliest | latest"),
        ("sizes", 3, "it must be list of int"),
        ("sizes", [1, "x"], "proposer.sizes[1]=x"),
        ("words", "abc", "it must be list of text"),
        ("nested", 4, "proposer.nested=4 must be a group"),
        ("bias", {"a": 1.0}, "proposer.bias"),
        ("text", 7, "Quote it to pass text"),
    ],
)
def test_wrong_type(key: str, value: Any, expected: str) -> None:
    assert expected in message(Options, {"name": "ngram", key: value})


def test_all_problems_are_reported_one_per_line() -> None:
    lines = message(Options, {"ratio": "x", "on": "maybe"}).splitlines()
    assert len(lines) == 2
    assert len(message(Options, {"a": 1, "b": 2}).splitlines()) == 2


def test_a_missing_option_is_named() -> None:
    assert message(Required, {"name": "hf"}) == "proposer.path must be set (text): proposer=hf has no default for it."


def test_a_node_that_is_no_group() -> None:
    assert "proposer=5 must be a group" in message(Options, 5)


def test_the_schemas_own_error_passes_with_the_place_in_front() -> None:
    text = message(Options, {"num_speculative_tokens": 0})
    assert text == "proposer: num_speculative_tokens=0 must be 1 or more."


def test_sampling_ranges_are_the_schemas_own() -> None:
    with pytest.raises(ConfigError, match=r"^sampling.*top_p=2"):
        build_options(SamplingParams, {"top_p": 2.0}, "sampling")


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(message(Options, {"ratio": "x" * 5000})) < 300


def test_values_that_are_no_plain_data_are_refused() -> None:
    assert "plain data" in message(Options, {"text": object()})
