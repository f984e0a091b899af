"""Our heads, in our files, run by the speculators package: the same logits at every step of the unrolled head."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.heads.eagle3_helpers import VARIANTS, make_head, save_head
from tests.training.eagle3_helpers import make_batch, make_training

STEPS = 4


def load_peer(folder: Path) -> Any:
    """Their module from our folder; every tensor of ours must be one of theirs."""
    pytest.importorskip("speculators", reason="pip install --no-deps speculators==0.9.0 hs-connectors and their needs")
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    from speculators import SpeculatorModelConfig
    from speculators.models.eagle3 import Eagle3DraftModel

    config = SpeculatorModelConfig.from_pretrained(str(folder))
    config.transformer_layer_config._attn_implementation = "eager"
    model = Eagle3DraftModel(config).float().eval()
    weights = {
        name: value.float() if value.is_floating_point() else value
        for name, value in load_file(folder / "model.safetensors").items()
    }
    found = model.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys
    assert all(name.startswith("verifier") or name in ("d2t", "t2d") for name in found.missing_keys)
    return model


@pytest.mark.peer
@pytest.mark.parametrize("variant", list(VARIANTS))
def test_the_same_logits_as_speculators(tmp_path: Path, variant: str) -> None:
    head = make_head(**VARIANTS[variant])
    model = load_peer(save_head(tmp_path, head))
    captures = len(head.config.capture_layers)
    batch = make_batch([9, 7], captures=captures)
    logits: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: logits.append(output[0]))
    training = make_training(ttt_length=STEPS)
    training.module = head
    with torch.no_grad():
        ours = [head.logits(normed) for normed in training.unroll(batch)]
        shifted = batch.token_ids.roll(-1)
        model(batch.hidden.flatten(1)[None], shifted[None], batch.documents[None], ttt_steps=STEPS)
    assert len(logits) == STEPS
    for step in range(STEPS):
        for row in range(len(shifted)):
            same_document = row + 1 + step < len(shifted) and batch.documents[row + 1 + step] == batch.documents[row]
            if same_document:
                torch.testing.assert_close(logits[step][row], ours[step][row], atol=5e-5, rtol=1e-5)
