"""Hidden states for training: what transformers computes, from every provider; and every fault caught by name."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.capture.checks import CaptureError
from specflow.capture.reading import Extraction
from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError, StorageError
from specflow.targets.base import Taps, TokenTables
from specflow.targets.hf import HfOptions, HfTarget
from specflow.training.batches import make_batch
from specflow.training.documents import Document
from specflow.training.hidden_checks import check_predictions, check_sample, check_source
from specflow.training.hidden_provider import HybridProvider, OnlineProvider, States, StoredProvider
from specflow.training.resident_target import ResidentTarget
from tests.engine.helpers import make_engine, reference_model
from tests.models import tiny_gemma2, tiny_llama, tiny_qwen3

CPU = torch.device("cpu")
TAPS = Taps(layers=(2, -1, 0), last_hidden=True)


def loaded(folder: Path) -> ResidentTarget:
    target = ResidentTarget(HfTarget(HfOptions(path=str(folder), dtype="float32", prove=False)))
    target.load(CpuBackend(CpuOptions()))
    return target


@pytest.fixture(scope="module")
def target(llama_folder: Path) -> ResidentTarget:
    return loaded(llama_folder)


@pytest.fixture(scope="module")
def tables(target: ResidentTarget) -> TokenTables:
    return target.token_tables()


@pytest.fixture(scope="module")
def documents(llama_folder: Path) -> list[Document]:
    """Answers of the target of all lengths, greedy and sampled in turn."""
    engine = make_engine(llama_folder)
    found = []
    for index, length in enumerate((40, 24, 33, 60, 20, 48)):
        temperature = 0.0 if index % 2 == 0 else 1.0
        sampling = SamplingParams(max_tokens=length, ignore_eos=True, temperature=temperature, seed=index)
        output = engine.generate([[5 + index, 9, 17 * index, 3]], sampling)[0]
        found.append(Document(f"d{index}", (*output.prompt_ids, *output.token_ids), 4, temperature))
    return found


def expected(folder: Path, document: Document) -> States:
    """By transformers' own `output_hidden_states`, the document alone. Its last entry is after the final norm."""
    model = reference_model(folder)
    with torch.no_grad():
        every = model(document.token_ids.unsqueeze(0), output_hidden_states=True).hidden_states
    return States(torch.stack([every[layer + 1][0] for layer in TAPS.layers], 1), every[-1][0])


def assert_close(found: States, wanted: States) -> None:
    torch.testing.assert_close(found.hidden, wanted.hidden, rtol=1e-4, atol=2e-4)
    assert found.last_hidden is not None
    assert wanted.last_hidden is not None
    torch.testing.assert_close(found.last_hidden, wanted.last_hidden, rtol=1e-4, atol=2e-4)


# -- providers -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("budget", [1, 90, 10_000])
def test_online_is_what_transformers_computes(
    budget: int, target: ResidentTarget, documents: list[Document], llama_folder: Path
) -> None:
    """In whatever company a document is computed, and in the order asked for."""
    provider = OnlineProvider(target.model, TAPS, CPU, budget)
    for document, states in zip(documents, provider.states(documents), strict=True):
        assert_close(states, expected(llama_folder, document))


@pytest.mark.parametrize("build", [tiny_qwen3, tiny_gemma2])
def test_online_follows_the_rules_of_the_model(build: Callable[..., Path], tmp_path: Path) -> None:
    """Gemma-2 has windows and soft-capped scores, which torch's fused attention leaves out."""
    folder = build(tmp_path)
    document = Document("d", tuple(range(3, 43)), 4, 0.0)
    states = OnlineProvider(loaded(folder).model, TAPS, CPU, 100).states([document, document.cut(20)])
    assert_close(states[0], expected(folder, document))


def test_an_engine_runs_before_and_after(llama_folder: Path, target: ResidentTarget, documents: list[Document]) -> None:
    before = target.model.config._attn_implementation
    OnlineProvider(target.model, TAPS, CPU, 90).states(documents)
    assert target.model.config._attn_implementation == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.model.modules())


def test_stored_is_what_was_captured(
    target: ResidentTarget, documents: list[Document], llama_folder: Path, tmp_path: Path
) -> None:
    online = OnlineProvider(target.model, TAPS, CPU, 90)
    writer = HybridProvider(tmp_path, online, target.facts, TAPS)
    assert list(writer.capture(documents)) == [6]
    assert list(writer.capture(documents)) == []
    writer.close()
    stored = StoredProvider(tmp_path, target.facts, TAPS, CPU)
    stored.verify(documents)
    for document, states in zip(documents, stored.states(documents), strict=True):
        assert_close(states, expected(llama_folder, document))
    cut = stored.states([documents[3].cut(30)])[0]
    assert cut.hidden.shape == (30, 3, 64)
    entry = Extraction(tmp_path).entries["d0"]
    assert (entry.last_hidden, entry.layers, entry.prompt_tokens) == (True, TAPS.layers, 4)


def test_hybrid_computes_once(target: ResidentTarget, documents: list[Document], tmp_path: Path) -> None:
    calls = 0

    class Counting(OnlineProvider):
        def states(self, documents: Any) -> list[States]:
            nonlocal calls
            calls += len(documents)
            return super().states(documents)

    provider = HybridProvider(tmp_path, Counting(target.model, TAPS, CPU, 90), target.facts, TAPS)
    first = provider.states(documents[:4])
    second = provider.states(documents[:4])
    assert calls == 4
    assert all(torch.equal(one.hidden, other.hidden) for one, other in zip(first, second, strict=True))
    provider.states(documents[2:])  # some are there: all are computed
    assert calls == 8
    provider.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": (1,)}, r"layers: \[2, -1, 0\] there, \[1\] now"),
        ({"layers": (2, -1, 0), "last_hidden": False}, "last_hidden: after the final norm there, None now"),
    ],
)
def test_a_capture_of_other_layers_is_refused(
    change: dict[str, Any], message: str, target: ResidentTarget, documents: list[Document], tmp_path: Path
) -> None:
    writer = HybridProvider(tmp_path, OnlineProvider(target.model, TAPS, CPU, 90), target.facts, TAPS)
    list(writer.capture(documents[:1]))
    writer.close()
    with pytest.raises(ConfigError, match=message):
        StoredProvider(tmp_path, target.facts, Taps(**change), CPU)


def test_a_capture_of_another_target_is_refused(
    target: ResidentTarget, documents: list[Document], tmp_path: Path
) -> None:
    writer = HybridProvider(tmp_path / "hidden", OnlineProvider(target.model, TAPS, CPU, 90), target.facts, TAPS)
    list(writer.capture(documents[:1]))
    writer.close()
    other = loaded(tiny_llama(tmp_path / "other", seed=3))
    with pytest.raises(ConfigError, match="target_hash"):
        StoredProvider(tmp_path / "hidden", other.facts, TAPS, CPU)
    with pytest.raises(StorageError, match=r"run task\.stage=capture first"):
        StoredProvider(tmp_path / "nothing", target.facts, TAPS, CPU)


def test_missing_and_other_documents_are_named(
    target: ResidentTarget, documents: list[Document], tmp_path: Path
) -> None:
    writer = HybridProvider(tmp_path, OnlineProvider(target.model, TAPS, CPU, 90), target.facts, TAPS)
    list(writer.capture(documents[:2]))
    writer.close()
    stored = StoredProvider(tmp_path, target.facts, TAPS, CPU)
    with pytest.raises(CaptureError, match="response 'd2' has no captured hidden states"):
        stored.verify(documents)
    changed = dataclasses.replace(documents[1], ids=(*documents[1].ids[:-1], 7))
    with pytest.raises(CaptureError, match="'d1': the captured hidden states are of other tokens"):
        stored.states([changed])
    longer = dataclasses.replace(documents[1], ids=(*documents[1].ids, 7))
    with pytest.raises(CaptureError, match="'d1': the captured hidden states are of other tokens"):
        stored.states([longer])


def test_a_full_disk_is_said_beforehand(
    target: ResidentTarget, documents: list[Document], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = HybridProvider(tmp_path, OnlineProvider(target.model, TAPS, CPU, 90), target.facts, TAPS)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000})())
    with pytest.raises(StorageError, match=r"hidden states of 6 responses take 0\.0 GiB(.|\n)*task\.capture=online"):
        list(writer.capture(documents))
    writer.close()


# -- what is wrong is caught, with the response's id -----------------------------------------------------------------
def right(target: ResidentTarget, document: Document) -> States:
    return OnlineProvider(target.model, TAPS, CPU, 90).states([document])[0]


def with_hidden(states: States, change: Callable[[torch.Tensor], torch.Tensor]) -> States:
    hidden = states.hidden.clone()
    hidden[:, 0] = change(hidden[:, 0])
    return States(hidden, states.last_hidden)


def with_last(states: States, change: Callable[[torch.Tensor], torch.Tensor]) -> States:
    assert states.last_hidden is not None
    return States(states.hidden, change(states.last_hidden.clone()))


def nan_at_three(values: torch.Tensor) -> torch.Tensor:
    values[3, 5] = torch.nan
    return values


CHANGES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str, str]] = {
    "zero": (torch.zeros_like, "layer 2 are all zero", "final norm are all zero"),
    "constant": (lambda values: torch.full_like(values, 2.5), "layer 2 are all 2.5", "final norm are all 2.5"),
    "one row": (lambda values: values[:1].expand_as(values), "same at every position", "same at every position"),
    "nan": (nan_at_three, r"NaN or infinity \(first at position 3", r"NaN or infinity \(first at position 3"),
    "late": (lambda values: values.roll(1, 0), r"shifted by one row \(late\)", "response 'd0'"),
    "early": (lambda values: values.roll(-1, 0), r"shifted by one row \(early\)", "response 'd0'"),
    "noise": (lambda values: values + torch.randn_like(values) * values.std(), "nor of any other", "response 'd0'"),
}


def test_what_is_right_passes(target: ResidentTarget, documents: list[Document], tables: TokenTables) -> None:
    states = [right(target, document) for document in documents]
    check_sample(documents, states, TAPS, tables, target.model)


@pytest.mark.parametrize("fault", CHANGES)
@pytest.mark.parametrize("which", ["hidden", "last"])
def test_a_fault_is_caught(
    fault: str, which: str, target: ResidentTarget, documents: list[Document], tables: TokenTables
) -> None:
    """C35: zeros, constants, NaN and more, with the id of the response."""
    change, of_hidden, of_last = CHANGES[fault]
    spoil = with_hidden if which == "hidden" else with_last
    states = spoil(right(target, documents[0]), change)
    with pytest.raises(CaptureError, match=of_hidden if which == "hidden" else of_last) as caught:
        check_sample(documents[:1], [states], TAPS, tables, target.model)
    assert "'d0'" in str(caught.value)


def test_states_of_another_layer_are_named(
    target: ResidentTarget, documents: list[Document], tables: TokenTables
) -> None:
    """User case C31: another tool's layer 2 is our layer 1."""
    theirs = OnlineProvider(target.model, Taps(layers=(1, -1, 0), last_hidden=True), CPU, 90).states(documents[:1])
    with pytest.raises(CaptureError, match=r"stored as layer 2 are not those of layer 2: they are those of layer 1\."):
        check_sample(documents[:1], theirs, TAPS, tables, target.model)


def test_the_last_layer_before_the_norm_is_no_last_hidden(
    target: ResidentTarget, documents: list[Document], tables: TokenTables
) -> None:
    raw = OnlineProvider(target.model, Taps(layers=(3,), last_hidden=True), CPU, 90).states(documents[:1])[0]
    states = with_last(right(target, documents[0]), lambda values: raw.hidden[:, 0])
    with pytest.raises(CaptureError, match="'d0'"):
        check_sample(documents[:1], [states], TAPS, tables, target.model)


@pytest.mark.parametrize("index", [0, 3])
def test_another_target_is_caught(
    index: int, target: ResidentTarget, documents: list[Document], tables: TokenTables, tmp_path: Path
) -> None:
    """By the predictions alone (greedy and sampled text), and by comparison with the target that is here."""
    other = loaded(tiny_llama(tmp_path, seed=3))
    document = documents[index]
    states = right(other, document)
    assert states.last_hidden is not None
    with pytest.raises(CaptureError, match=f"'d{index}'.*of another target"):
        check_predictions(document, states.last_hidden, other.token_tables())
    with pytest.raises(CaptureError, match=f"'d{index}'.*another target"):
        check_source(document, states, TAPS, target.model)


def test_missing_rows_and_slots_are_caught(
    target: ResidentTarget, documents: list[Document], tables: TokenTables
) -> None:
    states = right(target, documents[0])
    for hidden in (states.hidden[:-1], states.hidden[:, :2]):
        with pytest.raises(CaptureError, match="'d0': hidden states of shape"):
            check_sample(documents[:1], [States(hidden, states.last_hidden)], TAPS, tables, target.model)
    with pytest.raises(CaptureError, match="'d0': the states after the final norm are missing"):
        check_sample(documents[:1], [States(states.hidden, None)], TAPS, tables, target.model)


# -- batches -------------------------------------------------------------------------------------------------------
def test_a_batch_is_its_documents_side_by_side(target: ResidentTarget, documents: list[Document]) -> None:
    chosen = documents[1:3]
    states = OnlineProvider(target.model, TAPS, CPU, 90).states(chosen)
    batch = make_batch(chosen, states, 80, 7, None)
    lengths = [len(document) for document in chosen]
    start = 0
    for number, (document, one) in enumerate(zip(chosen, states, strict=True)):
        rows = slice(start, start + len(document))
        assert torch.equal(batch.token_ids[rows], document.token_ids)
        assert batch.documents[rows].unique().tolist() == [number]
        assert batch.positions[rows].tolist() == list(range(len(document)))
        assert batch.predicted[rows].tolist() == [False] * 4 + [True] * document.num_labels
        assert torch.equal(batch.hidden[rows], one.hidden)
        assert batch.last_hidden is not None
        assert torch.equal(batch.last_hidden[rows], one.last_hidden)
        start += len(document)
    assert batch.documents[sum(lengths) :].unique().tolist() == [-1]
    assert not batch.predicted[sum(lengths) :].any()
    assert batch.hidden[sum(lengths) :].abs().sum() == 0
    assert batch.sample_ids == ("d1", "d2")
    assert make_batch(chosen, states, 80, 7, torch.bfloat16).hidden.dtype == torch.bfloat16
