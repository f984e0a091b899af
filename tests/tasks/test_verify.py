"""`task=verify`: passes what is right, fails what is wrong, and says with what power."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specflow import cli
from specflow.errors import ConfigError
from specflow.plugins import Component, Kind, hookimpl
from specflow.plugins.registry import load_plugins
from specflow.proposers.draft_model import DraftModelOptions, DraftModelProposer
from specflow.proposers.ngram import NgramOptions, NgramProposer
from specflow.samplers.base import Sampler
from specflow.samplers.block import BlockOptions, BlockSampler
from specflow.samplers.coupled import CoupledOptions, CoupledSampler
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.samplers.synthetic import SyntheticOptions, SyntheticSampler
from specflow.samplers.typical import TypicalOptions, TypicalSampler
from specflow.schedulers.continuous import ContinuousOptions, ContinuousScheduler
from specflow.tasks.bench import BenchOptions, BenchTask
from specflow.tasks.verify import VerifyOptions, VerifyTask
from specflow.testing import sabotage
from specflow.testing.proposers import CallbackProposer
from specflow.workloads.base import Prompt
from tests.models import tiny_llama
from tests.tasks.helpers import make_context, texts

QUICK = {"samples": 1500, "sampled_tokens": 3, "prompts": 2, "max_tokens": 16, "batch_sizes": (1, 2)}
WORDS = texts("t3 t4 t3 t4 t5 t3 t4 t6 t3 t4", "t1 t2 t7 t1 t2")
RIGHT = [StandardSampler(StandardOptions()), CoupledSampler(CoupledOptions()), BlockSampler(BlockOptions())]


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and a draft model over eight tokens."""
    folder = tmp_path_factory.mktemp("eight")
    options: dict[str, Any] = {"vocab": 8, "initializer_range": 0.15}
    return (
        tiny_llama(folder / "target", seed=2, layers=2, **options),
        tiny_llama(folder / "draft", seed=3, layers=1, **options),
    )


def draft_model(folder: Path, method: str = "probabilistic") -> DraftModelProposer:
    options = {"path": str(folder), "num_speculative_tokens": 3, "draft_sample_method": method}
    return DraftModelProposer(DraftModelOptions(**options))


def verify(
    folder: Path, output: Path, proposer: Any, sampler: Sampler, prompts: list[Prompt] = WORDS, **options: Any
) -> Any:
    context = make_context(folder, output, proposer, prompts, sampler)
    wide = ContinuousOptions(max_num_seqs=64, max_num_batched_tokens=2048, block_size=4, max_model_len=128)

    def build(kind: Kind) -> Any:
        return ContinuousScheduler(wide) if kind is Kind.SCHEDULER else context.build(kind)

    task = VerifyTask(VerifyOptions(**{**QUICK, **options}))
    return task.run(dataclasses.replace(context, build=build))


@pytest.mark.parametrize(
    ("sampler", "method"),
    [
        (RIGHT[0], "ngram"), (RIGHT[0], "probabilistic"), (RIGHT[1], "ngram"), (RIGHT[1], "probabilistic"),
        (RIGHT[2], "greedy"), (RIGHT[2], "probabilistic"),
    ],
    ids=lambda value: getattr(value, "name", value),
)  # fmt: skip
def test_right_compositions_pass(
    eight: tuple[Path, Path], tmp_path: Path, sampler: Sampler, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ngram = NgramProposer(NgramOptions(num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=2))
    proposer = ngram if method == "ngram" else draft_model(eight[1], method)
    done = verify(eight[0], tmp_path, proposer, sampler)
    assert done.status == "finished", done.reason
    assert done.summary.failure is None
    assert done.metrics["verify.detectable_total_variation"] < 0.15
    assert 0 < done.metrics["verify.least_p_value"] <= 1
    assert done.metrics["verify.compared_tokens"] > 20
    text = capsys.readouterr().out
    assert "lossless" in text.splitlines()[-1]
    assert "NOT" not in text
    assert "would be caught with probability 0.99" in text
    assert ("same seed" in text) == sampler.seed_exact


WRONG = [*sabotage.ALWAYS_WRONG, *sabotage.WRONG_WITH_SAMPLED_DRAFTS]
QUICKLY = (sabotage.ArgmaxMatch, sabotage.SharedNoise, sabotage.ReusedCoins, sabotage.IgnoredDraftLaw)


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[] if kind in QUICKLY else pytest.mark.slow) for kind in WRONG],
    ids=lambda kind: kind.name,
)
def test_wrong_samplers_fail(eight: tuple[Path, Path], tmp_path: Path, kind: Any) -> None:
    done = verify(eight[0], tmp_path, draft_model(eight[1]), kind())
    assert done.status == "failed"
    assert done.reason
    assert kind.name in done.reason


LARGE = [sabotage.ArgmaxMatch, sabotage.PlainResidual, sabotage.OffByOneRow, sabotage.UncheckedFirst]


@pytest.mark.parametrize("kind", LARGE, ids=lambda kind: kind.name)
def test_the_engine_alone_catches_the_large_biases(eight: tuple[Path, Path], tmp_path: Path, kind: Any) -> None:
    """Without help of the table: greedy outputs differ, or the sampled answers leave the exact law."""
    done = verify(eight[0], tmp_path, draft_model(eight[1], "greedy"), kind(), table_samples=100)
    assert done.status == "failed"
    assert "table" not in done.reason


@pytest.mark.parametrize(
    "sampler",
    [SyntheticSampler(SyntheticOptions(synthetic_acceptance_length=2.0)), TypicalSampler(TypicalOptions())],
    ids=lambda sampler: sampler.name,
)
def test_lossy_samplers_are_no_pass(
    eight: tuple[Path, Path], tmp_path: Path, sampler: Sampler, capsys: pytest.CaptureFixture[str]
) -> None:
    """C17: not lossless by design; an error unless allowed, and never "lossless"."""
    done = verify(eight[0], tmp_path, draft_model(eight[1]), sampler)
    assert done.status == "failed"
    assert "not lossless by design" in done.reason
    assert verify(eight[0], tmp_path, draft_model(eight[1]), sampler, allow_lossy=True).status == "finished"
    assert ": lossless" not in capsys.readouterr().out


def test_nothing_drafted_is_no_proof(
    eight: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = verify(eight[0], tmp_path, CallbackProposer(3, lambda *_: []), RIGHT[0], samples=100, table_samples=100)
    assert done.status == "failed"
    assert "drafted nothing" in done.reason
    assert "NOT PROVEN" in capsys.readouterr().out


def test_no_proposer(eight: tuple[Path, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing to verify"):
        verify(eight[0], tmp_path, None, RIGHT[0])


@pytest.mark.parametrize(
    ("options", "named"),
    [({"prompts": 0}, "prompts"), ({"samples": 10}, "samples"), ({"top_k": 1}, "top_k"), ({"alpha": 0.5}, "alpha")],
)
def test_option_ranges(options: dict, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        VerifyOptions(**options)


def test_bench_compares_sampled_tokens_where_it_is_promised(eight: tuple[Path, Path], tmp_path: Path) -> None:
    """At temperature 1: verified with `coupled`, not applicable with `standard`."""
    for sampler, status in ((RIGHT[1], "verified"), (RIGHT[0], "not_applicable")):
        context = make_context(eight[0], tmp_path, draft_model(eight[1]), WORDS, sampler, temperature=1.0)
        done = BenchTask(BenchOptions(batch_sizes=(1, 2), repeats=1, cost_curve=False)).run(context)
        assert done.summary.lossless.status == status


class ThrowAwayPlugin:
    """A sampler of somebody else."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        (folder / "sampler").mkdir(parents=True)
        (folder / "sampler" / "theirs.yaml").write_text("name: theirs\nuse_fp64_gumbel: false\n")

    @hookimpl
    def specflow_samplers(self) -> Sequence[Component]:
        return [Component("theirs", sabotage.PlainResidual, StandardOptions, "wrong")]

    @hookimpl
    def specflow_config_dirs(self) -> Sequence[Path]:
        return [self._folder]


@pytest.mark.parametrize(("name", "code"), [("theirs", 1), ("coupled", 0)])
def test_exit_codes_of_the_command(
    llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = [
        "task=verify", f"sampler={name}", "+proposer=draft_model", f"proposer.path={llama_folder}",
        "proposer.draft_sample_method=probabilistic", "target=hf", f"target.path={llama_folder}", "tracking=none",
        "task.prompts=2", "task.max_tokens=16", "task.samples=400", "task.sampled_tokens=3",
        f"hydra.run.dir={tmp_path / 'run'}",
    ]  # fmt: skip
    with load_plugins(only="").temporary(ThrowAwayPlugin(tmp_path / "conf")) as registry:
        assert cli.main(words, registry) == code
    captured = capsys.readouterr()
    assert ("NOT LOSSLESS" in captured.out) == bool(code)
    assert ("p = " in captured.err) == bool(code)
