"""DSpark in vLLM: a DFlash block with heads that vLLM knows as well."""

from collections.abc import Mapping
from typing import Any

from specflow.peers.fates import OptionFates
from specflow.peers.vllm_methods import Writer, dflash_config
from specflow_dspark.proposer import DSparkOptions


def vllm_method(_options: DSparkOptions) -> Writer:
    """The fields of vLLM's `speculative_config`, as vLLM 0.32 has them."""
    return _write


def _write(options: Mapping[str, Any], dtype: str, fates: OptionFates) -> dict[str, Any]:
    config = dflash_config({**options, "path": options["path"] or ""}, dtype, fates)
    if options["path"] is None:
        fates.add("proposer.path", None, "impossible", "the head inside the plugin's package: name a folder or hub id")
    adaptive = options["prefix_selection"] == "cost"
    text = "speculative_config.enable_adaptive_verification: by the confidence head as well, with vLLM's own cost"
    if options["prefix_selection"] == "threshold":
        text = "vLLM chooses by its own cost or submits every draft; the output is the same"
    fates.add("proposer.prefix_selection", options["prefix_selection"], "differs", text)
    own = dict.fromkeys(("threshold", "verify_costs", "round_cost"), "of specflow's prefix selection")
    fates.leave_out("proposer", options, own)
    return config | {"enable_adaptive_verification": adaptive or None}
