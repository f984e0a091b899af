"""`task=export`: the composition as a command for a production server, or the reasons why it has none.

Nothing is loaded. The command goes to the terminal, to `vllm-serve.sh` and, with all the rest, to `vllm.json` of the
run's folder, which the tracker takes along.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specflow.errors import StorageError
from specflow.options import build_options
from specflow.peers.fates import OptionFate
from specflow.peers.vllm_command import serve_text, serve_words
from specflow.peers.vllm_options import VllmOptions
from specflow.peers.vllm_plan import VllmPlan, plan_vllm
from specflow.plugins.component import Kind
from specflow.tasks.base import Task, TaskContext
from specflow.tracking.events import RunFinished

__all__ = ["ExportOptions", "ExportTask", "description"]

SCRIPT_FILE, JSON_FILE = "vllm-serve.sh", "vllm.json"
_SCHEMA = 1  # of vllm.json


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Options of `task=export`."""

    strict: bool = False  # fail as well when an option means something else there


class ExportTask(Task):
    """Says what a composition is called in vLLM, option by option."""

    name = "export"
    needs = (Kind.TARGET, Kind.PROPOSER, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND, Kind.ENGINE)

    def __init__(self, options: ExportOptions) -> None:
        self.options = options

    def run(self, context: TaskContext) -> RunFinished:
        """See `Task.run`. A composition that vLLM cannot run ends as failed, with every reason."""
        assert context.registry is not None
        plan = plan_vllm(context.config, context.registry, _engine_options(context.config))
        refused = plan.impossible + (plan.fates.of("differs") if self.options.strict else [])
        _save(context.output_dir, plan, refused)
        _show(plan, refused, context.output_dir, Console())
        if not refused:
            return RunFinished("finished")
        lines = [one.sentence() for one in refused]
        return RunFinished("failed", "\n".join(["vLLM cannot run this composition as it is:", *lines]))


def _engine_options(config: Mapping[str, Any]) -> VllmOptions:
    """What `engine=vllm` says of GPUs and memory; the defaults for any other engine."""
    node = config.get(Kind.ENGINE) or {}
    return build_options(VllmOptions, node, "engine") if node.get("name") == "vllm" else VllmOptions()


def description(plan: VllmPlan, refused: Sequence[OptionFate]) -> dict[str, Any]:
    """The plan for a program: the content of vllm.json."""
    return {
        "schema": _SCHEMA,
        "server": "vllm",
        "supported": not refused,
        "reasons": [one.sentence() for one in refused],
        "command": serve_words(plan) if not refused else None,
        "model": plan.model,
        "engine_args": plan.engine,
        "speculative_config": plan.speculative,
        "request": plan.request,
        "needs": plan.needs,
        "notes": plan.notes,
        "options": [vars(one) for one in plan.fates.every],
    }


def _save(folder: Path, plan: VllmPlan, refused: Sequence[OptionFate]) -> None:
    files = {JSON_FILE: json.dumps(description(plan, refused), indent=1, ensure_ascii=False, default=str) + "\n"}
    if not refused:
        needs = [f"# needs: pip install {package}" for package in plan.needs]
        files[SCRIPT_FILE] = "\n".join(["#!/bin/sh", *needs, f"exec {serve_text(plan)}", ""])
    try:
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        if not refused:
            (folder / SCRIPT_FILE).chmod(0o755)
    except OSError as error:
        raise StorageError(f"cannot write the export: {error.filename}: {error.strerror or error}") from error


def _show(plan: VllmPlan, refused: Sequence[OptionFate], folder: Path, console: Console) -> None:
    def say(text: str, style: str = "") -> None:
        console.print(Text(text, style=style), soft_wrap=True)

    if not refused:
        say(serve_text(plan), "bold")
        say(f"\nin each request: {json.dumps(plan.request, default=str)}")
    for package in plan.needs:
        say(f"needs: pip install {package}")
    for title, fate, style in (
        ("vLLM does something else:", "differs", "yellow"),
        ("no counterpart, left out:", "left out", "dim"),
    ):
        found = [one for one in plan.fates.of(fate) if one not in refused]  # type: ignore[arg-type]
        if found:
            say(f"\n{title}", style)
            for one in found:
                say(f"  {one.sentence()}", style)
    for note in plan.notes:
        say(f"note: {note}", "dim")
    say(f"\nsaved: {folder / (JSON_FILE if refused else SCRIPT_FILE)}")
