"""The trained head in the real engine: what it is worth, and whether training measured the same thing.

A head can look good to its trainer and draft nothing when it is served: another mask, positions or labels one off, a
table left out. So the saved files are loaded by the proposer that will run them, held-out prompts are decoded, and the
acceptance of the first draft is set beside the accuracy that the trainer measured on the very same answers.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from specflow.backends.base import Backend
from specflow.core.sampling_params import SamplingParams
from specflow.engine.engine import Engine
from specflow.errors import ConfigError
from specflow.metrics.acceptance import AcceptanceCounts
from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry
from specflow.tracking.events import StepRecord
from specflow.training.documents import Document
from specflow.training.resident_target import ResidentTarget

__all__ = ["Served", "disagreement", "held_out_prompts", "proposer_node", "serve"]

# The trainer averages over all positions, the engine over those where rounds begin, which are harder by some points;
# a mask or a label that is wrong costs tens of points.
_TOLERANCE = 0.12
_LEAST_ROUNDS = 50  # fewer say too little


@dataclass(frozen=True)
class Served:
    """What the engine measured with the head."""

    acceptance: AcceptanceCounts
    output_tokens: int
    seconds: float
    incidents: Mapping[str, int]

    def metrics(self) -> dict[str, float]:
        """Numbers for curves and trackers, by the names that training uses for the same positions."""
        counts = self.acceptance
        found = {"output_tokens": float(self.output_tokens), "rounds": float(counts.num_rounds)}
        if counts.mean_acceptance_length is not None:
            found["mean_acceptance_length"] = counts.mean_acceptance_length
        for position, rate in enumerate(counts.per_position_conditional):
            if rate is not None:
                found[f"conditional_acceptance/{position}"] = rate
        for position, share in enumerate(counts.per_position_unconditional):
            found[f"unconditional_acceptance/{position}"] = share
        return found


def proposer_node(node: Mapping[str, Any], schema: type, folder: Path, length: int | None) -> dict[str, Any]:
    """The proposer's configuration with the head of a folder in it, drafting `length` tokens (None: as configured).

    Raises `ConfigError` for a proposer that takes no path.
    """
    names = {field.name for field in fields(schema)}
    if "path" not in names:
        raise ConfigError(f"proposer={node['name']} has no option `path`, so it cannot load a head that was trained.")
    filled = {**node, "path": str(folder)}
    if length is not None and "num_speculative_tokens" in names:
        filled["num_speculative_tokens"] = length
    return filled


def held_out_prompts(documents: Sequence[Document], count: int, tokens: int) -> list[Document]:
    """Greedy held-out answers cut after `tokens` tokens of their own; sampled ones where no answer was greedy."""
    greedy = [document for document in documents if document.temperature == 0]
    chosen = (greedy or list(documents))[:count]
    return [document.cut(document.num_prompt_tokens + tokens) for document in chosen]


def serve(
    registry: Registry,
    node: Mapping[str, Any],
    target: ResidentTarget,
    build: Callable[[Kind], Any],
    backend: Backend,
    documents: Sequence[Document],
    tokens: int,
    on_step: Callable[[StepRecord], None] | None = None,
) -> Served:
    """Decode the prompts of the documents greedily with the proposer of `node`; the target is free again afterwards."""
    proposer = registry.get(Kind.PROPOSER, str(node["name"])).build(node)
    counts = AcceptanceCounts()

    def count(record: StepRecord) -> None:
        counts.add_all(record.drafted, record.accepted)
        if on_step is not None:
            on_step(record)

    try:
        engine = Engine(target, proposer, build(Kind.SAMPLER), build(Kind.SCHEDULER), backend)
        begun = time.perf_counter()
        outputs = engine.generate(
            [document.ids[: document.num_prompt_tokens] for document in documents],
            SamplingParams(max_tokens=tokens),
            concurrency=engine.limits.max_num_seqs,
            request_ids=[document.id for document in documents],
            on_step=count,
        )
        seconds = time.perf_counter() - begun
        return Served(counts, sum(len(output.token_ids) for output in outputs), seconds, engine.incidents)
    finally:
        target.release()


def disagreement(served: Served, trained: Mapping[str, float]) -> str | None:
    """A sentence when the engine accepts far fewer first drafts than the trainer's accuracy promises, else None.

    trained: means of the head's measures on the documents that were served.
    """
    promised = trained.get("accuracy/0")
    counts = served.acceptance
    if promised is None or 0 < counts.num_rounds < _LEAST_ROUNDS:
        return None
    rate = (counts.per_position_conditional[0] or 0.0) if counts.num_rounds else 0.0
    if promised - rate <= _TOLERANCE:
        return None
    return (
        f"the engine accepts {rate:.0%} of the first drafts, but training measured an accuracy of {promised:.0%} on "
        "the same answers: the head is run otherwise than it is trained (mask, positions, labels, tables)."
    )
