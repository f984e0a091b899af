"""Training a DFlash head: what blocks see and say, checked on packs drawn by hand, and a head that learns one text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specflow.errors import ConfigError
from specflow.heads.dflash import BlockLayer
from specflow.targets.base import TargetFacts, TokenTables
from specflow.training.anchored_blocks import AnchoredBlocks, decayed, paced, place_blocks, visible_keys
from specflow.training.dflash import DFlashTraining, DFlashTrainingOptions, per_draft
from specflow.training.objective import LossParts, TrainBatch
from tests.heads.dflash_cases import plain_block

VOCAB, WIDTH, LAYERS = 50, 32, 6
CPU = torch.device("cpu")


def make_facts(**changes: Any) -> TargetFacts:
    facts = TargetFacts(
        name="target",
        architecture="LlamaForCausalLM",
        vocab_size=VOCAB,
        num_token_ids=VOCAB,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        max_model_len=128,
        eos_token_ids=(0,),
        dtype=torch.float32,
        num_parameters=1,
        checkpoint_hash="",
        kv_bytes_per_token=1,
        mask_token_id=1,
    )
    return replace(facts, **changes)


def make_batch(
    lengths: list[int], prompts: list[int], padding: int = 0, captures: int = 2, seed: int = 0
) -> TrainBatch:
    """A pack of documents whose first tokens, `prompts` of each, are no labels; random states."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths) + padding
    documents, positions, predicted = [], [], []
    for number, (length, prompt) in enumerate(zip(lengths, prompts, strict=True)):
        documents += [number] * length
        positions += list(range(length))
        predicted += [index >= prompt for index in range(length)]
    return TrainBatch(
        token_ids=torch.randint(2, VOCAB, (total,), generator=generator),
        predicted=torch.tensor(predicted + [False] * padding),
        documents=torch.tensor(documents + [-1] * padding),
        positions=torch.tensor(positions + [0] * padding),
        hidden=torch.randn(total, 2, WIDTH, generator=generator),
        last_hidden=torch.randn(total, WIDTH, generator=generator),
        sample_ids=tuple(f"s{index}" for index in range(len(lengths))),
        seed=seed,
    )


def make_training(**options: Any) -> DFlashTraining:
    settings: dict[str, Any] = {"num_layers": 2, "block_size": 4, "num_anchors": 6, "capture_layers": (1, 3)} | options
    training = DFlashTraining(DFlashTrainingOptions(**settings))
    generator = torch.Generator().manual_seed(3)
    tables = TokenTables(
        torch.randn(VOCAB, WIDTH, generator=generator), torch.randn(VOCAB, WIDTH, generator=generator) / WIDTH**0.5
    )
    with torch.random.fork_rng():
        torch.manual_seed(7)
        training.build(make_facts(max_model_len=8192), tables, None, CPU)
        for weight in training.module.parameters():
            weight.data += 0.1 * torch.randn_like(weight)
    training.module.borrow(tables.embedding, tables.head)
    return training


def blocks_at(batch: TrainBatch, anchors: list[int], size: int, next_token: bool = False) -> AnchoredBlocks:
    """The blocks at these anchors among those of all possible ones."""
    found = place_blocks(batch, len(batch.token_ids), size, sample_from_anchor=next_token)
    chosen = [
        index
        for index, (anchor, valid) in enumerate(zip(found.anchors.tolist(), found.valid.tolist(), strict=True))
        if valid and anchor in anchors
    ]
    assert found.anchors[chosen].tolist() == anchors
    parts = (found.anchors, found.valid, found.positions, found.labels, found.counted)
    return AnchoredBlocks(size, *(part[chosen] for part in parts))


# -- where blocks stand -------------------------------------------------------------------------------------------


def test_anchors_are_answer_tokens_with_a_label() -> None:
    """Not the prompt, not a document's last token, not padding; in order, each once, filled up with invalid ones."""
    batch = make_batch([5, 4, 2], [2, 1, 2], padding=3)
    blocks = place_blocks(batch, 9, 4, sample_from_anchor=False)
    assert blocks.anchors[blocks.valid].tolist() == [2, 3, 6, 7]
    assert blocks.anchors.tolist() == sorted(blocks.anchors.tolist())
    assert not blocks.counted[~blocks.valid].any()
    assert blocks.positions[blocks.valid].tolist() == [[p, p + 1, p + 2, p + 3] for p in (2, 3, 1, 2)]


@pytest.mark.parametrize("next_token", [False, True])
def test_labels_of_both_layouts(next_token: bool) -> None:
    """Fill-in: row j >= 1 says its own place. Next-token: row j says the place behind it, and row 0 counts too."""
    blocks = blocks_at(make_batch([9], [2]), [2, 6], 4, next_token)
    if next_token:
        assert blocks.labels.tolist() == [[3, 4, 5, 6], [7, 8, 8, 8]]
        assert blocks.counted.tolist() == [[True] * 4, [True, True, False, False]]
    else:
        assert blocks.labels.tolist() == [[3, 4, 5], [7, 8, 8]]
        assert blocks.counted.tolist() == [[True] * 3, [True, True, False]]


def test_supervision_ends_at_the_first_token_that_is_not_the_targets() -> None:
    """Two answers in one document: labels behind the next question do not count, nor do those of the next document."""
    batch = make_batch([9, 6], [2, 0])
    batch.predicted[5] = False
    blocks = blocks_at(batch, [3, 6, 7], 5)
    assert blocks.counted.tolist() == [[True, False, False, False], [True, True, False, False], [True] + [False] * 3]


def test_the_seed_decides_and_nothing_else() -> None:
    batch = make_batch([60], [5])
    first, again = (place_blocks(batch, 8, 4, sample_from_anchor=False).anchors.tolist() for _ in range(2))
    assert first == again
    assert len(set(first)) == 8
    others = {tuple(place_blocks(replace(batch, seed=seed), 8, 4, sample_from_anchor=False).anchors.tolist())
              for seed in range(5)}  # fmt: skip
    assert len(others) == 5


# -- what blocks see ----------------------------------------------------------------------------------------------

# Rows: two rows each of the blocks at b1 and e1. Columns: the pack's tokens, then the rows of the blocks.
PICTURES = {
    #         a0 b1 c2 | d0 e1 f2 | pad || b1 . | e1 .
    "full": (BlockLayer(), ["x.. ... . xx ..", "x.. ... . xx ..", "... x.. . .. xx", "... x.. . .. xx"]),
    "causal": (BlockLayer(causal=True), ["x.. ... . x. ..", "x.. ... . xx ..", "... x.. . .. x.", "... x.. . .. xx"]),
    "window": (BlockLayer(window=2), ["x.. ... . xx ..", "... ... . xx ..", "... x.. . .. xx", "... ... . .. xx"]),
    "one key": (BlockLayer(window=1), ["... ... . x. ..", "... ... . .x ..", "... ... . .. x.", "... ... . .. .x"]),
}


@pytest.mark.parametrize("rule", PICTURES)
def test_truth_table_of_a_pack_of_two_documents(rule: str) -> None:
    batch = make_batch([3, 3], [1, 1], padding=1)
    layer, picture = PICTURES[rule]
    visible = visible_keys(batch, blocks_at(batch, [1, 4], 2), layer)
    drawn = [[mark == "x" for mark in line.replace(" ", "")] for line in picture]
    assert visible.tolist() == drawn


def test_blocks_that_fill_up_see_only_themselves() -> None:
    batch = make_batch([3], [1], padding=2)
    blocks = place_blocks(batch, 5, 2, sample_from_anchor=False)
    visible = visible_keys(batch, blocks, BlockLayer())
    filling = (~blocks.valid).repeat_interleave(2)
    assert filling.any()
    assert (visible[filling].sum(1) == 2).all()
    assert not visible[filling][:, :5].any()


RULES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"sliding_window": 3},
    "causal window": {"sliding_window": 3, "causal": True},
}


@pytest.mark.parametrize("next_token", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_blocks_in_a_pack_equal_drafting(rule: str, next_token: bool) -> None:
    """C36: what training computes for a block is what decoding computes with the same states, anchor and masks."""
    training = make_training(sample_from_anchor=next_token, **RULES[rule])
    batch = make_batch([9, 7, 5], [2, 1, 3], padding=2)
    blocks = blocks_at(batch, [3, 5, 10, 13, 19], 4, next_token)
    with torch.no_grad():
        states = training.block_states(batch, blocks)
        logits = training.module.logits(states).unflatten(0, (-1, 4))
        for index, anchor in enumerate(blocks.anchors.tolist()):
            first = anchor - int(batch.positions[anchor])
            wanted = plain_block(training.module, batch.hidden[first:anchor], int(batch.token_ids[anchor]), 4)
            torch.testing.assert_close(logits[index], wanted, rtol=1e-4, atol=1e-4)


def test_nothing_leaks_into_a_block() -> None:
    """States from the anchor on, other documents and the tokens to be drafted change nothing; the context does."""
    training = make_training()
    batch = make_batch([9, 8], [2, 2])
    blocks = blocks_at(batch, [12], 4)  # position 3 of the second document

    def states(changed: TrainBatch) -> Tensor:
        with torch.no_grad():
            return training.block_states(changed, blocks)

    before = states(batch)
    hidden, ids = batch.hidden.clone(), batch.token_ids.clone()
    hidden[:9] += 1
    hidden[12:] += 1
    ids[13:] = 2
    ids[:12] = 2
    assert torch.equal(states(replace(batch, hidden=hidden, token_ids=ids)), before)
    for row in (9, 10, 11):
        changed = batch.hidden.clone()
        changed[row] += 1
        assert not torch.equal(states(replace(batch, hidden=changed)), before)
    ids[12] = (batch.token_ids[12] + 1) % VOCAB
    assert not torch.equal(states(replace(batch, token_ids=ids)), before)


# -- losses -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["ce", "kl"])
@pytest.mark.parametrize("next_token", [False, True])
def test_a_planted_head_is_always_right_and_a_shifted_one_is_not(next_token: bool, loss: str) -> None:
    """The target copies the text: states that point at the token each row stands for give loss 0 and accuracy 1."""
    training = make_training(sample_from_anchor=next_token, loss=loss)
    batch = make_batch([20, 12], [2, 3])
    table = torch.nn.functional.normalize(training.tables.head, dim=1)
    training.tables = replace(training.tables, head=table)
    following = batch.token_ids.roll(-1)
    batch = replace(batch, last_hidden=60 * table[following])
    blocks = place_blocks(batch, 6, 4, sample_from_anchor=next_token)
    shift = 1 if next_token else 0
    for wrong in (0, 1):
        steps = torch.arange(4)[training.module.config.answers] + shift + wrong
        rows = (blocks.anchors.unsqueeze(1) + steps).clamp(max=31)
        parts = training.measure(batch, blocks, (60 * table[batch.token_ids[rows]]).requires_grad_())
        right = [float(total / count) for name, (total, count) in parts.measures.items() if "accuracy" in name]
        if wrong:
            assert max(right) < 0.5
            assert parts.total / parts.weight > 1
        else:
            assert right == [1.0] * len(right)
            assert parts.total / parts.weight < 1e-3
        assert float(parts.measures["accuracy/0"][1]) == float(blocks.counted[:, 0].sum())


def test_weights_of_drafts() -> None:
    counted = torch.tensor([[True, True, True], [True, False, False]])
    expected = torch.tensor([[1.0, 0.7788, 0.6065], [1.0, 0.0, 0.0]])
    torch.testing.assert_close(decayed(counted, 4.0), expected, rtol=1e-3, atol=1e-4)
    losses = torch.tensor([[0.1, 0.7, 2.0], [0.3, 5.0, 5.0]])
    r = 0.5 * torch.exp(-losses) + 0.5
    first = [r[0, 0], r[0, 0] * r[0, 1], r[0, 0] * r[0, 1] * r[0, 2]]
    wanted = torch.tensor([[first[0] + first[1] + first[2], first[1] + first[2], first[2]], [r[1, 0], 0, 0]])
    torch.testing.assert_close(paced(losses, counted, 0.5), wanted)


def test_the_loss_is_the_weighted_sum_by_hand() -> None:
    training = make_training(loss="ce", gamma=2.0)
    batch = make_batch([14, 9], [2, 3])
    parts = training.loss(batch)
    blocks = place_blocks(batch, 6, 4, sample_from_anchor=False)
    logits = training.module.logits(training.block_states(batch, blocks)).unflatten(0, (-1, 4))[:, 1:]
    total, weight = torch.zeros(()), 0.0
    for n in range(6):
        for j in range(3):
            if blocks.counted[n, j]:
                share = float(torch.exp(torch.tensor(-j / 2.0)))
                label = batch.token_ids[blocks.labels[n, j]]
                total = total + share * torch.nn.functional.cross_entropy(logits[n, j], label)
                weight += share
    torch.testing.assert_close(parts.total, total)
    assert float(parts.weight) == pytest.approx(weight, rel=1e-5)
    parts.total.backward()
    assert all(weight.grad is not None and weight.grad.abs().sum() > 0 for weight in training.module.parameters())


@pytest.mark.parametrize("options", [{"loss": "ce", "pace": 0.5}, {"loss": "kl"}, {"sample_from_anchor": True}])
def test_a_pack_without_labels_has_no_loss(options: dict[str, Any]) -> None:
    parts: LossParts = make_training(**options).loss(make_batch([8], [8]))
    assert float(parts.total.detach()) == float(parts.weight) == 0
    parts.total.backward()
    assert make_training(**options).loss(make_batch([8], [3])).total > 0


def test_measures_are_counted_per_draft() -> None:
    training = make_training()
    parts = training.loss(make_batch([20], [2]))
    assert list(parts.measures) == [*(f"accuracy/{j}" for j in range(3)), *(f"acceptance/{j}" for j in range(3))]
    assert all(0 <= float(total) <= float(count) for total, count in parts.measures.values())
    assert per_draft.__doc__


def test_half_precision(tmp_path: Path) -> None:
    """As the trainer runs it: weights in float32, products in bfloat16, states of the target in bfloat16."""
    training, batch = make_training(), make_batch([30], [2])
    exact = training.loss(batch)
    assert batch.last_hidden is not None
    half = replace(batch, hidden=batch.hidden.bfloat16(), last_hidden=batch.last_hidden.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        parts = training.loss(half)
    assert parts.total.dtype == torch.float32
    assert float(parts.total.detach()) == pytest.approx(float(exact.total.detach()), rel=0.05)
    parts.total.backward()


@pytest.mark.gpu
def test_a_pack_on_a_gpu() -> None:
    """Same loss as on a CPU; scores of all heads, rows and keys never exist together (they would take 7 GiB here)."""
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    device = torch.device("cuda")
    options = {"num_anchors": 512, "block_size": 8, "num_heads": 16, "num_kv_heads": 4, "head_dim": 64}
    training, there = make_training(**options), make_training(**options)
    batch = make_batch([2000, 2000, 4000], [50, 300, 20], padding=192)
    assert batch.last_hidden is not None
    exact = training.loss(batch)
    there.module.to(device)
    there._tables = TokenTables(there._tables.embedding.to(device), there._tables.head.to(device))
    there._rotary = replace(there._rotary, values=there._rotary.values.to(device))
    moved = {key: value.to(device) for key, value in vars(batch).items() if isinstance(value, Tensor)}
    torch.cuda.reset_peak_memory_stats()
    parts = there.loss(replace(batch, **moved))
    parts.total.backward()
    assert torch.cuda.max_memory_allocated() < 4 * 2**30
    assert float(parts.total.detach()) == pytest.approx(float(exact.total.detach()), rel=1e-3)


# -- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_layers": 0}, "num_layers=0"),
        ({"block_size": 1}, "block_size=1"),
        ({"loss": "mse"}, "loss=mse"),
        ({"gamma": 0.0}, "gamma=0.0"),
        ({"pace": 0.5, "loss": "kl"}, "pace=0.5"),
        ({"pace": 1.0, "loss": "ce"}, "pace=1.0"),
        ({"head_dim": 3}, "head_dim=3"),
    ],
)
def test_bad_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DFlashTrainingOptions(**options)


@pytest.mark.parametrize("layers", [(LAYERS,), (-2, 0), (2, 1), (1, 1), ()])
def test_layers_the_target_lacks_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="capture_layers"):
        make_training(capture_layers=layers)


def test_the_mask_token_is_one_that_no_text_contains() -> None:
    tables = TokenTables(torch.zeros(VOCAB, WIDTH), torch.zeros(VOCAB, WIDTH))

    def mask(options: dict[str, Any], **facts: Any) -> int:
        head = DFlashTraining(DFlashTrainingOptions(**options))
        return head.config_for(make_facts(**facts), tables).mask_token_id

    assert mask({}) == 1
    assert mask({"mask_token_id": 7}) == 7
    assert mask({}, mask_token_id=None, num_token_ids=45) == 45
    with pytest.raises(ConfigError, match="mask_token_id must be given"):
        mask({}, mask_token_id=None)
    with pytest.raises(ConfigError, match="mask_token_id=50"):
        mask({"mask_token_id": VOCAB})


def test_sizes_follow_the_target() -> None:
    tables = TokenTables(torch.zeros(VOCAB, 256), torch.zeros(VOCAB, 256))
    config = DFlashTraining(DFlashTrainingOptions()).config_for(make_facts(hidden_size=256, num_layers=8), tables)
    assert (config.shape.num_heads, config.shape.num_kv_heads, config.shape.head_dim) == (4, 2, 64)
    assert config.max_drafts == 7
    for layers, captures in ((1, (1, 3, 5)), (3, (1, 3, 5)), (4, (1, 2, 4, 5))):
        head = DFlashTraining(DFlashTrainingOptions(num_layers=layers))
        assert head.config_for(make_facts(num_layers=8), tables).capture_layers == captures
