"""Text to train on: what the very target answers to the prompts, as the token ids it chose.

Nothing is tokenised again: a row holds the ids that went into the engine and the ids that came out, and where the
target's own begin. Rows are appended, and synchronised to the disk, when a request ends; a run that goes on skips the
ids that are there. So whatever ends a run, a row is whole or missing, and only the last line can be torn.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from specflow.capture.manifest import pin_settings, storage_error, write_atomically
from specflow.core.request import FinishReason
from specflow.core.sampling_params import SamplingParams, seeded
from specflow.engine.engine import Engine
from specflow.engine.outputs import RequestOutput
from specflow.errors import ConfigError, PromptError, StorageError
from specflow.targets.base import TargetFacts
from specflow.tracking.events import StepRecord
from specflow.workloads.base import Prompt
from specflow.workloads.turns import render_turn

__all__ = ["Response", "ResponseFile", "check_splits", "is_held_out", "regenerate"]

ROWS = "responses.jsonl"
SETTINGS = "responses.json"
Split = Literal["train", "held_out"]


@dataclass(frozen=True)
class Response:
    """One answer of the target, with all that it followed."""

    id: str  # of the prompt; later turns have `/turn-N` behind it
    token_ids: tuple[int, ...]  # prompt and answer, the end-of-text token included
    num_prompt_tokens: int  # ids before the target's own
    finish_reason: str
    temperature: float  # 0 = greedy
    split: Split
    text: str  # of the answer; what a next turn is rendered with
    chat: bool | None = None  # the prompt was rendered with a chat template; None = not noted

    def __post_init__(self) -> None:
        if not 0 < self.num_prompt_tokens < len(self.token_ids) or self.split not in ("train", "held_out"):
            raise ValueError(f"{self.num_prompt_tokens} prompt tokens of {len(self.token_ids)}, split {self.split!r}")


def is_held_out(prompt_id: str, share: float) -> bool:
    """Whether a prompt belongs to the held-out side: by a hash of its id alone, so that more prompts move nobody."""
    number = int.from_bytes(hashlib.sha256(prompt_id.encode()).digest()[:8], "big")
    return number < share * 2**64


class ResponseFile:
    """The rows of a folder, in the order they were finished."""

    def __init__(self, folder: Path, settings: Mapping[str, Any] | None = None) -> None:
        """Read what is there. With `settings` the folder is opened for writing: a torn last line is removed.

        Raises `ConfigError` for a folder begun with other settings, `StorageError` for a damaged row.
        """
        self.path = folder / ROWS
        try:
            if settings is not None:
                folder.mkdir(parents=True, exist_ok=True)
                pin_settings(folder / SETTINGS, settings, f"{folder} holds responses made")
            content = self.path.read_bytes() if self.path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            if settings is not None and whole != content:
                write_atomically(self.path, whole)
        except OSError as error:
            raise storage_error(error, folder) from error
        self.rows = {row.id: row for row in _parse(whole, self.path)}

    def add(self, row: Response) -> None:
        """Append a row and wait until the disk has it. Raises `StorageError`."""
        try:
            with self.path.open("ab") as file:
                file.write((json.dumps(asdict(row), ensure_ascii=False) + "\n").encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise storage_error(error, self.path.parent, len(self.rows)) from error
        self.rows[row.id] = row


def _parse(content: bytes, path: Path) -> Iterable[Response]:
    for number, line in enumerate(content.split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
            yield Response(**{**row, "token_ids": tuple(row["token_ids"])})
        except (ValueError, TypeError, KeyError) as error:
            raise StorageError(
                f"{path}:{number} is damaged ({error}). Delete this line and run task.stage=regenerate again: only its "
                "prompt is redone."
            ) from None


def regenerate(
    engine: Engine,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    file: ResponseFile,
    *,
    temperatures: Sequence[float],
    held_out: float,
    seed: int,
    on_step: Callable[[StepRecord], None] | None = None,
) -> int:
    """Let the target answer every turn that has no row yet; returns how many prompts were too long for its context.

    Turn t of all conversations runs together, and later turns follow the target's own earlier answers. Answer i of a
    turn is sampled at temperature i modulo their number, all else as `sampling` says.
    Raises `PromptError` when no prompt is short enough.
    """
    conversations: list[list[dict[str, str]]] = [[] for _ in prompts]
    skipped: set[int] = set()
    for turn in range(max(len(prompt.turns) for prompt in prompts)):
        pending: dict[str, _Pending] = {}
        for index, prompt in enumerate(prompts):
            if turn >= len(prompt.turns) or index in skipped:
                continue
            messages = render_turn(prompt, turn, conversations[index])
            name = _row_id(prompt, turn)
            own = replace(sampling, temperature=temperatures[index % len(temperatures)]) if temperatures else sampling
            own = seeded(own, seed, index + turn * len(prompts))
            ids = engine.make_request(name, messages, own, False).prompt_ids
            if name in file.rows:
                _check_prompt(file, name, ids)
                continue
            if len(ids) + sampling.max_tokens > engine.limits.max_model_len:
                skipped.add(index)
                continue
            split: Split = "held_out" if is_held_out(prompt.id, held_out) else "train"
            pending[name] = _Pending(ids, own, split, prompt.chat)
        _run(engine, pending, file, on_step)
        for index, prompt in enumerate(prompts):
            name = _row_id(prompt, turn)
            if name in file.rows:
                conversations[index].append({"role": "assistant", "content": file.rows[name].text})
            else:
                skipped.add(index)  # without its answer there is no next turn
    if not file.rows:
        raise PromptError(
            f"none of the {len(prompts)} prompts leaves room for an answer of {sampling.max_tokens} tokens in a "
            f"context of {engine.limits.max_model_len}. Lower task.response_tokens or raise scheduler.max_model_len."
        )
    return len(skipped)


def _row_id(prompt: Prompt, turn: int) -> str:
    return f"{prompt.id}/turn-{turn + 1}" if turn else prompt.id


def _check_prompt(file: ResponseFile, name: str, prompt_ids: Sequence[int]) -> None:
    row = file.rows[name]
    if row.token_ids[: row.num_prompt_tokens] != tuple(prompt_ids):
        raise ConfigError(
            f"{file.path} holds an answer to another prompt under the id {name!r} than the workload has now. Choose "
            "another folder with task.output=FOLDER, or use the same workload."
        )


@dataclass(frozen=True)
class _Pending:
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    split: Split
    chat: bool


def _run(
    engine: Engine,
    pending: Mapping[str, _Pending],
    file: ResponseFile,
    on_step: Callable[[StepRecord], None] | None,
) -> None:
    def keep(output: RequestOutput) -> None:
        if output.finish_reason is FinishReason.ABORT or not output.token_ids:
            return
        asked = pending[output.request_id]
        ids = (*output.prompt_ids, *output.token_ids)
        file.add(
            Response(
                id=output.request_id,
                token_ids=ids,
                num_prompt_tokens=len(output.prompt_ids),
                finish_reason=str(output.finish_reason),
                temperature=asked.sampling.temperature,
                split=asked.split,
                text=output.text,
                chat=asked.chat,
            )
        )

    engine.generate(
        [one.prompt_ids for one in pending.values()],
        [one.sampling for one in pending.values()],
        speculate=False,
        concurrency=engine.limits.max_num_seqs,
        request_ids=list(pending),
        on_step=on_step,
        on_finish=keep,
    )


def check_target(folder: Path, known: TargetFacts) -> None:
    """Raise `ConfigError` when the responses were written by another target."""
    made = json.loads((folder / SETTINGS).read_text())
    if made["target_hash"] != known.checkpoint_hash:
        raise ConfigError(
            f"{folder} holds responses of target {made['target']!r} (weights {made['target_hash']}), and this is "
            f"{known.name!r} (weights {known.checkpoint_hash}): a head learns nothing of use from another model's "
            "answers. Choose another folder with task.output=FOLDER."
        )


def check_splits(rows: Iterable[Response], held_out: float) -> None:
    """Raise `ConfigError` when either side of the split is empty."""
    splits = [row.split for row in rows]
    for split in ("train", "held_out"):
        if split not in splits:
            raise ConfigError(
                f"none of the {len(splits)} responses is on the {split} side: give more prompts, or change "
                f"task.held_out={held_out:g} (in another folder, task.output=FOLDER)."
            )
