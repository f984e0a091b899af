"""A plan for vLLM as its command line."""

import json
import shlex
from collections.abc import Iterator
from typing import Any

from specflow.peers.vllm_plan import VllmPlan

__all__ = ["serve_text", "serve_words"]


def serve_words(plan: VllmPlan) -> list[str]:
    """The words of `vllm serve …`."""
    return ["vllm", "serve", plan.model, *(word for line in _lines(plan) for word in line)]


def serve_text(plan: VllmPlan) -> str:
    """The command as one can paste it, an argument a line."""
    first = shlex.join(["vllm", "serve", plan.model])
    return " \\\n".join([first, *(f"  {shlex.join(line)}" for line in _lines(plan))])


def _lines(plan: VllmPlan) -> Iterator[list[str]]:
    for name, value in plan.engine.items():
        yield _argument(name, value)
    if plan.speculative is not None:
        yield ["--speculative-config", json.dumps(plan.speculative)]


def _argument(name: str, value: Any) -> list[str]:
    flag = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{flag}" if value else f"--no-{flag}"]
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return [f"--{flag}", *map(str, value)]
    return [f"--{flag}", json.dumps(value) if isinstance(value, dict | list) else str(value)]
