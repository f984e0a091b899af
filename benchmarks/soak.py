"""A long run under disorder: random arrivals, lengths, options, stops and cancellations; nothing may be left behind.

    python benchmarks/soak.py [--minutes 10] [--proposer dflash] [--device cuda] [--dtype float32] [--output FILE.json]

Waves of random requests go through one engine whose pages are too few for all of them, so that some are pre-empted. In
every wave requests arrive over a second, have from 1 to 200 output tokens, greedy or sampled, some with penalties or
filters, stop strings, stop ids or log-probabilities, and some are cancelled while they run. After every wave the
engine must be idle with all blocks and slots free, and memory no larger than after the first waves. In one wave of ten
the greedy answers are compared with plain decoding by a second engine, token by token (in half precision a difference
is counted, not judged: kernels of other shapes round differently). Exit code 1 when anything is left or differs.
"""

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from specflow import Engine, SamplingParams
from specflow.core.request import FinishReason
from specflow.engine.outputs import RequestOutput
from specflow.workloads.bundled import BundledOptions, BundledWorkload

_SETTLING = 5  # waves in which memory may still grow
_GROWTH = 64 * 2**20  # bytes of host memory that an allocator may keep for itself
_CHECKED = 10  # one wave of so many is compared with plain decoding


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the time is over; prints what happened."""
    args = _parser().parse_args(argv)
    numbers = random.Random(args.seed)
    engine, plain = _engine(args, args.proposer), _engine(args, None)
    texts = [prompt.turns[0] for prompt in BundledWorkload(BundledOptions()).read()]
    counts: Counter[str] = Counter()
    memory: list[tuple[int, int]] = []
    problems: list[str] = []
    begun = time.monotonic()
    with Progress(disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("soak", total=60 * args.minutes)
        while time.monotonic() - begun < 60 * args.minutes and not problems:
            wave = counts["waves"]
            problems += _wave(engine, plain if wave % _CHECKED == 0 else None, texts, numbers, counts, args.dtype)
            memory.append(_memory(args.device))
            problems += _grown(memory)
            progress.update(bar, completed=time.monotonic() - begun)
    found = {
        "minutes": round((time.monotonic() - begun) / 60, 2),
        "counts": dict(counts),
        "memory_first": memory[: _SETTLING + 1],
        "memory_last": memory[-1],
        "incidents": dict(engine.incidents),
        "problems": problems,
        "report": engine.describe(),
    }
    print(json.dumps({name: found[name] for name in list(found)[:-1]}, indent=1))
    if args.output:
        args.output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 1 if problems else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--proposer", default="dflash")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    return parser


def _engine(args: argparse.Namespace, proposer: str | None) -> Engine:
    config: dict[str, Any] = {
        "target": {"name": "bundled", "dtype": args.dtype},
        # On a CPU too the loop that is one step ahead of the host, as with graphs.
        "backend": {"name": args.device} | ({"run_ahead": True} if args.device == "cpu" else {}),
        "scheduler": {"max_num_seqs": 16, "max_model_len": 512, "num_kv_blocks": 110},
    }
    if proposer:
        config["proposer"] = {"name": proposer}
    return Engine.from_config(config)


def _wave(
    engine: Engine,
    plain: Engine | None,
    texts: Sequence[str],
    numbers: random.Random,
    counts: Counter[str],
    dtype: str,
) -> list[str]:
    """One wave; what went wrong."""
    size = numbers.randint(1, 48)
    prompts = [numbers.choice(texts)[: numbers.randint(1, 1200)] for _ in range(size)]
    device_only = numbers.random() < 0.5  # else somebody nearly always keeps the host in the loop
    sampling = [_options(numbers, device_only) for _ in range(size)]
    names = [f"{counts['waves']}-{index}" for index in range(size)]
    victims = {name: numbers.randint(1, 40) for name in names if numbers.random() < 0.15}
    steps = 0

    def on_step(_: object) -> None:
        nonlocal steps
        steps += 1
        for name, step in victims.items():
            if step == steps:
                engine.abort(name)

    outputs = engine.generate(
        prompts,
        sampling,
        arrivals=sorted(numbers.uniform(0, 1) for _ in range(size)),
        request_ids=names,
        on_step=on_step,
    )
    counts["waves"] += 1
    counts["requests"] += size
    counts["steps"] += steps
    counts["tokens"] += sum(len(output.token_ids) for output in outputs)
    counts.update(f"ended by {output.finish_reason.value}" for output in outputs)
    problems = list(engine.scheduler.check_idle())
    if plain is not None:
        problems += _compare(plain, prompts, sampling, outputs, counts, dtype)
    return problems


def _options(numbers: random.Random, device_only: bool) -> SamplingParams:
    """Half of them greedy, some of those with nothing else. device_only: nothing that the host has to apply."""
    greedy, extra = numbers.random() < 0.5, numbers.random()
    options: dict[str, Any] = {
        "max_tokens": numbers.randint(1, 200),
        "temperature": 0.0 if greedy else numbers.uniform(0.2, 1.5),
        "ignore_eos": numbers.random() < 0.5,
        "seed": numbers.getrandbits(32),
    }
    if extra < 0.15:
        options["top_p"], options["top_k"] = numbers.uniform(0.5, 1.0), numbers.choice([0, 5, 50])
    elif extra < 0.25 and not device_only:
        options["repetition_penalty"] = numbers.uniform(1.0, 1.3)
    elif extra < 0.4:
        options["stop"] = [numbers.choice(["return", "\n\n", "self", ":"])]
    elif extra < 0.5:
        options["stop_token_ids"] = [numbers.randrange(400)]
    elif extra < 0.55 and not device_only:
        options["logprobs"] = 2
    return SamplingParams(**options)


def _compare(
    plain: Engine,
    prompts: Sequence[str],
    sampling: Sequence[SamplingParams],
    outputs: Sequence[RequestOutput],
    counts: Counter[str],
    dtype: str,
) -> list[str]:
    """Greedy answers that were not cancelled, against plain decoding."""
    kept = [
        index
        for index, output in enumerate(outputs)
        if sampling[index].temperature == 0 and output.finish_reason is not FinishReason.ABORT
    ]
    expected = plain.generate([prompts[index] for index in kept], [sampling[index] for index in kept])
    counts["compared"] += len(kept)
    differing = [
        outputs[index].request_id
        for index, other in zip(kept, expected, strict=True)
        if outputs[index].token_ids != other.token_ids
    ]
    counts["different"] += len(differing)
    return [f"{name} differs from plain decoding" for name in differing] if dtype == "float32" else []


def _memory(device: str) -> tuple[int, int]:
    """Bytes: most that the process ever had, and what is allocated on the device now."""
    allocated = torch.cuda.memory_allocated() if device == "cuda" else 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, allocated


def _grown(memory: Sequence[tuple[int, int]]) -> list[str]:
    if len(memory) <= _SETTLING:
        return []
    # Graphs of requests with filters are captured when they are first asked for, so early waves do not count.
    host, device = (memory[-1][place] - max(one[place] for one in memory[:_SETTLING]) for place in (0, 1))
    found = []
    if host > _GROWTH:
        found.append(f"host memory grew by {host} bytes")
    if device > _GROWTH:
        found.append(f"device memory grew by {device} bytes")
    return found


if __name__ == "__main__":
    sys.exit(main())
