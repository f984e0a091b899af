"""Held-out prompts: what the trainer measures on them, and what the engine does with the saved head."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from specflow.plugins.component import Kind
from specflow.training.closed_loop import Served, disagreement, held_out_prompts, proposer_node, serve
from specflow.training.documents import Document
from specflow.training.trainer import measure_documents
from specflow.training.training_parts import TrainingParts

__all__ = ["evaluate"]


def evaluate(parts: TrainingParts, folder: Path, head_is_trained: bool) -> tuple[dict[str, float], list[str]]:
    """Numbers by name, and sentences for people, warnings included.

    `held_out/…`: the head in memory on all held-out answers (left out unless `head_is_trained`); `served/…`: the same
    on the answers that the engine gets; `engine/…`: the head of `folder` in the engine.
    """
    options, documents = parts.options, parts.held_out.documents
    chosen = held_out_prompts(documents, options.evaluate_prompts, options.evaluate_tokens)
    trained: dict[str, float] = {}
    values: dict[str, float] = {}
    if head_is_trained:
        parts.head.module.eval()
        held_out = measure_documents(parts.head, documents, parts.online, options)
        trained = measure_documents(parts.head, chosen, parts.online, options)
        values = {f"held_out/{name}": value for name, value in held_out.items()}
        values |= {f"served/{name}": value for name, value in trained.items() if name.startswith("accuracy")}
    served = _serve(parts, folder, chosen)
    values |= {f"engine/{name}": value for name, value in served.metrics().items()}
    problem = disagreement(served, trained)
    values["engine/disagrees"] = float(problem is not None)
    lines = [f"held-out prompts in the engine: {_shown(values)}"]
    lines += [f"warning: {problem}"] if problem else []
    lines += [f"warning: {name}: {count} times" for name, count in served.incidents.items()]
    return values, lines


def _shown(values: Mapping[str, float]) -> str:
    """The engine's numbers, and beside them what training measured on the same answers."""
    if "engine/mean_acceptance_length" not in values:
        return "nothing was drafted"
    text = f"{values['engine/mean_acceptance_length']:.2f} tokens per round"
    if "engine/conditional_acceptance/0" in values:
        text += f", {values['engine/conditional_acceptance/0']:.0%} of the first drafts accepted"
    if "served/accuracy/0" in values:
        text += f" (accuracy in training {values['served/accuracy/0']:.0%})"
    return text


def _serve(parts: TrainingParts, folder: Path, documents: Sequence[Document]) -> Served:
    schema = parts.registry.get(Kind.PROPOSER, parts.method).load_options()
    node = proposer_node(parts.config["proposer"], schema, folder, parts.head.num_speculative_tokens)
    tokens = parts.options.evaluate_tokens
    return serve(parts.registry, node, parts.target, parts.build, parts.backend, documents, tokens)
