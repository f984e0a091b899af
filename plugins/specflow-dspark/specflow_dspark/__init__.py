"""DSpark for specflow. Nothing heavy is imported here: the method is, when it is chosen."""

from pathlib import Path

from specflow.plugins import Component, hookimpl

_SUMMARY = "a block of drafts in one pass, joined by a Markov head and cut by a confidence head"


@hookimpl
def specflow_proposers() -> list[Component]:
    """The drafting method."""
    module = f"{__name__}.proposer"
    return [Component("dspark", f"{module}:DSparkProposer", f"{module}:DSparkOptions", _SUMMARY)]


@hookimpl
def specflow_trainable_heads() -> list[Component]:
    """Its training, for `task=train +proposer=dspark`."""
    module = f"{__name__}.training"
    summary = "DFlash-style block with a Markov and a confidence head"
    return [Component("dspark", f"{module}:DSparkTraining", f"{module}:DSparkTrainingOptions", summary)]


@hookimpl
def specflow_vllm_methods() -> list[Component]:
    """What it is in vLLM, for `task=export` and `engine=vllm`."""
    return [Component("dspark", f"{__name__}.export:vllm_method", f"{__name__}.proposer:DSparkOptions", _SUMMARY)]


@hookimpl
def specflow_config_dirs() -> list[Path]:
    """The folder with proposer/dspark.yaml and the training recipes."""
    return [Path(__file__).parent / "conf"]
