"""A plugin that fails in the middle of a run: named with its distribution and version, what was done is kept (C67)."""

import json
from pathlib import Path
from typing import Any

import pytest

from specflow import cli
from specflow.errors import PluginError
from specflow.plugins.blame import owner_of
from specflow.plugins.registry import Registry, load_plugins
from tests.plugins.fakes import write_distribution

FAULTY = """
    from dataclasses import dataclass
    from pathlib import Path

    from specflow.plugins import Component, hookimpl
    from specflow.proposers.base import HostProposer

    @dataclass(frozen=True, kw_only=True)
    class Options:
        num_speculative_tokens: int = 2
        where: str = "draft"

        def __post_init__(self):
            if self.where == "options":
                raise TypeError("no such word")

    class Faulty(HostProposer):
        name = "faulty"

        def __init__(self, options):
            self.num_speculative_tokens, self.where, self.requests = options.num_speculative_tokens, options.where, []
            self.fail("init")

        def fail(self, where):
            if where == self.where:
                raise ValueError("out of luck")

        def load(self, target, backend):
            self.fail("load")

        def start(self, request_id, slot, prompt):
            self.requests.append(request_id)

        def draft(self, tokens, max_drafts, request_id):
            if len(self.requests) == 2:
                self.fail("draft")
            return [1] * max_drafts

        def finish(self, request_id, slot, token_ids):
            if len(self.requests) == 2:
                self.fail("finish")

    @hookimpl
    def specflow_proposers():
        return [Component("faulty", "faulty_pack:Faulty", "faulty_pack:Options", "fails where it is told to")]

    @hookimpl
    def specflow_config_dirs():
        return [Path(__file__).parent / "faulty_conf"]
"""
WORDS = ["task=generate", "task.prompts=[import, def]", "sampling.max_tokens=4", "backend=cpu"]


@pytest.fixture
def faulty(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plugin is installed; the launch folder."""
    write_distribution(site, "faulty-pack", FAULTY, version="2.3")
    file = site / "faulty_conf" / "proposer" / "faulty.yaml"
    file.parent.mkdir(parents=True)
    file.write_text("name: faulty\nnum_speculative_tokens: 2\nwhere: draft\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def generate(*words: str) -> int:
    return cli.main([*WORDS, "hydra.run.dir=out", *words])


def rows(folder: Path) -> list[Any]:
    file = folder / "out" / "requests.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_proposer_that_raises_is_named_and_what_was_done_is_kept(
    faulty: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = f"file://{faulty}/mlruns"  # a new database takes ten seconds
    assert generate("+proposer=faulty", "tracking=mlflow", f"tracking.uri={uri}") == 1
    err = capsys.readouterr().err
    assert "proposer 'faulty' raised ValueError: out of luck" in err
    assert "plugin faulty-pack (faulty-pack 2.3)" in err
    assert "Traceback" not in err
    assert 'raise ValueError("out of luck")' in (faulty / "out" / "error.log").read_text()
    assert len(rows(faulty)) == 1
    assert json.loads((faulty / "out" / "run.json").read_text())["status"] == "failed"
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name("specflow")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FAILED"
    assert generate("+proposer=ngram", "tracking=none") == 0


@pytest.mark.parametrize("where", ["init", "load", "finish"])
def test_wherever_it_raises_the_plugin_is_named(faulty: Path, capsys: Any, where: str) -> None:
    assert generate("+proposer=faulty", "tracking=none", f"proposer.where={where}") == 1
    err = capsys.readouterr().err
    assert "ValueError: out of luck" in err
    assert "plugin faulty-pack (faulty-pack 2.3)" in err
    assert len(rows(faulty)) == (1 if where == "finish" else 0)


def test_options_that_raise_something_else_are_named(faulty: Path, capsys: Any) -> None:
    assert generate("+proposer=faulty", "tracking=none", "proposer.where=options") == 1
    err = capsys.readouterr().err
    assert "proposer=faulty of plugin faulty-pack (faulty-pack 2.3) cannot check its options: TypeError" in err
    assert not (faulty / "out").exists()


def test_the_strict_switch_stops_an_unrelated_run(
    faulty: Path, site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    write_distribution(site, "broken-pack", "raise ImportError('needs libmissing')\n", version="0.4")
    monkeypatch.setenv("SPECFLOW_STRICT_PLUGINS", "1")
    assert generate("tracking=none") == 1
    assert "broken-pack 0.4" in capsys.readouterr().err
    assert not (faulty / "out").exists()


def test_the_listing_shows_every_plugin_with_its_hooks(faulty: Path, site: Path, capsys: Any) -> None:
    write_distribution(site, "broken-pack", "raise ImportError('needs libmissing')\n", version="0.4")
    listener = "from specflow.plugins import hookimpl\n@hookimpl\ndef specflow_step_finished(record): pass\n"
    write_distribution(site, "ear-pack", listener)
    assert cli.main(["task=plugins"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["faulty-pack", "faulty-pack", "2.3", "loaded", "config_dirs,", "proposers"] in lines
    assert ["ear-pack", "ear-pack", "1.5", "loaded", "step_finished"] in lines
    assert ["broken-pack", "broken-pack", "0.4", "failed"] in lines


# -- whose code raised ---------------------------------------------------------------------------------------------
def raised_by(call: Any) -> BaseException:
    try:
        call()
    except Exception as error:
        return error
    raise AssertionError("nothing was raised")


@pytest.fixture
def two(site: Path) -> Registry:
    """One plugin that calls, one that fails."""
    hook = "from specflow.plugins import hookimpl\n@hookimpl\ndef specflow_proposers(): return []\n"
    write_distribution(site, "outer-pack", hook + "def call(inner): inner()\n")
    wrap = "def wrap(inner):\n    try: inner()\n    except Exception as e: raise RuntimeError('wrapped') from e\n"
    write_distribution(site, "inner-pack", hook + "def fail(): raise KeyError('lost')\n" + wrap)
    return load_plugins()


def test_the_innermost_plugin_is_to_blame(two: Registry) -> None:
    import inner_pack
    import outer_pack

    found = owner_of(raised_by(lambda: outer_pack.call(inner_pack.fail)), two)
    assert str(found) == "inner-pack (inner-pack 1.5)"
    found = owner_of(raised_by(lambda: outer_pack.call(lambda: {}["lost"])), two)
    assert found is not None
    assert found.distribution == "outer-pack"


def test_the_first_cause_counts(two: Registry) -> None:
    import inner_pack
    import outer_pack

    error = raised_by(lambda: inner_pack.wrap(lambda: outer_pack.call(lambda: {}["lost"])))
    found = owner_of(error, two)
    assert found is not None
    assert found.distribution == "outer-pack"


def test_our_own_faults_are_nobody_elses(two: Registry) -> None:
    assert owner_of(raised_by(lambda: {}["lost"]), two) is None
    assert owner_of(raised_by(lambda: two.get("proposer", "nothing")), two) is None


def test_a_missing_package_is_named_by_the_component(site: Path) -> None:
    text = """
        from specflow.plugins import Component, hookimpl

        @hookimpl
        def specflow_proposers():
            return [Component("theirs", "no_such_module:A", "no_such_module:B", "theirs")]
    """
    write_distribution(site, "good-pack", text, version="3.0")
    with pytest.raises(PluginError, match=r"good-pack 3\.0.*no_such_module"):
        load_plugins().get("proposer", "theirs").build({})
