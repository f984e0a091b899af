"""What this package adds to specflow. Nothing heavy is imported here: the method is, when it is chosen."""

from pathlib import Path

from specflow.plugins import Component, hookimpl


@hookimpl
def specflow_proposers() -> list[Component]:
    """One drafting method."""
    module = f"{__name__}.proposer"
    summary = "repeats what followed a phrase, the prompt first"
    return [Component("phrase_lookup", f"{module}:PhraseLookupProposer", f"{module}:PhraseLookupOptions", summary)]


@hookimpl
def specflow_config_dirs() -> list[Path]:
    """The folder with proposer/phrase_lookup.yaml."""
    return [Path(__file__).parent / "conf"]
