"""The conformance kit passes a right proposer and fails each of many wrong ones, saying what is wrong."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.errors import ProposerError
from specflow.plugins import Component, hookimpl
from specflow.plugins.registry import Registry, load_plugins
from specflow.testing import NoiseProposer, OracleProposer, ProposerConformance, Subject
from specflow.testing import device_rules as device
from specflow.testing import lifecycle_checks as lifecycle
from specflow.testing import output_checks as output
from specflow.testing import registration_checks as registration
from specflow.testing.device_rules import HostReads
from specflow.testing.subject import PROMPTS, greedy
from specflow.testing.tiny_models import SECOND_EOS, tiny_target
from tests.testing import faulty
from tests.testing.faulty import Repeat, reading, subject

pytest_plugins = ["specflow.testing.pytest_plugin"]
CHECK_LENGTHS = lambda one: output.check_every_length(one, (2,), must_draft=True)  # noqa: E731
DESCRIBE = lambda one: registration.check_description(one, "")  # noqa: E731


class TestRight(ProposerConformance):
    """Every check passes."""

    def make_proposer(self, num_speculative_tokens: int) -> Repeat:
        return Repeat(num_speculative_tokens)


@pytest.mark.parametrize(
    ("wrong", "check", "words"),
    [
        (faulty.OtherLength, CHECK_LENGTHS, "K=2 was asked for, but proposer.num_speculative_tokens is 3"),
        (faulty.Silent, CHECK_LENGTHS, "nothing was drafted"),
        (faulty.TooMany, CHECK_LENGTHS, r"num_drafts \[.*\], expected each in 0 … 2"),
        (faulty.Narrow, CHECK_LENGTHS, r"token_ids \[4, 1\] int64, expected \[4, 2\] int64"),
        (faulty.SmallIntegers, CHECK_LENGTHS, r"num_drafts \[4\] int32"),
        (faulty.Foreign, CHECK_LENGTHS, "drafts outside the vocabulary of 384"),
        (faulty.UndeclaredLaw, CHECK_LENGTHS, r"requirements\(\).draft_logits is False"),
        (faulty.FalseLaw, output.check_sampled_law, "does not follow the target's law"),
        (faulty.FailsOnOneToken, output.check_ragged_batches, "no bigram"),
        (faulty.StartsOnce, lifecycle.check_pre_emption, "is here already"),
        (faulty.ForgetsNobody, lifecycle.check_abort, "too short"),
        (faulty.Remembers, lifecycle.check_reset, r"reset\(\) must forget"),
        (faulty.Counts, lifecycle.check_drafts_follow_the_text, "something of rejected drafts"),
        (faulty.Shared, lifecycle.check_two_engines, "change each other's drafts"),
        (faulty.Moves, device.check_buffers, "proposer.ids was .* write to buffers in place"),
        (faulty.Grows, device.check_buffers, "allocate in attach"),
        (faulty.Mute, DESCRIBE, "is empty"),
        (faulty.Numbers, DESCRIBE, "which is no text"),
        (faulty.Addresses, DESCRIBE, "say what it is"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_proposer_fails(wrong: Any, check: Callable[[Subject], None], words: str) -> None:
    with pytest.raises((AssertionError, ProposerError), match=words):
        check(subject(wrong))


@pytest.mark.parametrize(
    ("read", "name"),
    [
        (lambda context: context.num_tokens[0].item(), "item"),
        (lambda context: context.num_tokens.tolist(), "tolist"),
        (lambda context: bool((context.max_drafts > 0).any()), "__bool__"),
        (lambda context: (context.max_drafts > 0).nonzero(), "nonzero"),
        (lambda context: context.num_tokens[context.max_drafts > 0], "index with a mask"),
        (lambda context: torch.repeat_interleave(context.num_tokens, context.max_drafts), "repeat_interleave"),
        (lambda context: context.num_tokens.unique(), "unique"),
        (lambda context: range(context.num_tokens[0]), "__index__"),
        (lambda context: context.num_tokens.masked_select(context.num_tokens > 3), "masked_select"),
    ],
)
def test_every_host_read_is_found_with_its_line(read: Callable[[Any], Any], name: str) -> None:
    with pytest.raises(AssertionError, match=rf"{name}.*test_kit\.py"):
        device.check_host_reads(subject(reading(read)))


def test_what_the_host_knows_is_no_read() -> None:
    def fine(context: Any) -> Any:
        torch.repeat_interleave(context.num_tokens, 2)
        torch.repeat_interleave(context.num_tokens, context.num_tokens * 0 + 1, output_size=len(context.num_tokens))
        return (
            context.num_tokens[context.slots * 0],
            context.host.num_tokens.tolist(),
            torch.where(context.slots > 0, 1, 0),
        )

    device.check_host_reads(subject(reading(fine)))


def test_host_reads_end_with_the_block() -> None:
    with HostReads() as reads:
        torch.ones(2).sum().item()
    known = len(reads.found)
    assert known
    torch.ones(2).sum().item()
    assert len(reads.found) == known


def test_the_guide_names_every_check_and_attribute() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "plugins.md").read_text()
    for name, value in vars(ProposerConformance).items():
        if name.startswith("test_") or not (name.startswith("_") or callable(value) or isinstance(value, property)):
            assert f"`{name}" in guide or f"    {name} = " in guide, name


# -- the kit's own target and prompts ------------------------------------------------------------------------------
def test_the_target_says_nothing_by_a_hair() -> None:
    """Its greedy tokens are no ties: another machine's rounding, or another batch's, chooses the same ones."""
    engine = subject(Repeat).engine()
    assert engine.target.facts.eos_token_ids == (0, SECOND_EOS)
    assert tiny_target() == tiny_target()
    outputs = engine.generate(PROMPTS, greedy(44, logprobs=2), speculate=False)
    gaps = [entry.top[0][1] - entry.top[1][1] for one in outputs for entry in one.logprobs or ()]
    assert min(gaps) > 1e-4  # rounding moves the logits by a tenth of that


def test_the_stop_cases_hold_every_rule() -> None:
    engine = subject(Repeat).engine()
    cases = [one for _, one, _ in output._stop_cases(engine, subject(Repeat).plain(PROMPTS[:2], greedy(24)))]
    for rule in ("stop", "stop_token_ids", "min_tokens", "include_stop_str_in_output"):
        assert any(getattr(one, rule) for one in cases), rule
    for end in engine.target.facts.eos_token_ids:
        assert {one.ignore_eos for one in cases if end in one.logit_bias} == {True, False}
    assert {one.max_tokens for one in cases} >= {0, 1, 2, 3, 4, 5}


# -- oracle and noise ----------------------------------------------------------------------------------------------
def test_the_oracle_is_always_right_and_noise_never(specflow_engine: Any, specflow_target: Path) -> None:
    names = [f"r{index}" for index in range(len(PROMPTS))]
    plain = specflow_engine(Repeat(1)).generate(PROMPTS, greedy(20), speculate=False)
    texts = {name: [*one.prompt_ids, *one.token_ids] for name, one in zip(names, plain, strict=True)}
    oracle = specflow_engine(OracleProposer(texts, 3)).generate(PROMPTS, greedy(20), request_ids=names)
    assert all(one.accepted == one.drafted > 0 for one in oracle)
    noise = specflow_engine(NoiseProposer(3, 384)).generate(PROMPTS, greedy(20))
    assert sum(one.accepted for one in noise) < 0.1 * sum(one.drafted for one in noise)


# -- registration --------------------------------------------------------------------------------------------------
@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Two options, the second one unchecked."""

    num_speculative_tokens: int = 3
    window: int = 4


class Plugin:
    """A proposer `theirs` with a folder of configuration."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @hookimpl
    def specflow_proposers(self) -> list[Component]:
        return [Component("theirs", lambda options: Repeat(options.num_speculative_tokens), Options, "theirs")]

    @hookimpl
    def specflow_config_dirs(self) -> list[Path]:
        return [] if self._folder is None else [self._folder]


def with_file(folder: Path, text: str) -> Plugin:
    (folder / "proposer").mkdir()
    (folder / "proposer" / "theirs.yaml").write_text(text)
    return Plugin(folder)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = load_plugins(only="")
    monkeypatch.setattr(registration, "installed", lambda: found)
    return found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name: theirs\nnum_speculative_tokens: 3\n", r"differ in \['window'\]"),
        ("name: theirs\nnum_speculative_tokens: 3\nwindow: 5\n", "window is 5 in"),
        ("name: other\nnum_speculative_tokens: 3\nwindow: 4\n", "must say `name: theirs`"),
    ],
)
def test_a_configuration_file_that_says_something_else(
    tmp_path: Path, registry: Registry, text: str, words: str
) -> None:
    with registry.temporary(with_file(tmp_path, text)), pytest.raises(AssertionError, match=words):
        registration.check_registration("theirs")


def test_a_configuration_file_that_is_not_there(registry: Registry) -> None:
    with registry.temporary(Plugin(None)), pytest.raises(AssertionError, match=r"proposer/theirs\.yaml"):
        registration.check_registration("theirs")


def test_an_option_that_takes_anything(tmp_path: Path, registry: Registry) -> None:
    plugin = with_file(tmp_path, "name: theirs\nnum_speculative_tokens: 3\nwindow: 4\n")
    with registry.temporary(plugin):
        registration.check_registration("theirs")
        with pytest.raises(AssertionError, match="'num_speculative_tokens': 0} is not refused"):
            registration.check_option_errors("theirs", {})


def test_the_class_without_a_name_says_so() -> None:
    with pytest.raises(AssertionError, match="set `proposer`"):
        ProposerConformance().make_proposer(3)
