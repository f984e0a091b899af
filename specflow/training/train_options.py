"""The settings of `task=train`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specflow.errors import ConfigError

__all__ = ["TrainOptions"]


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of `task=train`. Raises `ConfigError` on construction when they cannot work."""

    head: Mapping[str, Any] = field(default_factory=dict)  # options of the head, checked against its own schema
    stage: Literal["all", "regenerate", "capture", "train", "evaluate"] = "all"  # each goes on where it stopped
    output: str | None = None  # folder of all results, relative to the launch folder; None = runs/train/METHOD
    capture: Literal["online", "offline", "hybrid"] = "online"  # target states: anew each time, or read from files

    response_tokens: int = 256  # most tokens of an answer that the target writes
    response_temperatures: tuple[float, ...] = (0.0, 0.8)  # answer i is sampled at number i; () = sampling.temperature
    held_out: float = 0.05  # share of the prompts, chosen by their ids, that training never sees

    steps: int | None = None  # optimiser steps; None = as many as `epochs` take
    epochs: float = 3.0  # passes over the answers
    pack_length: int = 2048  # tokens of a pack; longer documents are cut
    packs_per_step: int = 4  # packs of one optimiser step, over all processes
    learning_rate: float = 6e-4  # peak rate of AdamW
    warmup: float = 0.04  # share of the steps in which the rate rises to the peak
    final_rate_fraction: float = 0.0  # where the cosine fall ends, as a fraction of the peak
    weight_decay: float = 0.0  # decoupled decay of all matrices (not of norms)
    beta1: float = 0.9  # decay rate of AdamW's first moment
    beta2: float = 0.95  # decay rate of AdamW's second moment
    gradient_clip: float = 1.0  # largest norm of the whole gradient
    bf16: bool = True  # matrix products in bfloat16; weights, gradients and moments stay float32
    recompute: bool = False  # compute the head's layers again in the backward pass: slower, less memory
    seed: int = 0  # of initial weights, order of the documents and everything random in a head
    forward_tokens: int = 16384  # most tokens, padding included, that the target processes at once

    log_every: int = 10  # steps between points of the curves
    evaluate_every: int = 250  # steps between measurements on held-out prompts; 0 = only at the end
    evaluate_prompts: int = 16  # held-out prompts that the engine runs with the head
    evaluate_tokens: int = 96  # tokens of each
    checkpoint_every: int = 100  # steps between checkpoints
    keep: int = 2  # checkpoints that stay, the newest ones

    def __post_init__(self) -> None:
        for name in ("response_tokens", "pack_length", "packs_per_step", "forward_tokens", "log_every", "keep"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        for name in ("checkpoint_every", "evaluate_prompts", "evaluate_tokens"):
            _check(getattr(self, name) >= 1, name, getattr(self, name), "1 or more")
        _check(self.evaluate_every >= 0, "evaluate_every", self.evaluate_every, "0 (only at the end) or more")
        _check(self.steps is None or self.steps >= 1, "steps", self.steps, "1 or more, or null to count epochs")
        _check(self.epochs > 0, "epochs", self.epochs, "above 0")
        _check(0 < self.held_out < 1, "held_out", self.held_out, "a share above 0 and below 1")
        for name in ("learning_rate", "gradient_clip"):
            _check(getattr(self, name) > 0, name, getattr(self, name), "above 0")
        for name in ("warmup", "final_rate_fraction"):
            _check(0 <= getattr(self, name) <= 1, name, getattr(self, name), "a share, from 0 to 1")
        for name in ("beta1", "beta2"):
            _check(0 <= getattr(self, name) < 1, name, getattr(self, name), "at least 0 and below 1")
        _check(self.weight_decay >= 0, "weight_decay", self.weight_decay, "0 or more")
        _check(
            all(t >= 0 for t in self.response_temperatures), "response_temperatures", "a list", "numbers of 0 or more"
        )
        _check(self.output is None or bool(self.output), "output", self.output, "a folder, or null")


def _check(holds: bool, option: str, value: object, allowed: str) -> None:
    if not holds:
        raise ConfigError(f"task.{option}={value} is out of range: it must be {allowed}.")
