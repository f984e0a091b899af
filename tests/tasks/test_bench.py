"""The benchmark task: what it measures, what it proves and when it fails."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError
from specflow.proposers.draft_model import DraftModelOptions, DraftModelProposer
from specflow.proposers.ngram import NgramOptions, NgramProposer
from specflow.proposers.suffix import SuffixOptions, SuffixProposer
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.tasks.bench import BenchOptions, BenchTask
from specflow.testing.proposers import NoiseProposer, OracleProposer
from specflow.workloads.base import Prompt
from tests.engine.helpers import make_engine
from tests.tasks.helpers import make_context, texts

QUICK = {"batch_sizes": (1, 2), "repeats": 1, "cost_curve": False}


def run(context: Any, **options: Any) -> Any:
    return BenchTask(BenchOptions(**{**QUICK, **options})).run(context)


def oracle(folder: Path, prompts: list[Prompt], num_drafts: int = 3) -> OracleProposer:
    engine = make_engine(folder)
    outputs = engine.generate([prompt.turns[0] for prompt in prompts], SamplingParams(max_tokens=30, ignore_eos=True))
    known = {prompt.id: [*out.prompt_ids, *out.token_ids] for prompt, out in zip(prompts, outputs, strict=True)}
    return OracleProposer(known, num_drafts, vocab_size=384)


def test_both_methods_at_every_batch_size(llama_folder: Path, tmp_path: Path) -> None:
    context = make_context(llama_folder, tmp_path, NgramProposer(NgramOptions(num_speculative_tokens=3)))
    done = run(context, repeats=2, cost_curve=True)
    summary = done.summary
    assert [(one.method, one.batch_size) for one in summary.series] == [
        ("plain", 1),
        ("ngram", 1),
        ("plain", 2),
        ("ngram", 2),
    ]
    assert done.status == "finished"
    assert summary.lossless.status == "verified"
    assert summary.lossless.compared_requests == 8  # two prompts, two batch sizes, two repeats
    for one in summary.series:
        assert one.tokens_per_second > 0
        assert len(one.repeats) == 2
    assert summary.cost_curve[0].relative == 1
    assert [point.query_tokens for point in summary.cost_curve] == [1, 2, 4, 8, 16]


def test_events_reach_the_listeners(llama_folder: Path, tmp_path: Path) -> None:
    context = make_context(llama_folder, tmp_path, NgramProposer(NgramOptions()))
    run(context)
    series = context.hooks.of("specflow_series_started")
    assert [one.warmup for one in series] == [True, True, False, False] * 2
    rows = context.hooks.of("specflow_request_finished")
    assert len(rows) == 4 * (1 + 2)
    steps = context.hooks.of("specflow_step_finished")
    assert sum(step.num_emitted for step in steps) == sum(row.output_tokens for row in rows)


def test_plain_decoding_alone(llama_folder: Path, tmp_path: Path) -> None:
    done = run(make_context(llama_folder, tmp_path))
    assert [one.method for one in done.summary.series] == ["plain", "plain"]
    assert done.summary.lossless.status == "not_applicable"


def test_least_acceptance_length(llama_folder: Path, tmp_path: Path) -> None:
    """C58: noise misses a least acceptance length, the oracle reaches it; plain decoding cannot have one."""
    prompts = texts("the rain in spain", "a rose is a rose")
    noise = make_context(llama_folder, tmp_path, NoiseProposer(3, 384), prompts, ignore_eos=True)
    done = run(noise, require_acceptance_length=1.5)
    assert done.status == "failed"
    assert "require_acceptance_length=1.5" in done.reason
    assert done.summary is not None
    right = make_context(llama_folder, tmp_path, oracle(llama_folder, prompts), prompts, ignore_eos=True)
    assert run(right, require_acceptance_length=1.5).status == "finished"
    assert "no proposer ran" in run(make_context(llama_folder, tmp_path), require_acceptance_length=1.5).reason


def lengths(done: Any) -> list[list[float]]:
    """Mean acceptance length of every repeat of the proposer, by batch size."""
    return [one.acceptance_lengths for one in done.summary.series if not one.is_plain]


def test_a_proposer_forgets_between_measured_passes(llama_folder: Path, tmp_path: Path) -> None:
    """Repeats run the same prompts: one that learns from its own answers would look better than it is."""
    prompts = texts("the rain in spain", "a rose is a rose is a rose", "so it goes")
    context = make_context(llama_folder, tmp_path, SuffixProposer(SuffixOptions()), prompts, ignore_eos=True)
    cold = run(context, repeats=3)
    assert all(len(set(found)) == 1 for found in lengths(cold))
    assert not cold.summary.learning()
    assert cold.summary.really_ran["run"]["proposer memory"].startswith("cold")
    kept = run(context, repeats=3, proposer_memory="keep", batch_sizes=(1,), warmup_requests=0)
    assert lengths(kept)[0][1] > lengths(kept)[0][0]
    assert [one.method for one in kept.summary.learning()] == ["suffix"]
    assert kept.summary.really_ran["run"]["proposer memory"].startswith("kept")
    assert "proposer memory" not in run(make_context(llama_folder, tmp_path)).summary.really_ran["run"]


def test_reset_comes_between_requests(llama_folder: Path, tmp_path: Path) -> None:
    """Once before every measured pass, behind the warm-up, and never while a request has a slot."""
    calls: list[str] = []

    class Told(NoiseProposer):
        def start(self, request_id: str, slot: int, prompt: Sequence[int]) -> None:
            calls.append("start")

        def finish(self, request_id: str, slot: int, token_ids: Sequence[int]) -> None:
            calls.append("finish")

        def reset(self) -> None:
            assert calls.count("start") == calls.count("finish")
            calls.append("reset")

    context = make_context(llama_folder, tmp_path, Told(2, 384))
    run(context, repeats=2, batch_sizes=(1,))
    request = ["start", "finish"]
    assert calls == [*request, "reset", *request, *request, "reset", *request, *request]
    calls.clear()
    run(context, repeats=2, batch_sizes=(1,), proposer_memory="keep")
    assert "reset" not in calls


class _Greedless(StandardSampler):
    """Sabotage: accepts every draft."""

    def verify(self, logits: torch.Tensor, inputs: VerifyInputs) -> Verdict:
        verdict = super().verify(logits, inputs)
        if inputs.draft_ids.shape[1] == 0 or not inputs.num_drafts.any():
            return verdict
        tokens = torch.cat([inputs.draft_ids, verdict.token_ids[:, :1]], 1)
        keep = torch.arange(tokens.shape[1]) <= inputs.num_drafts.unsqueeze(1)
        return Verdict(tokens.clamp(min=0).where(keep, -1), inputs.num_drafts + 1, inputs.num_drafts)


def test_a_wrong_sampler_fails_the_run(llama_folder: Path, tmp_path: Path) -> None:
    """The gate can fail: accepting everything is found, with request, position and gap."""
    sampler = _Greedless(StandardOptions())
    context = make_context(llama_folder, tmp_path, NoiseProposer(3, 384), sampler=sampler, ignore_eos=True)
    done = run(context)
    assert done.status == "failed"
    assert "FAILED" in done.reason
    found = done.summary.lossless.first_difference
    assert found["expected"] != found["actual"]
    assert found["gap"] > 0
    assert run(context, require_lossless=False).status == "finished"


def test_sampling_is_not_compared_token_by_token(llama_folder: Path, tmp_path: Path) -> None:
    done = run(make_context(llama_folder, tmp_path, NgramProposer(NgramOptions()), temperature=1.0))
    assert done.summary.lossless.status == "not_applicable"
    assert "temperature 1" in done.summary.lossless.sentence()


def test_the_method_that_ran_comes_from_the_object(llama_folder: Path, tmp_path: Path) -> None:
    """C54: no method is guessed from the name of a folder."""
    folder = shutil.copytree(llama_folder, tmp_path / "eagle-test")
    proposer = DraftModelProposer(DraftModelOptions(path=str(folder), num_speculative_tokens=2))
    done = run(make_context(llama_folder, tmp_path, proposer))
    ran = done.summary.really_ran["proposer"]
    assert ran["method"] == "draft_model"
    assert "eagle-test" in ran["model"]
    assert {one.method for one in done.summary.series} == {"plain", "draft_model"}


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


def with_template(context: Any, template: str = TEMPLATE) -> Any:
    """The context, whose tokenizer has a chat template."""
    build = context.build

    def changed(kind: Any) -> Any:
        part = build(kind)
        if kind == "target":
            load = part.load
            part.load = lambda backend: (load(backend), setattr(part.tokenizer, "chat_template", template))[0]
        return part

    object.__setattr__(context, "build", changed)
    return context


def test_the_template_and_the_first_prompt_are_on_record(llama_folder: Path, tmp_path: Path) -> None:
    """C39: hashes that change with the template and with the ids it gives."""

    def facts(prompts: list[Prompt] | None, template: str = TEMPLATE) -> dict[str, str]:
        context = with_template(make_context(llama_folder, tmp_path, prompts=prompts), template)
        ran: dict[str, str] = run(context, batch_sizes=(1,), warmup_requests=0).summary.really_ran["run"]
        return ran

    talk = [Prompt("talk", ("hello there",), chat=True)]
    first, again, other = facts(talk), facts(talk), facts(talk, TEMPLATE.replace("assistant", "a"))
    assert len(first["chat template"]) == len(first["first prompt ids"]) == 16
    assert (first["chat template"], first["first prompt ids"]) == (again["chat template"], again["first prompt ids"])
    assert first["chat template"] != other["chat template"]
    assert first["first prompt ids"] != other["first prompt ids"]
    plain = facts([Prompt("talk", ("hello there",), chat=False)])
    assert "chat template" not in plain
    assert plain["first prompt ids"] != first["first prompt ids"]


@pytest.mark.parametrize("trained_on_chat", [True, False, None])
@pytest.mark.parametrize("chat", [True, False])
def test_plain_text_for_a_drafter_that_only_knows_conversations(
    chat: bool, trained_on_chat: bool | None, llama_folder: Path, tmp_path: Path
) -> None:
    """C39."""
    proposer = NoiseProposer(3, 384)
    proposer.trained_on_chat = trained_on_chat
    prompts = [Prompt("a", ("hello there",), chat=chat), Prompt("b", ("you",), chat=True)]
    context = with_template(make_context(llama_folder, tmp_path, proposer, prompts))
    warnings = [note for note in run(context, batch_sizes=(1,), warmup_requests=0).summary.notes if "warning" in note]
    if trained_on_chat and not chat:
        assert warnings == [
            "warning: noise was trained on conversations in a chat template, and 1 of 2 prompts are plain text: "
            "expect few accepted drafts"
        ]
    else:
        assert not warnings


def test_later_turns_hold_the_targets_own_answers(qwen3_folder: Path, tmp_path: Path) -> None:
    prompts = [Prompt("talk", ("hello there", "and then"), chat=True), Prompt("short", ("one",), chat=True)]
    context = with_template(make_context(qwen3_folder, tmp_path, NgramProposer(NgramOptions()), prompts))
    done = run(context, batch_sizes=(1,), warmup_requests=0)
    assert done.summary.lossless.status == "verified"
    rows = context.hooks.of("specflow_request_finished")
    assert sorted({row.request_id for row in rows}) == ["short", "talk", "talk/turn-2"]
    second = next(row for row in rows if row.request_id == "talk/turn-2")
    first = next(row for row in rows if row.request_id == "talk")
    assert second.prompt_tokens > first.prompt_tokens + first.output_tokens // 2


def test_more_requests_than_the_scheduler_allows(llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_num_seqs=4"):
        run(make_context(llama_folder, tmp_path), batch_sizes=(1, 8))


def test_how_much_is_warmed_up() -> None:
    """All prompts where kernels are compiled for what they meet, unless told otherwise."""
    assert BenchOptions().warmups(8, on_gpu=False) == 1
    assert BenchOptions().warmups(8, on_gpu=True) == 8
    assert BenchOptions(warmup_requests=3).warmups(8, on_gpu=True) == 3
    assert BenchOptions(warmup_requests=0).warmups(8, on_gpu=True) == 0


@pytest.mark.parametrize(
    "options",
    [
        {"batch_sizes": ()},
        {"batch_sizes": (0,)},
        {"batch_sizes": (2, 2)},
        {"repeats": 0},
        {"warmup_requests": -1},
        {"require_acceptance_length": 0.5},
    ],
)
def test_impossible_options(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        BenchOptions(**options)
