"""What the method becomes in vLLM, through the package's own hook."""

from pathlib import Path
from typing import Any

import pytest

from specflow.composition import composer, plain_config
from specflow.peers.vllm_plan import plan_vllm
from specflow.plugins.registry import load_plugins


def fields(*words: str) -> tuple[dict[str, Any], dict[str, str]]:
    """vLLM's speculative_config, and the fate of every option of the proposer."""
    registry = load_plugins()
    with composer(registry) as found:
        config = plain_config(found.compose(["+proposer=dspark", "target=hf", "target.path=owner/name", *words]))
    plan = plan_vllm(config, registry)
    assert plan.speculative is not None
    return plan.speculative, {one.option: one.fate for one in plan.fates.every}


def test_a_head_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"block_size": 7, "markov_rank": 8}')
    found, fates = fields(f"proposer.path={tmp_path}")
    assert found["method"] == "dspark"
    assert found["num_speculative_tokens"] == 7
    assert found["enable_adaptive_verification"] is True
    assert fates["proposer.prefix_selection"] == "differs"
    assert fates["proposer.round_cost"] == "left out"


@pytest.mark.parametrize("selection", ["threshold", "all"])
def test_without_selection_by_cost(selection: str, tmp_path: Path) -> None:
    words = f"proposer.path={tmp_path}", "proposer.num_speculative_tokens=5", f"proposer.prefix_selection={selection}"
    found, _ = fields(*words)
    assert "enable_adaptive_verification" not in found


def test_the_head_inside_the_package_is_nothing_to_deploy() -> None:
    assert fields("proposer.num_speculative_tokens=5")[1]["proposer.path"] == "impossible"
