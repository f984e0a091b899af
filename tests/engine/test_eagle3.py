"""EAGLE-3 in the engine: lossless always, right where it must be right, and as good as its training says."""

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.backends.cuda import CudaBackend, CudaOptions
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.errors import CheckpointError
from specflow.heads.eagle3 import Eagle3Head
from specflow.proposers.eagle3 import Eagle3Options, Eagle3Proposer
from specflow.samplers.coupled import CoupledOptions, CoupledSampler
from specflow.samplers.standard import StandardOptions, StandardSampler
from specflow.schedulers.continuous import ContinuousOptions, ContinuousScheduler
from specflow.targets.base import TokenTables
from specflow.targets.hf import HfOptions, HfTarget
from specflow.testing.conformance import assert_lossless
from specflow.training.eagle3 import Eagle3Training, Eagle3TrainingOptions
from specflow.training.objective import TrainBatch
from tests.engine.helpers import PROMPTS, make_engine, plain, reference_model
from tests.heads.eagle3_helpers import VARIANTS, VOCAB, WIDTH, make_head, save_head, tiny_facts
from tests.models import make_tokenizer, tiny_llama

GREEDY = SamplingParams(max_tokens=30, ignore_eos=True)


def proposer(folder: Path, num_drafts: int = 3, **options: Any) -> Eagle3Proposer:
    return Eagle3Proposer(Eagle3Options(path=str(folder), num_speculative_tokens=num_drafts, **options))


# -- random heads -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_a_random_head_changes_nothing(llama_folder: Path, tmp_path: Path, variant: str, method: str) -> None:
    engine = make_engine(
        llama_folder, proposer(save_head(tmp_path, make_head(**VARIANTS[variant])), draft_sample_method=method)
    )
    for output in assert_lossless(engine, PROMPTS, GREEDY):
        assert output.drafted > 0


@pytest.mark.parametrize("dtypes", list(itertools.product(["float32", "bfloat16", "float16"], repeat=2)), ids="-".join)
def test_every_pair_of_types(llama_folder: Path, tmp_path: Path, dtypes: tuple[str, str]) -> None:
    """C46: the head's type is its own, whatever the target's."""
    of_target, of_head = dtypes
    head = make_head(own_embedding=False, own_head=False)
    drafter = proposer(save_head(tmp_path, head), dtype=of_head)
    engine = Engine(
        HfTarget(HfOptions(path=str(llama_folder), dtype=of_target, prove=False)),
        drafter,
        StandardSampler(StandardOptions()),
        ContinuousScheduler(ContinuousOptions(max_num_seqs=8, block_size=4, max_model_len=128)),
        CpuBackend(CpuOptions()),
    )
    for output in engine.generate(PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True)):
        assert len(output.token_ids) == 8
        assert output.drafted > 0
    assert drafter.describe()["dtype"] == of_head
    assert drafter.nan_drafts == 0


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_padding_of_the_vocabulary_is_never_drafted(tmp_path: Path, method: str) -> None:
    """C43: 8 of the target's 392 rows stand for no token, and a head with 400 rows of its own prefers one of those."""
    target = tiny_llama(tmp_path / "target", vocab=392)
    make_tokenizer(384).save_pretrained(target)
    own = make_head(vocab_size=400, draft_vocab_size=400)
    own.lm_head.weight[384:] *= 10
    seen: list[torch.Tensor] = []
    for number, head in enumerate(
        (own, make_head(own_embedding=False, own_head=False, vocab_size=392, draft_vocab_size=392))
    ):
        drafter = proposer(save_head(tmp_path / str(number), head), draft_sample_method=method)
        propose = drafter.propose
        drafter.propose = lambda context, propose=propose: (seen.append((draft := propose(context)).token_ids), draft)[
            1
        ]
        engine = make_engine(target, drafter, CoupledSampler(CoupledOptions()))
        for temperature in (0.0, 1.0):
            assert_lossless(
                engine, PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True, temperature=temperature, seed=5)
            )
    drafts = torch.cat([ids.flatten() for ids in seen])
    assert len(drafts) > 1000
    assert drafts.max() < 384


@pytest.mark.parametrize("tied", [True, False])
def test_tables_are_those_of_the_target(tmp_path: Path, tied: bool) -> None:
    """C37: borrowed to the last bit, also where the target has one table for both, and the report says so."""
    target = tiny_llama(tmp_path / "target", tie_word_embeddings=tied)
    drafter = proposer(save_head(tmp_path / "head", make_head(own_embedding=False, own_head=False)))
    engine = make_engine(target, drafter)
    tables = engine.target.token_tables()
    assert (tables.head is tables.embedding) == tied
    assert torch.equal(drafter._head.embedding_table, tables.embedding)
    assert torch.equal(drafter._head.head_table, tables.head)
    assert drafter._head.head_table.data_ptr() == tables.head.data_ptr()
    assert engine.describe()["proposer"]["tables"] == "embedding and head borrowed from the target"
    assert_lossless(engine, PROMPTS, GREEDY)


def test_a_head_of_another_target_is_refused(tmp_path: Path) -> None:
    folder = save_head(tmp_path / "head", make_head())
    changes: list[tuple[dict[str, Any], str]] = [({"layers": 2}, "2 layers"), ({"hidden_size": 32}, "width 64")]
    for number, (change, words) in enumerate(changes):
        target = tiny_llama(tmp_path / str(number), **change)
        with pytest.raises(CheckpointError, match=words):
            make_engine(target, proposer(folder))


# -- planted drafts ---------------------------------------------------------------------------------------------------


def map_target(folder: Path, following: torch.Tensor) -> Path:
    """A target of 64 tokens whose next token is a function of the last one alone."""
    tiny_llama(folder, vocab=WIDTH, hidden_size=WIDTH)
    weights = load_file(folder / "model.safetensors")
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight.zero_()
        elif "norm" in name:
            weight.fill_(1.0)
    weights["model.embed_tokens.weight"] = torch.eye(WIDTH)
    weights["lm_head.weight"] = torch.eye(WIDTH)[following.argsort()]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def map_head(folder: Path, following: torch.Tensor) -> Path:
    """A head whose state is the last token as a unit vector, which its feed-forward turns into the next one's."""
    sizes = {"vocab_size": WIDTH, "draft_vocab_size": WIDTH, "own_embedding": False, "own_head": False}
    head: Eagle3Head = make_head(capture_layers=(0, 1, 2), **sizes)
    state = head.state_dict()
    for name, weight in state.items():
        weight.fill_(1.0 if "norm" in name else 0.0)
    state["fc.weight"][:, 2 * WIDTH :] = torch.eye(WIDTH)
    state["layers.0.mlp.gate_proj.weight"][:WIDTH] = 1.0
    state["layers.0.mlp.up_proj.weight"][:WIDTH] = torch.eye(WIDTH)
    gained = torch.eye(WIDTH)[following].T - torch.eye(WIDTH)
    state["layers.0.mlp.down_proj.weight"][:, :WIDTH] = gained / 64  # silu(8) * 8 of a unit vector's norm
    return save_head(folder, head)


def test_planted_drafts_are_all_accepted_and_their_opposite_never(tmp_path: Path) -> None:
    following = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(2))
    target = map_target(tmp_path / "target", following)
    prompts = [[5], [9, 3, 17], [60, 61, 62, 63, 1]]
    right = make_engine(target, proposer(map_head(tmp_path / "right", following), 5))
    for output in assert_lossless(right, prompts, GREEDY):
        assert output.accepted == output.drafted > 0
    wrong = make_engine(target, proposer(map_head(tmp_path / "wrong", following.roll(1)), 5))
    for output in assert_lossless(wrong, prompts, GREEDY):
        assert output.accepted == 0 < output.drafted


@pytest.mark.parametrize(("reduced", "method"), [(True, "greedy"), (True, "probabilistic"), (False, "probabilistic")])
def test_the_law_of_sampled_text(tmp_path: Path, reduced: bool, method: str) -> None:
    """Joint law of three tokens against transformers, with much of the target's mass outside the draft vocabulary."""
    vocab = 8
    target = tiny_llama(tmp_path / "target", vocab=vocab, layers=2, initializer_range=0.15)
    sizes = {"vocab_size": vocab, "draft_vocab_size": 3 if reduced else vocab, "own_embedding": False}
    head = make_head(capture_layers=(-1, 0, 1), **sizes | ({"own_head": True} if reduced else {}))
    if reduced:
        head.ids = torch.tensor([1, 4, 6])
    engine = make_engine(
        target, proposer(save_head(tmp_path / "head", head), 2, draft_sample_method=method), max_num_seqs=64
    )
    count, prompt = 2000, [1, 2, 3]
    sampling = [SamplingParams(max_tokens=3, ignore_eos=True, temperature=1.0, seed=seed) for seed in range(count)]
    outputs = engine.generate([prompt] * count, sampling)
    assert sum(output.accepted for output in outputs) > 0
    seen = Counter(tuple(output.token_ids) for output in outputs)
    outcomes = list(itertools.product(range(vocab), repeat=3))
    with torch.no_grad():
        logits = reference_model(target)(torch.tensor([[*prompt, *text] for text in outcomes])).logits
    law = torch.log_softmax(logits.double(), -1)[:, 2:5]
    chosen = torch.tensor(outcomes).unsqueeze(-1)
    expected = (law.gather(-1, chosen).sum((1, 2)).exp() * count).numpy()
    observed = np.array([seen[text] for text in outcomes])
    large = expected >= 5
    assert large.sum() > 15
    counts = np.append(observed[large], observed[~large].sum())
    wanted = np.append(expected[large], expected[~large].sum())
    assert chisquare(counts, wanted * counts.sum() / wanted.sum()).pvalue > 1e-4


# -- the closed loop --------------------------------------------------------------------------------------------------


def one_document(folder: Path, prompt: list[int], layers: tuple[int, ...]) -> tuple[TrainBatch, TokenTables]:
    """A prompt and the target's greedy answer, with the states that transformers gives."""
    answer = plain(folder, [prompt], SamplingParams(max_tokens=60, ignore_eos=True))[0].token_ids
    tokens = torch.tensor([*prompt, *answer])
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        output = model(tokens.unsqueeze(0), output_hidden_states=True)
    positions = torch.arange(len(tokens))
    batch = TrainBatch(
        token_ids=tokens,
        predicted=positions >= len(prompt),
        documents=torch.zeros_like(tokens),
        positions=positions,
        hidden=torch.stack([output.hidden_states[layer + 1][0] for layer in layers], 1),
        last_hidden=output.hidden_states[-1][0],
        sample_ids=("one",),
        seed=0,
    )
    return batch, TokenTables(model.model.embed_tokens.weight.detach(), model.lm_head.weight.detach())


@pytest.mark.parametrize("kind", ["eagle3.1", "plain, reduced"])
def test_a_head_fitted_to_one_answer_is_accepted_on_it(llama_folder: Path, tmp_path: Path, kind: str) -> None:
    """C36: what training measures is what the engine gets."""
    old = {"fc_norm": False, "norm_output": False, "draft_vocab_size": 200, "loss": "ce"}
    options = Eagle3TrainingOptions(
        layers=(0, 1, 2), head_dim=16, ttt_length=4, step_loss_decay=1.0, **({} if kind == "eagle3.1" else old)
    )
    batch, tables = one_document(llama_folder, PROMPTS[1], (0, 1, 2))
    torch.manual_seed(0)
    training = Eagle3Training(options)
    facts = tiny_facts(eos_token_ids=(0,), architecture="LlamaForCausalLM")
    counts = torch.bincount(batch.token_ids, minlength=VOCAB)
    training.build(facts, tables, counts, torch.device("cpu"))
    optimiser = torch.optim.AdamW(training.module.parameters(), lr=4e-3, weight_decay=0.0)
    for _ in range(150):
        parts = training.loss(batch)
        (parts.total / parts.weight).backward()
        torch.nn.utils.clip_grad_norm_(training.module.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
    hits = [total / count for name, (total, count) in training.loss(batch).measures.items() if "accuracy" in name]
    assert min(hits) > 0.95
    training.save(tmp_path)
    engine = make_engine(llama_folder, proposer(tmp_path, 4))
    (output,) = assert_lossless(engine, [PROMPTS[1]], SamplingParams(max_tokens=60, ignore_eos=True))
    assert output.accepted / output.drafted > 0.95


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("variant", ["plain", "two_layers", "reduced"])
def test_on_a_gpu(llama_folder: Path, tmp_path: Path, variant: str) -> None:
    """Lossless, and the same drafts are accepted as on the CPU."""
    folder = save_head(tmp_path, make_head(**VARIANTS[variant]))

    def build(backend: Any) -> Engine:
        return Engine(
            HfTarget(HfOptions(path=str(llama_folder), dtype="float32", prove=False)),
            proposer(folder),
            StandardSampler(StandardOptions()),
            ContinuousScheduler(ContinuousOptions(max_num_seqs=8, block_size=4, max_model_len=128)),
            backend,
        )

    on_gpu = assert_lossless(build(CudaBackend(CudaOptions())), PROMPTS, GREEDY)
    on_cpu = assert_lossless(build(CpuBackend(CpuOptions())), PROMPTS, GREEDY)
    assert [output.accepted for output in on_gpu] == [output.accepted for output in on_cpu]
