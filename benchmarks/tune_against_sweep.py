"""Is `task=tune` right? An exhaustive sweep of the same cells on the bundled target, and what tuning makes of them.

    python benchmarks/tune_against_sweep.py [--methods ngram suffix draft_model pard dflash] [--lengths 1 2 3 4 5 7]
                                            [--batch-sizes 1 8] [--repeats 3] [--limit 8] [--max-tokens 64]
                                            [--output docs/tune_against_sweep.json]

Every cell (method, length, batch size; plain decoding is the length 0) is measured in `repeats` rounds: one pass over
the bundled prompts in each, all cells of a batch size in turn, so that a machine that changes its speed touches all
alike. Then `task=tune` runs, with its defaults but for the cells. Claimed is, for every batch size:
- the cell that tune recommends is at most 3 % slower than the best one, both as the sweep measured them;
- tune made at most a fifth of the sweep's passes.
The first is a statement about noisy medians: the interval holds 95 % of the ratios of medians over resampled rounds.
Exit code 1: a whole interval lies below 0.97, or too many passes were made.
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specflow import Engine, SamplingParams
from specflow.cli import main as specflow
from specflow.metrics.summary import PLAIN
from specflow.workloads.bundled import BundledOptions, BundledWorkload

MOST_LOSS, MOST_SHARE = 0.03, 0.2
Key = tuple[str, int]


class Cell:
    """A method at a length, with an engine of its own."""

    def __init__(self, method: str, length: int) -> None:
        self.key: Key = (method, length)
        proposer = {"proposer": {"name": method, "num_speculative_tokens": length}} if length else {}
        self.engine = Engine.from_config(proposer)

    def run(self, prompts: Sequence[str], batch_size: int, max_tokens: int) -> float:
        """Tokens per second of a pass; nothing is known from earlier ones."""
        if self.engine.proposer is not None:
            self.engine.proposer.reset()
        begun = time.perf_counter()
        outputs = self.engine.generate(list(prompts), SamplingParams(max_tokens=max_tokens), concurrency=batch_size)
        return sum(len(one.token_ids) for one in outputs) / (time.perf_counter() - begun)


def sweep(arguments: argparse.Namespace, console: Console) -> dict[int, dict[Key, list[float]]]:
    """Tokens per second of every cell by batch size, one value per round."""
    prompts = [prompt.turns[0] for prompt in BundledWorkload(BundledOptions(limit=arguments.limit)).load()]
    cells = [Cell(PLAIN, 0), *(Cell(method, length) for method in arguments.methods for length in arguments.lengths)]
    speeds: dict[int, dict[Key, list[float]]] = {}
    for batch_size in arguments.batch_sizes:
        speeds[batch_size] = {cell.key: [] for cell in cells}
        for cell in cells:
            cell.run(prompts[:1], batch_size, arguments.max_tokens)
        rounds = [(number, cell) for number in range(arguments.repeats) for cell in cells]
        for number, cell in track(rounds, description=f"sweep, batch {batch_size}", console=console):
            del number
            speeds[batch_size][cell.key].append(cell.run(prompts, batch_size, arguments.max_tokens))
    return speeds


def tune(arguments: argparse.Namespace) -> dict[str, Any]:
    """tune.json of a run in a folder that is thrown away."""
    words = [
        "task=tune",
        f"task.methods=[{','.join(arguments.methods)}]",
        f"task.num_speculative_tokens=[{','.join(map(str, arguments.lengths))}]",
        f"task.batch_sizes=[{','.join(map(str, arguments.batch_sizes))}]",
        f"task.repeats={arguments.repeats}",
        f"workload.limit={arguments.limit}",
        f"sampling.max_tokens={arguments.max_tokens}",
        "tracking=none",
        "hydra.run.dir=run",
    ]
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            if specflow(words):
                raise SystemExit("task=tune failed")
            found: dict[str, Any] = json.loads((Path(folder) / "run" / "tune.json").read_text(encoding="utf-8"))
        finally:
            os.chdir(before)
    return found


def compare(speeds: dict[Key, list[float]], chosen: Key) -> dict[str, Any]:
    """The chosen cell against the best one of the sweep, with a 95 % interval from resampled rounds."""
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    best = max(medians, key=lambda key: medians[key])
    rounds = len(speeds[best])
    picks = np.random.default_rng(0).integers(0, rounds, (4000, rounds))
    ratios = np.median(np.array(speeds[chosen])[picks], 1) / np.median(np.array(speeds[best])[picks], 1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return {
        "best": name(best),
        "best_tokens_per_second": medians[best],
        "chosen": name(chosen),
        "chosen_tokens_per_second": medians[chosen],
        "ratio": medians[chosen] / medians[best],
        "low": float(low),
        "high": float(high),
    }


def name(key: Key) -> str:
    """E.g. "dflash K=5"."""
    return f"{key[0]} K={key[1]}" if key[1] else key[0]


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print and save; 1 when a claim does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", default=["ngram", "suffix", "draft_model", "pard", "dflash"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[1, 2, 3, 4, 5, 7])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args(words)
    console = Console(width=120)
    speeds = sweep(arguments, Console(stderr=True))
    tuned = tune(arguments)
    results = {}
    table = Table("batch", "best of the sweep", "tokens/s", "tune recommends", "tokens/s", "ratio (95 %)", "3 %")
    held = tuned["passes"]["share"] <= MOST_SHARE
    for one in tuned["recommendations"]:
        found = compare(speeds[one["batch_size"]], (one["method"], one["num_speculative_tokens"]))
        results[one["batch_size"]] = found
        fits = (
            "holds" if found["low"] >= 1 - MOST_LOSS else "refuted" if found["high"] < 1 - MOST_LOSS else "in the noise"
        )
        held = held and fits != "refuted"
        ratio = f"{found['ratio']:.3f} ({found['low']:.3f}–{found['high']:.3f})"
        both = [f"{found[f'{which}_tokens_per_second']:.0f}" for which in ("best", "chosen")]
        table.add_row(str(one["batch_size"]), found["best"], both[0], found["chosen"], both[1], ratio, fits)
    console.print(table)
    passes = tuned["passes"]
    console.print(f"passes: {passes['used']:.1f} of {passes['exhaustive']} ({100 * passes['share']:.0f} %)")
    if arguments.output:
        machine = {"cpu": platform.processor(), "threads": torch.get_num_threads(), "torch": torch.__version__}
        every = {batch: {name(key): values for key, values in found.items()} for batch, found in speeds.items()}
        record = {"machine": machine, "results": results, "passes": passes, "sweep": every, "cells": tuned["cells"]}
        arguments.output.write_text(json.dumps(record, indent=1), encoding="utf-8")
    return int(not held)


if __name__ == "__main__":
    raise SystemExit(main())
