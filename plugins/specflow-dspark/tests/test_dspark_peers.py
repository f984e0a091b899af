"""The same numbers as the published implementations on checkpoints that they write.

DeepSpec (github.com/deepseek-ai/DeepSpec, on PYTHONPATH: it has no package) and `pip install speculators`.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from dspark_reference import block_states, corrected, greedy_drafts
from specflow_dspark.checkpoint import load_dspark
from torch import Tensor

from specflow.targets.base import TargetFacts, TokenTables

pytestmark = pytest.mark.peer
HIDDEN, VOCAB, LAYERS, BLOCK = 32, 97, 8, 5
CAPTURED = [1, 3, 6]
KINDS = ["vanilla", "gated", "rnn"]


def facts() -> TargetFacts:
    return TargetFacts(
        name="peer", architecture="Qwen3ForCausalLM", vocab_size=VOCAB, num_token_ids=VOCAB, hidden_size=HIDDEN,
        num_layers=LAYERS, max_model_len=64, eos_token_ids=(0,), dtype=torch.float32, num_parameters=1,
        checkpoint_hash="", kv_bytes_per_token=1,
    )  # fmt: skip


def qwen3(**options: Any) -> Any:
    from transformers import Qwen3Config

    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
    return Qwen3Config(vocab_size=VOCAB, hidden_size=HIDDEN, max_position_embeddings=64, **sizes, **options)


def spread(model: torch.nn.Module) -> None:
    draws = torch.Generator().manual_seed(0)
    for name, weight in model.named_parameters():
        weight.data.normal_(std=0.15, generator=draws)
        if name.endswith("norm.weight"):
            weight.data += 1


def features(count: int) -> Tensor:
    return torch.randn(count, len(CAPTURED), HIDDEN, generator=torch.Generator().manual_seed(1))


def close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_deepspecs(kind: str, tmp_path: Path) -> None:
    modeling = pytest.importorskip("deepspec.modeling.dspark.qwen3.modeling")
    building = pytest.importorskip("deepspec.modeling.dspark.qwen3.config")
    drafting = pytest.importorskip("deepspec.eval.dspark.draft_ops")

    class Arguments(dict):
        __getattr__ = dict.__getitem__

    arguments = Arguments(
        num_draft_layers=2, target_layer_ids=CAPTURED, confidence_head_alpha=1.0, confidence_head_with_markov=True,
        markov_rank=6, markov_head_type=kind, block_size=BLOCK, mask_token_id=96, num_anchors=4,
    )  # fmt: skip
    config = building.build_draft_config(qwen3(num_hidden_layers=LAYERS), arguments)
    config._attn_implementation = "sdpa"
    model = modeling.Qwen3DSparkModel(config).eval()
    spread(model)
    model.save_pretrained(tmp_path)
    known, anchor = features(9), 11
    ids = torch.full((1, BLOCK), 96)
    ids[0, 0] = anchor
    with torch.no_grad():
        # Without the cache of DeepSpec's own loop, which newer transformers refuse to crop.
        states = model._forward_backbone(
            position_ids=torch.arange(9 + BLOCK).unsqueeze(0),
            noise_embedding=model.embed_tokens(ids),
            target_hidden_states=known.flatten(1).unsqueeze(0),
            is_causal=False,
        )
        tokens, logits = model.sample_draft_tokens(
            model.compute_logits(states), first_prev_token_ids=ids[:, 0], hidden_states=states
        )
        proposal = drafting.build_dspark_proposal(
            model, draft_input_ids=ids, block_hidden=states, block_size=BLOCK, temperature=0.0, confidence_threshold=0.0
        )
    # DeepSpec ships frozen copies of the target's tables; lent ones are the same.
    tables = TokenTables(model.embed_tokens.weight.detach(), model.lm_head.weight.detach())
    for lent in (tables, None):
        loaded = load_dspark(tmp_path, facts(), lent, device=torch.device("cpu"), dtype=torch.float32)
        assert loaded.block.head.config.sample_from_anchor
        assert loaded.block.borrowed == (("embedding", "head") if lent else ())
        with torch.no_grad():
            ours, our_logits, confidence = greedy_drafts(loaded, known, anchor, BLOCK)
        assert ours.tolist() == tokens[0].tolist() == proposal.verify_input_ids[0, 1:].tolist()
        close(our_logits, logits[0])
        close(confidence, proposal.confidence_logits[0])


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(
    ("kind", "from_anchor"), [(kind, from_anchor) for kind in KINDS for from_anchor in (True, False)][:-1]
)
def test_logits_are_speculators(
    kind: str, from_anchor: bool, reduced: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through speculators' own training pass, whose blocks at random anchors are fed with the text's tokens."""
    core = pytest.importorskip("speculators.models.dspark.core")
    configs = pytest.importorskip("speculators.models.dspark.config")
    layers = qwen3(num_hidden_layers=2)
    layers._attn_implementation = "eager"
    said = torch.arange(0, VOCAB, 2) if reduced else torch.arange(VOCAB)
    config = configs.DSparkSpeculatorConfig(
        transformer_layer_config=layers, draft_vocab_size=len(said), block_size=BLOCK, mask_token_id=96,
        aux_hidden_state_layer_ids=[layer + 1 for layer in CAPTURED], sample_from_anchor=from_anchor, markov_rank=6,
        markov_head_type=kind,
    )  # fmt: skip
    model = core.DSparkDraftModel(config).eval()
    if reduced:
        known_ids = torch.zeros(VOCAB, dtype=torch.bool)
        known_ids[said] = True
        model.load_vocab_mappings(known_ids, said - torch.arange(len(said)))
    spread(model)
    model.save_pretrained(tmp_path)
    caught = SimpleNamespace()

    def backbone(self: Any, *args: Any, **kwargs: Any) -> Any:
        caught.rows = original(self, *args, **kwargs)
        return caught.rows

    def metrics(logits: Tensor, targets: Tensor, confidence: Tensor, *args: Any, **kwargs: Any) -> Any:
        caught.logits, caught.confidence = logits[0], confidence[0]
        return torch.zeros(()), {}

    original = core.DSparkDraftModel._backbone_forward
    monkeypatch.setattr(core.DSparkDraftModel, "_backbone_forward", backbone)
    monkeypatch.setattr(core, "compute_metrics", metrics)
    text = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(2))
    known = features(20)
    with torch.no_grad():
        model(
            known.flatten(1).unsqueeze(0), text, torch.ones_like(text), torch.randn(1, 20, HIDDEN),
            torch.zeros_like(text), torch.arange(20).unsqueeze(0), max_anchors=4,
        )  # fmt: skip
    tables = TokenTables(model.embed_tokens.weight.detach(), model.lm_head.weight.detach())
    loaded = load_dspark(tmp_path, facts(), tables, device=torch.device("cpu"), dtype=torch.float32)
    assert loaded.block.head.config.sample_from_anchor == from_anchor
    places = caught.rows[4].view(4, BLOCK)
    skipped = 0 if from_anchor else 1
    for block, anchor in enumerate(places[:, 0].tolist()):
        if anchor + BLOCK > 20:
            continue
        with torch.no_grad():
            states = block_states(loaded.block.head, known[:anchor], int(text[0, anchor]), BLOCK)
            ours, confidence = corrected(loaded, states, text[0, anchor : anchor + BLOCK - skipped])
        rows = slice(block * BLOCK + skipped, (block + 1) * BLOCK)
        close(ours, caught.logits[rows])
        close(confidence, caught.confidence[rows])
