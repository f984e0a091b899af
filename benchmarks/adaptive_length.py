"""Adaptive draft lengths against every fixed one, on work that stays the same and on work that changes.

    python benchmarks/adaptive_length.py [--methods dflash draft_model suffix] [--lengths 1 2 3 5 7] [--rounds 7]
                                         [--prompts 16] [--max-tokens 96] [--output docs/adaptive_length.json]

Work on the bundled target: `alone`, one request at a time; `busy`, sixteen at a time; `changing`, which goes from one
to the other and from greedy decoding to temperature 1 and back. Every answer has the same number of tokens. All engines
take turns within a round, in an order that changes, so that a machine that changes its speed touches all alike. The
adaptive engine is compared with the fixed length of the highest median, round by round; the interval holds 95 % of the
medians of resampled rounds. K=0 is a fixed length as well: no drafts, by an engine that could draft at the next step,
so a trained head still follows the text. `plain` stands beside it: an engine that has no drafter to follow with.

Two things are claimed, and the exit code is 1 when one of them is refuted, that is, when the whole interval lies on the
wrong side:
`alone` and `busy`: adaptive is at most 3 % slower than the best fixed length.
`changing`: adaptive is faster than the best fixed length.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specflow import Engine, SamplingParams
from specflow.workloads.bundled import BundledOptions, BundledWorkload

MOST_LOSS = 0.03
PLAIN, ADAPTIVE = "plain", "adaptive"


@dataclass(frozen=True)
class Phase:
    """Prompts decoded together."""

    concurrency: int
    temperature: float
    prompts: int  # of those there are


def works(prompts: int, few: int) -> dict[str, list[Phase]]:
    """Kinds of work by name."""
    alone, busy = Phase(1, 0.0, few), Phase(16, 0.0, prompts)
    warm = Phase(1, 1.0, few), Phase(16, 1.0, prompts)
    return {"alone": [alone], "busy": [busy], "changing": [alone, busy, warm[0], warm[1]] * 2}


@dataclass
class Runner:
    """An engine, and whether it speculates."""

    name: str
    engine: Engine
    speculate: bool = True

    def run(self, phases: Sequence[Phase], prompts: Sequence[str], max_tokens: int, seed: int) -> float:
        """Tokens per second of one pass over the phases."""
        if self.engine.proposer is not None:
            self.engine.proposer.reset()
        tokens, begun = 0, time.perf_counter()
        for phase in phases:
            chosen = list(prompts[: phase.prompts])
            sampling = [
                SamplingParams(max_tokens=max_tokens, temperature=phase.temperature, ignore_eos=True, seed=seed + index)
                for index in range(len(chosen))
            ]
            outputs = self.engine.generate(chosen, sampling, concurrency=phase.concurrency, speculate=self.speculate)
            tokens += sum(len(one.token_ids) for one in outputs)
        return tokens / (time.perf_counter() - begun)


def runners(method: str, lengths: Sequence[int]) -> list[Runner]:
    """Plain decoding, every fixed length, 0 among them, and the adaptive scheduler with the largest."""

    def engine(length: int, scheduler: str, **options: Any) -> Engine:
        proposer = {"name": method, "num_speculative_tokens": length}
        return Engine.from_config({"proposer": proposer, "scheduler": {"name": scheduler, **options}})

    fixed = [Runner(f"K={length}", engine(length, "continuous")) for length in lengths]
    plain = Runner(PLAIN, fixed[0].engine, speculate=False)
    never = engine(max(lengths), "adaptive", verify_costs=[[1, 1.0], [2, 1e6]], probe_interval=10**9)
    return [plain, Runner("K=0", never), *fixed, Runner(ADAPTIVE, engine(max(lengths), "adaptive"))]


def compare(speeds: dict[str, list[float]]) -> dict[str, Any]:
    """The best fixed length, and adaptive speed over its speed with a 95 % interval."""
    fixed = {name: statistics.median(values) for name, values in speeds.items() if name.startswith("K=")}
    best = max(fixed, key=lambda name: fixed[name])
    ratios = np.array(speeds[ADAPTIVE]) / np.array(speeds[best])
    draws = np.random.default_rng(0).choice(ratios, (4000, len(ratios)))
    low, high = np.quantile(np.median(draws, 1), [0.025, 0.975])
    return {"best": best, "ratio": float(np.median(ratios)), "low": float(low), "high": float(high)}


def verdict(work: str, found: dict[str, Any]) -> str:
    """What the measurement says about the claim: holds, refuted, or within the noise."""
    least = 1.0 if work == "changing" else 1 - MOST_LOSS
    if found["low"] >= least:
        return "holds"
    return "refuted" if found["high"] < least else "within the noise"


def measure(arguments: argparse.Namespace, method: str, console: Console) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by work and runner, one value per round."""
    prompts = [prompt.turns[0] for prompt in BundledWorkload(BundledOptions(limit=arguments.prompts)).load()]
    kinds = works(len(prompts), max(1, len(prompts) // 5))
    every = runners(method, arguments.lengths)
    speeds: dict[str, dict[str, list[float]]] = {work: {one.name: [] for one in every} for work in kinds}
    for number in track(range(arguments.rounds + 1), description=method, console=console):
        for work, phases in kinds.items():
            turn = number % len(every)
            for one in every[turn:] + every[:turn]:
                speed = one.run(phases, prompts, arguments.max_tokens, seed=1000 * number)
                if number:  # the first round warms up
                    speeds[work][one.name].append(speed)
    return speeds


def show(method: str, speeds: dict[str, dict[str, list[float]]], console: Console) -> list[str]:
    """Print a table; the verdicts."""
    table = Table("work", *next(iter(speeds.values())), "best fixed", "adaptive / best", "claim", title=method)
    verdicts = []
    for work, by_name in speeds.items():
        found = compare(by_name)
        verdicts.append(verdict(work, found))
        ratio = f"{found['ratio']:.3f} ({found['low']:.3f}–{found['high']:.3f})"
        medians = [f"{statistics.median(values):.0f}" for values in by_name.values()]
        table.add_row(work, *medians, found["best"], ratio, verdicts[-1])
    console.print(table)
    return verdicts


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and save; 1 when a claim was refuted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["dflash", "draft_model", "suffix"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 2, 3, 5, 7])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    errors, console = Console(stderr=True), Console(width=140)
    results: dict[str, Any] = {}
    verdicts: list[str] = []
    for method in arguments.methods:
        speeds = measure(arguments, method, errors)
        verdicts += show(method, speeds, console)
        results[method] = {work: {**compare(found), "tokens_per_second": found} for work, found in speeds.items()}
    if arguments.output:
        machine = {"cpu": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        record = {
            "machine": machine,
            "rounds": arguments.rounds,
            "max_tokens": arguments.max_tokens,
            "methods": results,
        }
        arguments.output.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return int("refuted" in verdicts)


if __name__ == "__main__":
    raise SystemExit(main())
