"""The winner, ready to use: a file for Hydra and a command line."""

from collections.abc import Mapping
from typing import Any

import yaml

from specflow.plugins.component import Kind
from specflow.tuning.candidates import Composition
from specflow.tuning.summary import Recommendation

__all__ = ["command_of", "file_name", "yaml_of"]

_GROUPS = (Kind.TARGET, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND)
_OWN_WORDS = ("task", "proposer", "hydra.", "sweep.")  # of the command that tuned, and not of the one recommended


def file_name(recommendation: Recommendation, first: bool) -> str:
    """Name of the file without its ending; that of the first batch size is plain `recommended`."""
    return "recommended" if first else f"recommended_batch_{recommendation.best.batch_size}"


def yaml_of(recommendation: Recommendation, composition: Composition) -> str:
    """An experiment: `python -m specflow --config-dir FOLDER +experiment=recommended` runs it."""
    best, config = recommendation.best, composition.config
    defaults: list[Any] = [{f"override /{group}": config[group]["name"]} for group in map(str, _GROUPS)]
    values: dict[str, Any] = {}
    if recommendation.speculate:
        defaults.insert(0, {f"/{Kind.PROPOSER}": best.method})
        values[str(Kind.PROPOSER)] = _without_name(composition.proposer(best.method, best.num_speculative_tokens))
    for group in map(str, _GROUPS):
        if options := _without_name(config[group]):
            values[group] = options
    values["sampling"] = dict(config.get("sampling") or {})
    head = f"# @package _global_\n# {recommendation.sentence()}\n"
    return head + yaml.safe_dump({"defaults": defaults, **values}, sort_keys=False, allow_unicode=True)


def _without_name(node: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in node.items() if key != "name"}


def command_of(recommendation: Recommendation, composition: Composition, overrides: str) -> str:
    """The command that benchmarks the winner. overrides: the words of the command that tuned."""
    words = [word for word in overrides.split() if not word.lstrip("+~").startswith(_OWN_WORDS)]
    best = recommendation.best
    if recommendation.speculate:
        node = _without_name(composition.proposer(best.method, best.num_speculative_tokens))
        given = set(composition.options.options.get(best.method, {})) | {"num_speculative_tokens"}
        own = composition.config.get(Kind.PROPOSER) or {}
        if own.get("name") == best.method:
            given |= {key for key, value in own.items() if key == "path" and value is not None}
        words.append(f"+proposer={best.method}")
        words += [f"proposer.{key}={value}" for key, value in node.items() if key in given]
    words.append(f"task.batch_sizes=[{best.batch_size}]")
    return " ".join(["python -m specflow", *words])
