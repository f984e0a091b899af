"""The stages of training a head, each of which goes on where it stopped.

regenerate   prompts of the workload -> the target's own answers (responses.jsonl)
capture      answers -> hidden states on the disk (hidden/), only with task.capture=offline
train        answers and hidden states -> checkpoints/step_N, curve.jsonl, head/
evaluate     head/ in the engine on held-out prompts -> training.json
"""

import dataclasses
import json
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from specflow.checkpoints.trained_on import note_trained_on_chat
from specflow.engine.engine import Engine
from specflow.errors import ConfigError
from specflow.plugins.component import Kind
from specflow.tracking.events import StepRecord
from specflow.training import responses
from specflow.training.evaluation import evaluate
from specflow.training.hidden_checks import check_sample
from specflow.training.hidden_provider import HiddenProvider, HybridProvider, StoredProvider
from specflow.training.responses import ResponseFile
from specflow.training.run_card import CurveFile, read_card, read_curve, write_card
from specflow.training.trainer import Listener, Trainer
from specflow.training.training_parts import TrainingParts
from specflow.workloads.prompt_list import fit_template

__all__ = ["Display", "TrainingRun"]

_SAMPLED_FOR_CHECKS = 6


class Display(Protocol):
    """Whoever shows how far a stage is."""

    def progress(self, stage: str, done: int, total: int, text: str = "") -> None:
        """A stage has done so much."""

    def say(self, line: str) -> None:
        """Something to read."""

    def points(self, step: int, values: Mapping[str, float]) -> None:
        """Points of curves."""


@dataclass
class TrainingRun:
    """One run of `task=train` in one process."""

    parts: TrainingParts
    display: Display
    seconds: dict[str, float] = field(default_factory=dict, init=False)  # by stage
    metrics: dict[str, float] = field(default_factory=dict, init=False)

    # -- stages ----------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Do the stages that were asked for."""
        parts = self.parts
        parts.target.load(parts.backend)
        self._check_card()
        if parts.options.stage in ("all", "regenerate"):
            parts.check_head()
        stages = {
            "regenerate": self._regenerate,
            "capture": self._capture,
            "train": self._train,
            "evaluate": self._evaluate,
        }
        chosen = list(stages) if parts.options.stage == "all" else [parts.options.stage]
        for stage in chosen:
            begun = time.perf_counter()
            stages[stage]()
            parts.processes.wait()
            self.seconds[stage] = time.perf_counter() - begun
            self.metrics[f"{stage}/seconds"] = self.seconds[stage]
        if parts.processes.first and {"train", "evaluate"} & set(chosen):
            self._write_card()

    def _regenerate(self) -> None:
        parts, options = self.parts, self.parts.options
        if not parts.processes.first:
            return
        workload = parts.build(Kind.WORKLOAD)
        prompts = workload.load()
        sampling = parts.response_sampling()
        file = ResponseFile(parts.output, parts.response_settings(sampling))
        there, tokens, begun = len(file.rows), 0, time.perf_counter()
        engine = Engine(parts.target, None, parts.build(Kind.SAMPLER), parts.build(Kind.SCHEDULER), parts.backend)
        prompts, note = fit_template(workload, prompts, bool(getattr(parts.target.tokenizer, "chat_template", None)))
        turns = sum(len(prompt.turns) for prompt in prompts)

        def on_step(record: StepRecord) -> None:
            nonlocal tokens
            tokens += record.num_emitted
            speed = tokens / max(1e-9, time.perf_counter() - begun)
            self.display.progress("regenerate", len(file.rows), turns, f"{speed:,.0f} tokens/s")

        try:
            skipped = responses.regenerate(
                engine,
                prompts,
                sampling,
                file,
                temperatures=options.response_temperatures,
                held_out=options.held_out,
                seed=options.seed,
                on_step=on_step,
            )
        finally:
            parts.target.release()
        self.metrics["regenerate/tokens"] = float(tokens)
        self.metrics["regenerate/tokens_per_second"] = tokens / max(1e-9, time.perf_counter() - begun)
        lines = [note] if note else []
        if skipped:
            lines.append(f"{skipped} prompts left no room for an answer in the context, or came after one that did not")
        lines.append(f"{len(file.rows):,} responses ({there:,} were there), {tokens:,} new tokens: {file.path}")
        for line in lines:
            self.display.say(f"regenerate: {line}")

    def _capture(self) -> None:
        parts = self.parts
        if parts.options.capture != "offline":
            if parts.options.stage == "capture":
                raise ConfigError(
                    f"task.stage=capture stores hidden states, and task.capture={parts.options.capture} does so while "
                    "training or not at all: set task.capture=offline."
                )
            return
        if not parts.processes.first:
            return
        documents = parts.documents.documents
        writer = HybridProvider(parts.hidden_folder, parts.online, parts.target.facts, parts.taps)
        try:
            for done in writer.capture(documents):
                self.display.progress("capture", done, len(documents))
        finally:
            writer.close()
        size = sum(file.stat().st_size for file in parts.hidden_folder.glob("*.safetensors"))
        self.display.say(f"capture: hidden states of {len(documents):,} responses, {size / 2**20:,.0f} MiB")

    def _train(self) -> None:
        parts = self.parts
        provider = parts.provider()
        try:
            trainer = parts.trainer(provider)
            if trainer.step == 0:
                self._check_data(provider)
            curve = CurveFile(parts.output, trainer.step) if parts.processes.first else None
            trainer.listener = self._listener(trainer, curve)
            self._announce(trainer)
            trainer.run()
        finally:
            if isinstance(provider, HybridProvider):
                provider.close()
        if parts.processes.first:
            self._export()
        self.metrics["parameters"] = float(sum(value.numel() for value in parts.head.module.parameters()))
        self.metrics["train/tokens"] = float(trainer.tokens)
        self.metrics["train/step_seconds"] = trainer.seconds / max(1, trainer.step)

    def _evaluate(self) -> None:
        parts = self.parts
        if not parts.processes.first:
            return
        if not (parts.head_folder / "config.json").exists():
            raise ConfigError(f"{parts.head_folder} holds no trained head: run task.stage=train first.")
        trainer = parts.trainer(parts.online)
        values = self._measure(trainer.step, parts.head_folder, trainer.step > 0)
        if trainer.step:
            CurveFile(parts.output, trainer.step).add(trainer.step, values)
        self.metrics |= values

    # -- training --------------------------------------------------------------------------------------------------
    def _check_data(self, provider: HiddenProvider) -> None:
        """Look at hidden states before the first step. Raises `CaptureError` naming a response."""
        parts = self.parts
        documents = parts.documents.documents
        if isinstance(provider, StoredProvider) and parts.processes.first:
            provider.verify(documents)
        # What a hybrid run stores are the states of its own steps, not those of this sample.
        source = parts.online if isinstance(provider, HybridProvider) else provider
        for document in documents[:: max(1, len(documents) // _SAMPLED_FOR_CHECKS)][:_SAMPLED_FOR_CHECKS]:
            check_sample([document], source.states([document]), parts.taps, parts.tables, parts.target.model)

    def _announce(self, trainer: Trainer) -> None:
        data, options = self.parts.documents, self.parts.options
        held_out = len(self.parts.held_out.documents)
        notes = [
            f"{len(data.documents):,} responses with {data.num_tokens:,} tokens, {trainer.steps:,} steps; "
            f"{held_out:,} responses are held out"
        ]
        if data.num_cut:
            notes.append(f"{data.num_cut:,} responses are cut to {options.pack_length} tokens")
        if data.num_dropped:
            notes.append(f"{data.num_dropped:,} with fewer than 2 tokens of the target's own are left out")
        if trainer.step:
            notes.append(f"going on after step {trainer.step:,}")
        for note in notes:
            self.display.say(f"train: {note}")

    def _listener(self, trainer: Trainer, curve: CurveFile | None) -> Listener:
        if curve is None:
            return Listener()
        text = ""

        def point(step: int, values: Mapping[str, float]) -> None:
            nonlocal text
            curve.add(step, values)
            self.display.points(step, values)
            self.metrics |= values
            text = f"loss {values['train/loss']:.3f}, {values['train/tokens_per_second']:,.0f} tokens/s"

        def evaluate_now(step: int) -> None:
            with tempfile.TemporaryDirectory(dir=self.parts.output, prefix=".evaluation-") as folder:
                self.parts.head.save(Path(folder))
                curve.add(step, self._measure(step, Path(folder), True))

        return Listener(
            on_step=lambda step: self.display.progress("train", step, trainer.steps, text),
            on_point=point,
            evaluate=evaluate_now,
        )

    def _measure(self, step: int, folder: Path, head_is_trained: bool) -> dict[str, float]:
        """Evaluate the head of a folder, and tell what came out."""
        values, lines = evaluate(self.parts, folder, head_is_trained)
        for line in lines:
            self.display.say(f"evaluate, step {step:,}: {line}")
        self.display.points(step, values)
        return values

    def _export(self) -> None:
        """Save the head under its final name, whole or not at all."""
        final = self.parts.head_folder
        partial = final.with_name("head.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        self.parts.head.save(partial)
        if (chat := self.parts.trained_on_chat) is not None:
            note_trained_on_chat(partial, chat)
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        self.display.say(f"train: head saved in {final}")

    # -- the card --------------------------------------------------------------------------------------------------
    def _check_card(self) -> None:
        """Refuse to go on with a head that was trained for another target."""
        card, known = read_card(self.parts.output), self.parts.target.facts
        if card and card["target"]["hash"] != known.checkpoint_hash:
            raise ConfigError(
                f"{self.parts.output} holds a head for target {card['target']['name']!r} (weights "
                f"{card['target']['hash']}), and this is {known.name!r} (weights {known.checkpoint_hash}). Choose "
                "another folder with task.output=FOLDER, or that target."
            )

    def _write_card(self) -> None:
        parts = self.parts
        before = read_card(parts.output) or {}
        known, data = parts.target.facts, parts.documents
        card = {
            "method": parts.method,
            "head_options": dict(parts.options.head),
            "target": {"name": known.name, "hash": known.checkpoint_hash, "layers": list(parts.taps.layers)},
            "data": {
                "hash": parts.settings["data_hash"],
                "responses": len(data.documents),
                "held_out_responses": len(parts.held_out.documents),
                "tokens": data.num_tokens,
                "cut": data.num_cut,
                "dropped": data.num_dropped,
                "made": json.loads((parts.output / responses.SETTINGS).read_text()),
            },
            "options": dataclasses.asdict(parts.options),
            "processes": parts.processes.size,
            "device": parts.backend.describe(),
            "seconds": {**before.get("seconds", {}), **self.seconds},
            "metrics": {**before.get("metrics", {}), **self.metrics},
            "curve": read_curve(parts.output),
        }
        write_card(parts.output, card)
