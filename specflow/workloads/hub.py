"""Data sets from the hub, through the optional library `datasets`."""

from collections.abc import Iterator, Mapping
from typing import Any

from specflow.errors import ConfigError, PromptError

__all__ = ["read_hub"]


def read_hub(
    hub_id: str, config: str | None, split: str, revision: str | None = None
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """("HUB_ID SPLIT row N", row) for every row. Raises `ConfigError` without the library, else `PromptError`."""
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"workload.hub_id={hub_id}: data sets from the hub need the library `datasets`. "
            "Install specflow[hub], or give a local file: workload.path=FILE.jsonl"
        ) from None
    try:
        rows = datasets.load_dataset(hub_id, config, split=split, revision=revision)
    except Exception as error:  # the library raises many kinds: no network, no such id, no such split, …
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise PromptError(
            f"the data set {hub_id} could not be loaded from the hub: {reason}\n"
            "Check the id and the network, or give a local file: workload.path=FILE.jsonl"
        ) from error
    for number, row in enumerate(rows):
        yield f"{hub_id} {split} row {number}", row
