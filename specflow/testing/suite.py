"""`ProposerConformance`: the tests that every proposer has to pass, as a class to derive from.

    from specflow.testing import ProposerConformance

    class TestMine(ProposerConformance):
        proposer = "mine"                     # the registered name
        options = {"window": 8}               # as in proposer.window=8

Run with pytest. The target is a tiny random Llama that is made on the spot; nothing is downloaded.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.plugins.component import Kind
from specflow.proposers.base import Proposer
from specflow.testing import device_rules, lifecycle_checks, output_checks, registration_checks
from specflow.testing.subject import Subject, installed
from specflow.testing.tiny_models import tiny_target

__all__ = ["ProposerConformance"]


class ProposerConformance:
    """Set the attributes below in a subclass, or in an autouse fixture of it where they are known only then."""

    proposer: str = ""  # the registered name; without one, override `make_proposer`
    options: Mapping[str, Any] = {}  # its options; num_speculative_tokens is set by the checks
    invalid_options: Sequence[Mapping[str, Any]] = ()  # changes of the options that must be refused
    target: Path | None = None  # folder of a target; None: a tiny random Llama with 384 tokens
    backend: str = "cpu"
    lengths: Sequence[int] = (1, 4)  # numbers of drafts per round to try
    num_drafts: int = 3  # where a check needs only one
    scheduler: Mapping[str, Any] = {}  # scheduler options that the proposer needs
    must_draft: bool = True  # False: it may have nothing to say about the kit's prompts
    deterministic: bool = True  # False: the same calls may bring other drafts (chance, time)
    drafts_follow_the_text: bool = True  # False: drafts depend on more, as where the prompt ends, or other requests

    def make_proposer(self, num_speculative_tokens: int) -> Proposer:
        """A fresh, unloaded proposer with that many drafts per round."""
        assert self.proposer, "set `proposer` to the registered name, or override make_proposer"
        values = {"name": self.proposer, **self.options, "num_speculative_tokens": num_speculative_tokens}
        return installed().get(Kind.PROPOSER, self.proposer).build(values)

    @property
    def subject(self) -> Subject:
        """What the checks are about."""
        return Subject(self.make_proposer, self.target or tiny_target(), self.backend, self.num_drafts, self.scheduler)

    # -- how it is chosen ------------------------------------------------------------------------------------------
    def test_it_is_registered_with_options_and_a_file(self) -> None:
        """See `check_registration`."""
        self._needs_a_name()
        registration_checks.check_registration(self.proposer)

    def test_wrong_options_are_named(self) -> None:
        """See `check_option_errors`."""
        self._needs_a_name()
        options = {"num_speculative_tokens": self.num_drafts, **self.options}
        registration_checks.check_option_errors(self.proposer, options, self.invalid_options)

    def test_it_describes_itself(self) -> None:
        """See `check_description`."""
        registration_checks.check_description(self.subject, self.proposer)

    # -- output ----------------------------------------------------------------------------------------------------
    def test_greedy_output_is_plain_decoding(self) -> None:
        """See `check_every_length`."""
        output_checks.check_every_length(self.subject, self.lengths, self.must_draft)

    def test_ragged_batches(self) -> None:
        """See `check_ragged_batches`."""
        output_checks.check_ragged_batches(self.subject)

    def test_rollback(self) -> None:
        """See `check_rollback`."""
        output_checks.check_rollback(self.subject)

    def test_stop_rules(self) -> None:
        """See `check_stop_rules`."""
        output_checks.check_stop_rules(self.subject)

    def test_the_end_of_the_context_and_of_the_budget(self) -> None:
        """See `check_context_and_budget`."""
        output_checks.check_context_and_budget(self.subject)

    def test_request_options(self) -> None:
        """See `check_request_options`."""
        output_checks.check_request_options(self.subject)

    def test_sampled_tokens_under_a_seed(self) -> None:
        """See `check_sampled_tokens`."""
        output_checks.check_sampled_tokens(self.subject)

    def test_the_law_of_sampled_tokens(self) -> None:
        """See `check_sampled_law`."""
        output_checks.check_sampled_law(self.subject, self.must_draft)

    # -- life cycle ------------------------------------------------------------------------------------------------
    def test_pre_emption(self) -> None:
        """See `check_pre_emption`."""
        lifecycle_checks.check_pre_emption(self.subject)

    def test_abort(self) -> None:
        """See `check_abort`."""
        lifecycle_checks.check_abort(self.subject)

    def test_two_engines_in_one_process(self) -> None:
        """See `check_two_engines`."""
        lifecycle_checks.check_two_engines(self.subject, self.deterministic)

    def test_reset_forgets(self) -> None:
        """See `check_reset`."""
        if not self.deterministic:
            pytest.skip("deterministic = False")
        lifecycle_checks.check_reset(self.subject)

    def test_drafts_follow_the_text(self) -> None:
        """See `check_drafts_follow_the_text`."""
        if not (self.deterministic and self.drafts_follow_the_text):
            pytest.skip("drafts_follow_the_text = False")
        lifecycle_checks.check_drafts_follow_the_text(self.subject)

    # -- the decode path -------------------------------------------------------------------------------------------
    def test_no_host_read(self) -> None:
        """See `check_host_reads`."""
        self._needs_a_device_method()
        device_rules.check_host_reads(self.subject)

    def test_shapes_and_buffers_are_fixed(self) -> None:
        """See `check_buffers`."""
        self._needs_a_device_method()
        device_rules.check_buffers(self.subject)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_no_host_read_on_a_gpu(self) -> None:
        """See `check_host_reads_on_a_gpu`."""
        self._needs_a_device_method()
        device_rules.check_host_reads_on_a_gpu(self.subject)

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    def test_graph_capture_on_a_gpu(self) -> None:
        """See `check_graph_capture`."""
        self._needs_graph_safety()
        device_rules.check_graph_capture(self.subject)

    def test_the_host_a_step_behind(self) -> None:
        """See `check_run_ahead`."""
        device_rules.check_run_ahead(self.subject, self.deterministic)

    def test_static_context(self) -> None:
        """See `check_static_context`."""
        self._needs_graph_safety()
        device_rules.check_static_context(self.subject)

    # -- what a check needs ----------------------------------------------------------------------------------------
    def _needs_a_name(self) -> None:
        if not self.proposer:
            pytest.skip("not registered: `proposer` is empty")

    def _needs_graph_safety(self) -> None:
        engine = self.subject.engine()
        assert engine.proposer is not None
        if not engine.proposer.requirements().graph_safe:
            pytest.skip("does not declare Requirements.graph_safe")

    def _needs_a_device_method(self) -> None:
        engine = self.subject.engine()
        assert engine.proposer is not None
        if engine.proposer.requirements().host_tokens:
            pytest.skip("works on the host: Requirements.host_tokens")
