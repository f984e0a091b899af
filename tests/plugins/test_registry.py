"""Plugins: built-in and strange ones, broken, misspelt and clashing ones."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specflow import cli
from specflow.errors import ConfigError, PluginError, StorageError
from specflow.paths import config_root
from specflow.plugins import Component, Kind, hookimpl
from specflow.plugins.registry import Registry, Source, load_plugins
from specflow.tracking.events import RunFinished
from tests.plugins.fakes import ProbeOptions, ProbePlugin, Recorder, write_distribution

GOOD = """
    from specflow.plugins import Component, hookimpl

    @hookimpl
    def specflow_proposers():
        return [Component("theirs", "their_module:Theirs", "their_module:Options", "their method")]
"""
BROKEN = "raise ImportError('needs libmissing')\n"


class Plugin:
    """One proposer called `mine`."""

    @hookimpl
    def specflow_proposers(self) -> Sequence[Component]:
        return [Component("mine", lambda options: options, ProbeOptions, "mine")]


# -- built-in components -------------------------------------------------------------------------------------------
def test_builtin_components_are_there_without_an_installed_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFLOW_PLUGINS", "")
    registry = load_plugins()
    for kind, names in {
        Kind.TARGET: {"hf", "bundled"},
        Kind.PROPOSER: {"ngram", "draft_model"},
        Kind.BACKEND: {"auto", "cpu", "cuda", "rocm"},
        Kind.TASK: {"bench", "generate", "plugins", "pretrain"},
        Kind.TRACKING: {"mlflow", "none"},
    }.items():
        assert names <= set(registry.components(kind))
    assert registry.problems == []
    assert registry.config_dirs() == [config_root()]
    assert registry.get("proposer", "ngram").distribution == "specflow"


@pytest.mark.parametrize("kind", list(Kind))
def test_every_builtin_component_can_be_imported(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECFLOW_PLUGINS", "")
    for item in load_plugins().components(kind).values():
        assert callable(item.load_factory())
        assert isinstance(item.load_options(), type)


def test_listing_imports_no_model_library() -> None:
    code = (
        "import sys; from specflow import cli; cli.main(['--help']); cli.main(['task=plugins']);"
        "print([name for name in ('torch', 'transformers', 'mlflow', 'matplotlib') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_each_registry_is_its_own() -> None:
    first, second = load_plugins(only=""), load_plugins(only="")
    with first.temporary(Plugin()):
        assert "mine" in first.components("proposer")
        assert "mine" not in second.components("proposer")
    assert "mine" not in first.components("proposer")


# -- names ---------------------------------------------------------------------------------------------------------
def test_unknown_name_lists_the_nearest_first() -> None:
    with pytest.raises(ConfigError) as caught:
        load_plugins(only="").get("proposer", "ngrm")
    assert "Did you mean ngram" in str(caught.value)
    valid = str(caught.value).split("Valid: ")[1]
    assert valid.startswith("ngram, ")
    assert "draft_model" in valid


@pytest.mark.parametrize("words", [["+proposer=some_method"], ["-m", "+proposer=some_method,ngram"]])
def test_an_unknown_name_says_which_package_would_bring_it(words: list[str], capsys: Any) -> None:
    assert cli.main(words, load_plugins(only="")) == 2
    assert "pip install specflow-some-method" in capsys.readouterr().err


def test_two_plugins_with_one_name_are_an_error_only_when_it_is_used(site: Path, capsys: Any) -> None:
    write_distribution(site, "alpha-pack", GOOD)
    write_distribution(site, "beta-pack", GOOD, version="2.0")
    registry = load_plugins()
    assert registry.get("proposer", "ngram").distribution == "specflow"
    with pytest.raises(PluginError) as caught:
        registry.get("proposer", "theirs")
    assert "alpha-pack 1.5" in str(caught.value)
    assert "beta-pack 2.0" in str(caught.value)
    assert registry.components("proposer")["theirs"].distribution == "alpha-pack"
    assert "beta-pack" in capsys.readouterr().err


def test_a_builtin_is_never_replaced() -> None:
    class Thief:
        @hookimpl
        def specflow_proposers(self) -> Sequence[Component]:
            return [Component("ngram", lambda options: "stolen", ProbeOptions, "not the real one")]

    registry = load_plugins(only="")
    with registry.temporary(Thief(), Source("thief", "thief-pack", "0.1")):
        assert registry.components("proposer")["ngram"].distribution == "specflow"
        with pytest.raises(PluginError, match="thief-pack"):
            registry.get("proposer", "ngram")
    assert registry.get("proposer", "ngram").distribution == "specflow"


def test_two_distributions_may_use_one_entry_point_name(site: Path, capsys: Any) -> None:
    write_distribution(site, "alpha-pack", GOOD, {"same": "alpha_pack"})
    write_distribution(site, "beta-pack", GOOD.replace('"theirs"', '"others"'), {"same": "beta_pack"})
    assert {"theirs", "others"} <= set(load_plugins().components("proposer"))
    warning = capsys.readouterr().err
    assert "'same' is also used by" in warning
    assert "alpha-pack" in warning
    assert "beta-pack" in warning


# -- broken plugins ------------------------------------------------------------------------------------------------
def test_a_plugin_that_fails_to_import_is_named_once_and_harms_nothing_else(site: Path, capsys: Any) -> None:
    write_distribution(site, "broken-pack", BROKEN)
    write_distribution(site, "good-pack", GOOD)
    registry = load_plugins()
    warnings = capsys.readouterr().err.splitlines()
    name = "warning: plugin broken-pack (broken-pack 1.5)"
    assert warnings == [f"{name}: cannot be imported: ImportError: needs libmissing"]
    assert registry.get("proposer", "theirs").version == "1.5"
    with pytest.raises(ConfigError, match="ImportError: needs libmissing"):
        registry.get("proposer", "what_broken_pack_has")


def test_help_and_listing_work_beside_a_broken_plugin(site: Path, capsys: Any) -> None:
    write_distribution(site, "broken-pack", BROKEN)
    assert cli.main(["--help"]) == 0
    assert capsys.readouterr().err.count("broken-pack 1.5") == 1
    assert cli.main(["task=plugins"]) == 0
    shown = capsys.readouterr()
    assert "needs libmissing" in shown.out.replace("\n", "")
    assert shown.err.count("libmissing") == 1
    assert cli.main(["task=plugins", "task.strict=true"]) == 1


def test_asking_for_what_a_broken_plugin_may_have_gives_its_error(site: Path, capsys: Any) -> None:
    write_distribution(site, "broken-pack", BROKEN)
    assert cli.main(["+proposer=theirs"]) == 2
    assert capsys.readouterr().err.splitlines()[-1].endswith("ImportError: needs libmissing")


def test_strict_turns_a_warning_into_an_error(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write_distribution(site, "broken-pack", BROKEN)
    with pytest.raises(PluginError, match="libmissing"):
        load_plugins(strict=True)
    monkeypatch.setenv("SPECFLOW_STRICT_PLUGINS", "1")
    assert cli.main(["--help"]) == 1
    assert "libmissing" in capsys.readouterr().err


def test_the_variable_limits_what_is_loaded(site: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    write_distribution(site, "broken-pack", BROKEN)
    write_distribution(site, "good-pack", GOOD)
    monkeypatch.setenv("SPECFLOW_PLUGINS", "good-pack")
    assert "theirs" in load_plugins().components("proposer")
    assert capsys.readouterr().err == ""


def test_a_plugin_that_exits_at_import_does_not_end_the_program(site: Path) -> None:
    write_distribution(site, "exit-pack", "raise SystemExit(3)\n")
    assert "SystemExit" in str(load_plugins().problems[0])


# -- hooks that would never be called ------------------------------------------------------------------------------
def test_a_misspelt_hook_is_a_warning_with_the_nearest_name(site: Path, capsys: Any) -> None:
    write_distribution(site, "typo-pack", GOOD.replace("specflow_proposers", "specflow_proposer"))
    registry = load_plugins()
    assert "theirs" not in registry.components("proposer")
    warning = capsys.readouterr().err
    assert "typo-pack 1.5" in warning
    assert "'specflow_proposer'" in warning
    assert "Did you mean specflow_proposers" in warning


def test_an_unmarked_hook_is_a_warning(site: Path, capsys: Any) -> None:
    write_distribution(site, "bare-pack", "def specflow_proposers():\n    return []\n")
    load_plugins()
    assert "not marked with @hookimpl" in capsys.readouterr().err


def test_a_wrapper_is_a_warning() -> None:
    class Wrapper:
        @hookimpl(wrapper=True)
        def specflow_run_finished(self, event: RunFinished) -> Any:
            return (yield)

    registry = load_plugins(only="")
    with registry.temporary(Wrapper()):
        assert "wrapper" in str(registry.problems[0])


def test_an_argument_that_a_hook_lacks_is_a_named_problem_and_no_crash(site: Path, capsys: Any) -> None:
    text = GOOD + "\n    @hookimpl\n    def specflow_step_finished(step):\n        pass\n"
    write_distribution(site, "args-pack", text)
    registry = load_plugins()
    assert "theirs" not in registry.components("proposer")
    warning = capsys.readouterr().err
    assert "args-pack 1.5" in warning
    assert "step" in warning
    registry.hooks.specflow_run_finished(event=RunFinished("finished"))


def test_a_component_hook_that_raises_or_returns_nonsense_is_a_problem(site: Path, capsys: Any) -> None:
    write_distribution(
        site,
        "nonsense-pack",
        """
        from specflow.plugins import hookimpl

        @hookimpl
        def specflow_proposers():
            raise RuntimeError("boom")

        @hookimpl
        def specflow_targets():
            return ["hf"]

        @hookimpl
        def specflow_config_dirs():
            return ["/there/is/no/such/folder"]
        """,
    )
    load_plugins()
    warning = capsys.readouterr().err
    assert "RuntimeError: boom" in warning
    assert "'hf'" in warning
    assert "no folder" in warning


def test_a_component_whose_module_is_missing_names_plugin_and_error(site: Path) -> None:
    write_distribution(site, "good-pack", GOOD)
    item = load_plugins().get("proposer", "theirs")
    with pytest.raises(PluginError, match=r"good-pack 1.5.*ModuleNotFoundError.*their_module"):
        item.load_factory()
    with pytest.raises(PluginError, match="their_module"):
        item.check({"name": "theirs"})


# -- configuration folders -----------------------------------------------------------------------------------------
def test_a_plugins_configuration_is_found_and_listed(tmp_path: Path, capsys: Any) -> None:
    registry = load_plugins(only="")
    with registry.temporary(ProbePlugin(tmp_path), Source("probe", "probe-pack", "3.1")):
        assert registry.config_dirs() == [config_root(), tmp_path]
        assert cli.main(["--cfg", "job", "target=probe"], registry) == 0
        assert "name: probe" in capsys.readouterr().out
        with registry.temporary(Plugin(), Source("mine", "mine-pack", "0.2")):
            assert cli.main(["task=plugins"], registry) == 0
            rows = {tuple(line.split()[:2]): line for line in capsys.readouterr().out.splitlines() if line.split()}
            assert "probe-pack 3.1  yes" in rows["target", "probe"]
            assert "mine-pack 0.2   no" in rows["proposer", "mine"]
            assert cli.main(["+proposer=mine"], registry) == 2
            assert "provides no file proposer/mine.yaml" in capsys.readouterr().err
            assert cli.main(["--help"], registry) == 0
            assert "[mine-pack 0.2]" in capsys.readouterr().out


# -- listeners -----------------------------------------------------------------------------------------------------
class Failing(Recorder):
    """Raises at the first and the last event."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    @hookimpl
    def specflow_request_finished(self, row: Any) -> None:
        raise self.error

    @hookimpl
    def specflow_run_finished(self, event: RunFinished) -> None:
        raise self.error


def listening(*listeners: Any) -> Registry:
    registry = load_plugins(only="")
    for listener in listeners:
        registry.register_listener(listener)
    return registry


def test_a_listener_hears_until_it_is_unregistered() -> None:
    recorder = Recorder()
    registry = listening(recorder)
    registry.hooks.specflow_run_finished(event=RunFinished("finished"))
    registry.unregister_listener(recorder)
    registry.unregister_listener(recorder)
    registry.hooks.specflow_run_finished(event=RunFinished("failed"))
    assert [event.status for event in recorder.finished] == ["finished"]


def test_listeners_set_aside_hear_nothing_until_the_block_ends() -> None:
    """A run within a run has listeners of its own; those of the outer one come back in their order."""
    first, second, inner = Recorder(), Recorder(), Recorder()
    registry = listening(first, second)
    with registry.listeners_set_aside() as aside:
        assert aside == [first, second]
        registry.register_listener(inner)
        registry.hooks.specflow_run_finished(event=RunFinished("finished"))
        registry.unregister_listener(inner)
    registry.hooks.specflow_run_finished(event=RunFinished("failed"))
    assert [[event.status for event in one.finished] for one in (first, second, inner)] == [
        ["failed"], ["failed"], ["finished"],
    ]  # fmt: skip
    with registry.listeners_set_aside() as aside:
        assert aside == [first, second]


def test_a_listener_that_raises_is_named() -> None:
    registry = listening(Failing(KeyError("lost")))
    with pytest.raises(PluginError, match=r"Failing.*specflow_request_finished.*KeyError.*lost"):
        registry.hooks.specflow_request_finished(row=None)


def test_at_the_end_every_listener_is_called_and_then_the_error_raised() -> None:
    recorders = [Recorder(), Recorder()]
    registry = listening(recorders[0], Failing(ValueError("one")), recorders[1], Failing(ValueError("two")))
    with pytest.raises(PluginError, match="two") as caught:
        registry.hooks.specflow_run_finished(event=RunFinished("finished"))
    assert "one" in caught.value.__notes__[0]
    assert [len(recorder.finished) for recorder in recorders] == [1, 1]


def test_a_full_disk_in_a_listener_is_a_storage_error() -> None:
    registry = listening(Failing(OSError(28, "No space left on device")))
    with pytest.raises(StorageError, match="disk is full"):
        registry.hooks.specflow_run_finished(event=RunFinished("finished"))


def test_a_listener_with_a_misspelt_hook_is_refused() -> None:
    class Deaf:
        @hookimpl
        def specflow_step_done(self, record: Any) -> None:
            """Never called."""

    with pytest.raises(PluginError, match="Did you mean"):
        listening(Deaf())


def test_a_listener_with_a_wrong_argument_is_refused_and_forgotten() -> None:
    class Wrong:
        @hookimpl
        def specflow_step_finished(self, step: Any) -> None:
            """Asks for an argument that there is not."""

    registry, listener = load_plugins(only=""), Wrong()
    with pytest.raises(PluginError, match="step"):
        registry.register_listener(listener)
    registry.hooks.specflow_step_finished(record=None)


def test_there_is_no_other_hook() -> None:
    with pytest.raises(AttributeError, match="specflow_nothing"):
        load_plugins(only="").hooks.specflow_nothing(event=None)
