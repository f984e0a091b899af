"""`proposer=custom_class`: loading, the contract and its errors, and lossless runs through the engine."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specflow.core.sampling_params import SamplingParams
from specflow.engine.build import build_engine
from specflow.errors import ConfigError, ProposerError
from specflow.options import build_options
from specflow.plugins.registry import load_plugins
from specflow.proposers.custom_class import CustomClassOptions, CustomClassProposer
from specflow.samplers.coupled import CoupledOptions, CoupledSampler
from specflow.testing.conformance import assert_idle, assert_lossless, assert_lossless_at_every_length
from tests.engine.helpers import PROMPTS, make_engine

SAMPLING = SamplingParams(max_tokens=24, ignore_eos=True)
DOCUMENT = Path(__file__).parents[2] / "docs" / "custom_class.md"
HEAD = "import numpy as np\nimport torch\n"


def make(path: Path | str, k: int = 3, **options: Any) -> CustomClassProposer:
    return CustomClassProposer(CustomClassOptions(path=str(path), num_speculative_tokens=k, options=options))


def write(folder: Path, source: str, name: str = "mine.py") -> Path:
    file = folder / name
    file.write_text(HEAD + source)
    return file


def drafting(folder: Path, body: str, name: str = "Mine") -> str:
    """Path of a class whose draft has this body."""
    source = f"class {name}:\n    def draft(self, tokens, max_drafts, request_id):\n        {body}\n"
    return f"{write(folder, source)}:{name}"


# -- running -------------------------------------------------------------------------------------------------------
def example() -> str:
    found = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found
    return found[1]


def test_the_example_of_the_documentation_is_short_and_lossless(tmp_path: Path, llama_folder: Path) -> None:
    assert len([line for line in example().splitlines() if line.strip()]) <= 24
    (tmp_path / "bigrams.py").write_text(example())
    path = tmp_path / "bigrams.py:Bigrams"
    assert_lossless_at_every_length(
        lambda num_speculative_tokens: make_engine(llama_folder, make(path, num_speculative_tokens, least=1)),
        PROMPTS,
        SAMPLING,
        lengths=(1, 4),
    )


def test_the_example_is_accepted_on_repeating_text(tmp_path: Path, llama_folder: Path) -> None:
    (tmp_path / "bigrams.py").write_text(example())
    engine = make_engine(llama_folder, make(tmp_path / "bigrams.py:Bigrams"))
    outputs = engine.generate([[7, 8] * 10], SamplingParams(max_tokens=60, ignore_eos=True))
    assert outputs[0].drafted > 0


def test_a_class_of_a_module_runs_and_is_told_of_requests(tmp_path: Path, llama_folder: Path, monkeypatch: Any) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    write(tmp_path, "WORD = 7", "helper_of_mine.py")
    source = """
from helper_of_mine import WORD
class Mine:
    def __init__(self, word=WORD): self.word, self.calls = word, []
    def load(self, target, backend): self.calls.append(("load", target.facts.num_layers))
    def attach(self, target, limits): self.calls.append(("attach", limits.num_speculative_tokens))
    def start(self, request_id, slot, prompt): self.calls.append(("start", request_id, len(prompt)))
    def finish(self, request_id, slot, token_ids): self.calls.append(("finish", request_id, token_ids))
    def reset(self): self.calls.append(("reset",))
    def draft(self, tokens, max_drafts, request_id): return np.full(max_drafts, self.word, dtype=np.int32)
    def describe(self): return {"word": self.word}
"""
    write(tmp_path, source, "module_of_mine.py")
    proposer = make("module_of_mine.Mine", k=2, word=9)
    engine = make_engine(llama_folder, proposer)
    (output,) = assert_lossless(engine, [PROMPTS[0]], SAMPLING, request_ids=["a"])
    proposer.reset()
    ended = ("finish", "a", [*output.prompt_ids, *output.token_ids])
    assert proposer.instance.calls == [("load", 4), ("attach", 2), ("start", "a", 4), ended, ("reset",)]
    facts = engine.describe()["proposer"]
    assert facts["method"] == "custom_class"
    assert facts["class"] == "Mine"
    assert facts["file"] == str((tmp_path / "module_of_mine.py").resolve())
    assert len(facts["file sha256"]) == 12
    assert (facts["options.word"], facts["word"]) == ("9", "9")


def test_a_file_imports_what_lies_beside_it(tmp_path: Path) -> None:
    write(tmp_path, "ANSWER = 42", "beside_the_file.py")
    path = write(
        tmp_path, "import beside_the_file\nclass Mine:\n    def draft(self, t, m, r): return [beside_the_file.ANSWER]"
    )
    assert make(f"{path}:Mine").draft(np.arange(3), 1, "r").tolist() == [42]


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        drafting(tmp_path / name, f"return [{len(name + name[0])}, {1 if name == 'one' else 2}]")
    first, second = make(tmp_path / "one/mine.py:Mine"), make(tmp_path / "two/mine.py:Mine")
    assert [one.draft(np.arange(3), 2, "r").tolist()[1] for one in (first, second)] == [1, 2]
    assert first.loaded.digest != second.loaded.digest


def test_a_proposer_subclass_gets_the_whole_contract(tmp_path: Path, llama_folder: Path) -> None:
    source = """
from specflow.core.draft import Draft
from specflow.proposers.base import Proposer, Requirements
from specflow.targets.base import Taps
class Full(Proposer):
    def __init__(self): self.seen = 0
    def requirements(self): return Requirements(taps=Taps(layers=(1,)))
    def propose(self, context):
        self.seen += int(context.features.num_valid.sum())
        n = len(context.host.slots)
        return Draft(torch.full((n, self.num_speculative_tokens), 5), torch.full((n,), self.num_speculative_tokens))
"""
    proposer = make(f"{write(tmp_path, source)}:Full")
    engine = make_engine(llama_folder, proposer)
    assert_lossless(engine, PROMPTS, SAMPLING)
    assert proposer.instance.seen > sum(map(len, PROMPTS))


@pytest.mark.parametrize(
    "body",
    [
        "return [10**6] * max_drafts",
        "return [-1] * 3",
        "return [2**80]",
        "return np.array([2**63 + 1], dtype=np.uint64)",
        "return list(range(100))",
        "return ()",
        "return np.zeros(0)",
        "return torch.tensor([3, 4])",
    ],
)
def test_wrong_ids_and_too_many_are_the_engines_affair(tmp_path: Path, llama_folder: Path, body: str) -> None:
    engine = make_engine(llama_folder, make(drafting(tmp_path, body)))
    assert_lossless(engine, PROMPTS[:2], SAMPLING)


# -- what a class does wrong -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "value",
    ["None", "[1.5]", "['a']", "'text'", "{1}", "[[1]]", "[True]", "(x for x in [1])", "3", "[None]", "[[1], [1, 2]]"],
)
def test_what_is_no_list_of_ids_is_one_clear_error(tmp_path: Path, llama_folder: Path, value: str) -> None:
    engine = make_engine(llama_folder, make(drafting(tmp_path, f"return {value}")))
    with pytest.raises(ProposerError, match=r"Mine \(.*mine.py\): draft\(\) returned .* flat list") as caught:
        engine.generate([PROMPTS[0]], SAMPLING)
    assert "def draft(self" in str(caught.value)
    assert_idle(engine)


def test_an_exception_names_the_line(tmp_path: Path, llama_folder: Path) -> None:
    engine = make_engine(llama_folder, make(drafting(tmp_path, "return {}['key']")))
    with pytest.raises(ProposerError, match=r"draft\(\) raised KeyError: 'key' \(.*mine\.py:5\)"):
        engine.generate([PROMPTS[0]], SAMPLING)


def test_tokens_cannot_be_written_to(tmp_path: Path, llama_folder: Path) -> None:
    engine = make_engine(llama_folder, make(drafting(tmp_path, "tokens[0] = 1; return []")))
    with pytest.raises(ProposerError, match="read-only"):
        engine.generate([PROMPTS[0]], SAMPLING)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("[1]", "returned list, not a"),
        ("Draft(torch.zeros(1, 3), torch.zeros(1, dtype=torch.int64))", "token_ids is torch.float32"),
        ("Draft(torch.zeros(3, dtype=torch.int64), torch.zeros(1, dtype=torch.int64))", r"token_ids has shape \[3\]"),
        (
            "Draft(torch.zeros(1, 3, dtype=torch.int64), torch.zeros(2, dtype=torch.int64))",
            r"num_drafts has shape \[2\]",
        ),
        (
            "Draft(torch.ones(1, 3).long(), torch.zeros(1).long(), torch.zeros(1, 384))",
            r"logits have shape \[1, 384\]",
        ),
        (
            "Draft(torch.ones(1, 3).long(), torch.zeros(1).long(), torch.zeros(1, 3, 9).long())",
            "logits are torch.int64",
        ),
    ],
)
def test_a_wrong_draft_is_one_clear_error(tmp_path: Path, llama_folder: Path, result: str, message: str) -> None:
    source = f"""
from specflow.core.draft import Draft
from specflow.proposers.base import Proposer
class Full(Proposer):
    def propose(self, context): return {result}
"""
    engine = make_engine(llama_folder, make(f"{write(tmp_path, source)}:Full"))
    with pytest.raises(ProposerError, match=message):
        engine.generate([PROMPTS[0]], SAMPLING)


DRAFT = "    def draft(self, tokens, max_drafts, request_id): return []\n"


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("class Mine: pass", {}, "cannot draft: it has neither"),
        ("class Mine:\n    def propose(self, context): pass", {}, "does not derive from"),
        (
            "class Mine:\n    def draft(self, tokens): return []",
            {},
            r"is called as draft\(tokens, max_drafts, request_id\)",
        ),
        ("class Mine:\n    draft = 3", {}, "'draft' is a int"),
        (
            f"class Mine:\n    def start(self): pass\n{DRAFT}",
            {},
            r"start is called as start\(request_id, slot, prompt\)",
        ),
        (
            f"class Mine:\n    def finish(self, request_id, slot): pass\n{DRAFT}",
            {},
            r"finish is called as finish\(request_id, slot, token_ids\)",
        ),
        (
            f"class Mine:\n    def reset(self, seed): pass\n{DRAFT}",
            {},
            r"reset is called as reset\(\), but it is reset\(seed\)",
        ),
        (f"class Mine:\n    def __init__(self, size): pass\n{DRAFT}", {}, r"nothing gives 'size'"),
        (
            f"class Mine:\n    def __init__(self, size, /): pass\n{DRAFT}",
            {"size": 1},
            "no such parameter|nothing gives",
        ),
        (f"class Mine:\n    def __init__(self, size=1): pass\n{DRAFT}", {"sise": 1}, "Did you mean size"),
        (
            f"class Mine:\n    def __init__(self): raise OSError('no file')\n{DRAFT}",
            {},
            r"raised OSError: no file \(.*:4\)",
        ),
        (
            "from specflow.proposers.base import Proposer\nclass Mine(Proposer): pass",
            {},
            "abstract: it has to define propose",
        ),
        ("def Mine(): pass", {}, "is a function, not a class"),
        ("class Other:\n    pass\nclass Mein: pass", {}, "there is no 'Mine' in .* Did you mean Mein"),
        ("import module_that_is_not_there", {}, "no module 'module_that_is_not_there'"),
        ("1 / 0", {}, r"ZeroDivisionError: division by zero \(.*mine.py:3\)"),
        ("class Mine(:", {}, r"SyntaxError.*mine.py:3"),
        (
            "from specflow.proposers.base import Proposer\nclass Mine(Proposer):\n    num_speculative_tokens = 9\n"
            "    def propose(self, context): pass",
            {},
            "drafts num_speculative_tokens=9, but",
        ),
        (f"class Mine:\n{DRAFT}", {"num_speculative_tokens": 2}, "set proposer.num_speculative_tokens instead"),
    ],
)
def test_a_breach_of_the_contract_is_told_before_any_weight_is_loaded(
    tmp_path: Path, source: str, options: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, source)
    with pytest.raises(ConfigError, match=message):
        make(f"{path}:Mine", **options)


def test_requirements_are_checked(tmp_path: Path, llama_folder: Path) -> None:
    path = write(tmp_path, f"class Mine:\n    def requirements(self): return 3\n{DRAFT}")
    with pytest.raises(ConfigError, match=r"requirements\(\) returned int"):
        make(f"{path}:Mine").requirements()
    source = "from specflow.proposers.base import Requirements\nclass Mine:\n    def requirements(self):"
    path = write(tmp_path, f"{source} return Requirements(target_kv=True)\n{DRAFT}", "other.py")
    with pytest.raises(ConfigError, match="receives none"):
        make(f"{path}:Mine").requirements()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere.py:Mine", "nowhere.py does not exist"),
        ("mine.py", r"names no class. Write the class behind a colon: proposer.path=mine.py:Mine"),
        ("no_package_here.module.Mine", "no module 'no_package_here'"),
        ("Mine", "neither a dotted path nor a file"),
        ("json.NoClassHere", "there is no 'NoClassHere'"),
        ("some/folder", "names no class"),
    ],
)
def test_paths_that_lead_nowhere(tmp_path: Path, monkeypatch: Any, path: str, message: str) -> None:
    drafting(tmp_path, "return []")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        make(path)


def test_the_launch_folder_is_searched_for_modules(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    write(tmp_path, f"class Mine:\n{DRAFT}", "launched_beside_me.py")
    assert make("launched_beside_me.Mine").loaded.cls.__name__ == "Mine"


# -- options -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "proposer.path must be set"),
        ({"path": "a.B"}, "num_speculative_tokens must be set"),
        ({"path": "a.B", "num_speculative_tokens": 0}, "must be 1 or more"),
        ({"path": "a.B", "num_speculative_tokens": 1, "option": {}}, "Did you mean options"),
    ],
)
def test_options(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_options(CustomClassOptions, values, "proposer")


def test_it_is_registered_and_vllms_name_says_where_the_function_is(tmp_path: Path) -> None:
    node = {"name": "custom_class", "path": drafting(tmp_path, "return []"), "num_speculative_tokens": 2, "options": {}}
    proposer = load_plugins(only="").get("proposer", "custom_class").build(node)
    assert proposer.num_speculative_tokens == 2
    with pytest.raises(ConfigError, match="Write task=extract") as caught:
        build_engine({"proposer": "extract_hidden_states"})
    assert "\n" not in str(caught.value)


# -- laws that are not defined -------------------------------------------------------------------------------------
UNDEFINED = """
from specflow.core.draft import Draft
from specflow.proposers.base import Proposer, Requirements
class Sampled(Proposer):
    calls = 0
    def requirements(self): return Requirements(draft_logits=True)
    def propose(self, context):
        n, k = len(context.host.slots), self.num_speculative_tokens
        logits = torch.zeros(n, k, 384)
        Sampled.calls += 1
        if Sampled.calls == 3:
            logits[0, 1, 7] = float(VALUE)
        return Draft(torch.full((n, k), 5), context.max_drafts.clamp(max=k), logits)
"""


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_numbers(value: str, temperature: float, tmp_path: Path, llama_folder: Path) -> None:
    """C40: drafts from there on do not count, the report names the proposer and the number of rounds, and the text is
    that of plain decoding."""
    proposer = make(f"{write(tmp_path, UNDEFINED.replace('VALUE', repr(value)))}:Sampled")
    engine = make_engine(llama_folder, proposer, CoupledSampler(CoupledOptions()) if temperature else None)
    sampling = [SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=seed) for seed in range(4)]
    outputs = assert_lossless(engine, PROMPTS, sampling)
    assert sum(output.drafted for output in outputs) > 0
    assert proposer.nan_drafts == 1
    warning = engine.describe()["proposer"]["warning"]
    assert warning == "custom_class: logits were not finite in 1 rounds, which drafted less"
