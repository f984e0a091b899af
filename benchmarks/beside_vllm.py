"""specflow and vLLM on one GPU in one run: decode tokens per second of the same shapes, and their ratio.

    python benchmarks/beside_vllm.py --vllm-python ENV/bin/python [--output docs/beside_vllm.json]
    python benchmarks/beside_vllm.py --vllm-python python3 --vllm-path FOLDER     # vLLM's packages lie in a folder

Weights are random (load_format=dummy), so no checkpoint is needed; prompts are 256 random ids. Methods: plain decoding,
EAGLE-3 with 3 drafts and synthetic acceptance of 2.5 tokens a round, DFlash with 15 drafts and 5.0: synthetic
acceptance makes both engines emit the same number of tokens a round, so that the ratio compares what drafting,
verification, scheduling and the target cost. A rate is the tokens of a pass of 288 tokens a request less those of a
pass of 32, over the difference of their times: decoding alone, prompts left out. The best of `--rounds` counts, for
both engines alike. They run one after the other, method by method, each in a process of its own.

Of specflow the parts of a step are written as well (`task=profile`): where the time goes.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model_shapes import SHAPES, write_shapes

PROMPT, SHORT, LONG = 256, 32, 288
GOALS = {  # ratios aimed at, by batch
    "plain": {1: 1.25, 8: 1.1, 32: 1.0},
    "eagle3": {1: 1.35, 8: 1.1, 32: 1.0},
    "dflash": {1: 1.25, 8: 1.1, 32: 1.0},
}


@dataclass(frozen=True)
class Method:
    """A way of drafting, and how many tokens a round emits."""

    name: str
    num_drafts: int
    length: float


METHODS = {
    "plain": Method("plain", 0, 1.0),
    "eagle3": Method("eagle3", 3, 2.5),
    "dflash": Method("dflash", 15, 5.0),
}
Run = Callable[[list[list[int]], int], int]  # prompts, tokens of each answer -> tokens made


def main(argv: Sequence[str] | None = None) -> int:
    """Run all methods on both engines and print the table."""
    args = _parser().parse_args(argv)
    if args.side:
        side = json.loads(args.side)
        (_specflow if side["engine"] == "specflow" else _vllm)(args, METHODS[side["method"]], Path(side["folder"]))
        return 0
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        write_shapes(SHAPES[args.shape], Path(folder), args.dtype)
        for method in args.methods:
            for engine in args.engines:
                results.setdefault(method, {})[engine] = _run_side(args, engine, method, folder)
                if args.output:
                    args.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results, args.batch_sizes))
    failed = [f"{method} on {engine}" for method, sides in results.items() for engine in sides if not sides[engine]]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", default=sys.executable, help="interpreter that has vLLM")
    parser.add_argument("--vllm-path", help="folder with vLLM's packages, put before those of that interpreter")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--engines", nargs="+", choices=("specflow", "vllm"), default=["specflow", "vllm"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="GROUP.KEY=VALUE", help="other options of specflow")
    parser.add_argument("--output", type=Path, help="all numbers as JSON")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    return parser


def _run_side(args: argparse.Namespace, engine: str, method: str, folder: str) -> dict[str, Any] | None:
    """One engine and method in a process of its own; what it found, None when it failed."""
    python, environment = sys.executable, dict(os.environ)
    if engine == "vllm":
        python = args.vllm_python
        if args.vllm_path:
            environment["PYTHONPATH"] = str(args.vllm_path)
    side = json.dumps({"engine": engine, "method": method, "folder": folder})
    words = [
        "--shape", args.shape, "--dtype", args.dtype, "--device", args.device, "--rounds", str(args.rounds),
        "--batch-sizes", *map(str, args.batch_sizes), "--set", *args.set, "--side", side,
    ]  # fmt: skip
    begun = time.perf_counter()
    done = subprocess.run([python, __file__, *words], env=environment, stdout=subprocess.PIPE, text=True, check=False)
    found = [json.loads(line[7:]) for line in done.stdout.splitlines() if line.startswith("FOUND: ")]
    print(f"{engine}, {method}: {time.perf_counter() - begun:.0f} s, exit code {done.returncode}", flush=True)
    if done.returncode or not found:
        print(done.stdout[-3000:], file=sys.stderr)
        return None
    for batch, rates in found[-1]["tokens_per_second"].items():
        print(f"  batch {batch}: {max(rates):.1f} tokens/s, rounds {', '.join(f'{rate:.0f}' for rate in rates)}")
    return found[-1]


def rates_of(run: Run, batch_sizes: Sequence[int], rounds: int, vocab_size: int) -> dict[str, list[float]]:
    """Decode tokens per second of each round, by batch size."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def timed(batch: int, tokens: int) -> tuple[float, int]:
        prompts = torch.randint(10, vocab_size - 10, (batch, PROMPT), generator=generator).tolist()
        begun = time.perf_counter()
        made = run(prompts, tokens)
        return time.perf_counter() - begun, made

    timed(1, SHORT)
    found: dict[str, list[float]] = {}
    for batch in batch_sizes:
        timed(batch, SHORT)
        rates = []
        for _ in range(rounds):
            few_seconds, few = timed(batch, SHORT)
            seconds, made = timed(batch, LONG)
            rates.append((made - few) / (seconds - few_seconds))
        found[str(batch)] = rates
    return found


def _specflow(args: argparse.Namespace, method: Method, folder: Path) -> None:
    import torch

    from specflow import Engine, SamplingParams, __version__
    from specflow.engine.step_parts import measure_parts

    most = max(args.batch_sizes)
    config: dict[str, Any] = {
        "target": {"name": "hf", "path": str(folder / "target"), "load_format": "dummy", "dtype": args.dtype},
        "backend": {"name": args.device},
        "scheduler": {"max_num_seqs": most, "max_model_len": 2048, "kv_cache_memory_gib": 16.0},
    }
    if method.num_drafts:
        config["proposer"] = {
            "name": method.name,
            "path": str(folder / method.name),
            "load_format": "dummy",
            "num_speculative_tokens": method.num_drafts,
        }
        config["sampler"] = {"name": "synthetic", "synthetic_acceptance_length": method.length}
    for word in args.set:
        key, value = word.split("=", 1)
        group, name = key.split(".", 1)
        config.setdefault(group, {})[name] = json.loads(value)
    begun = time.perf_counter()
    engine = Engine.from_config(config)
    start_seconds = time.perf_counter() - begun

    def run(prompts: list[list[int]], tokens: int) -> int:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        return sum(len(output.token_ids) for output in engine.generate(prompts, sampling, concurrency=len(prompts)))

    rates = rates_of(run, args.batch_sizes, args.rounds, SHAPES[args.shape].vocab_size)
    parts = {
        str(batch): measure_parts(engine, batch, PROMPT, drafts=method.num_drafts > 0) for batch in args.batch_sizes
    }
    _found(
        tokens_per_second=rates,
        step_parts=parts,
        versions={"specflow": __version__, "torch": torch.__version__},
        start_seconds=start_seconds,
        report=engine.describe(),
    )


def _vllm(args: argparse.Namespace, method: Method, folder: Path) -> None:
    for name, value in (
        ("HF_HUB_OFFLINE", "1"),
        ("VLLM_USE_FLASHINFER_SAMPLER", "0"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("VLLM_ENABLE_V1_MULTIPROCESSING", "0"),
    ):
        os.environ.setdefault(name, value)
    import torch
    import vllm

    speculative = None
    if method.num_drafts:
        speculative = {
            "method": method.name,
            "model": str(folder / method.name),
            "num_speculative_tokens": method.num_drafts,
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_length": method.length,
        }
    begun = time.perf_counter()
    engine = vllm.LLM(
        str(folder / "target"),
        load_format="dummy",
        dtype=args.dtype,
        max_model_len=2048,
        skip_tokenizer_init=True,
        speculative_config=speculative,
        disable_log_stats=False,
        enable_prefix_caching=False,
        max_num_seqs=max(args.batch_sizes),
        **({"gpu_memory_utilization": 0.6} if args.device == "cuda" else {}),
    )
    start_seconds = time.perf_counter() - begun

    def run(prompts: list[list[int]], tokens: int) -> int:
        sampling = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        outputs = engine.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    rates = rates_of(run, args.batch_sizes, args.rounds, SHAPES[args.shape].vocab_size)
    counters = {
        metric.name: getattr(metric, "value", getattr(metric, "values", None))
        for metric in engine.get_metrics()
        if "spec_decode" in metric.name
    }
    _found(
        tokens_per_second=rates,
        versions={"vllm": vllm.__version__, "torch": torch.__version__},
        start_seconds=start_seconds,
        counters=counters,
    )


def _found(**values: Any) -> None:
    print(f"FOUND: {json.dumps(values)}", flush=True)


def table(results: dict[str, dict[str, Any]], batch_sizes: Sequence[int]) -> str:
    """Tokens per second of both engines, ratio and goal, a line per method."""
    lines = [
        "| | " + " | ".join(f"batch {batch}: specflow | vLLM | ratio (goal)" for batch in batch_sizes) + " |",
        "|---" + "|---:|---:|---:" * len(batch_sizes) + "|",
    ]
    for method, sides in results.items():
        cells = [method]
        for batch in batch_sizes:
            ours, theirs = (
                max(sides[engine]["tokens_per_second"][str(batch)]) if sides.get(engine) else None
                for engine in ("specflow", "vllm")
            )
            goal = GOALS[method].get(batch)
            ratio = f"{ours / theirs:.2f} ({goal})" if ours and theirs else "–"
            cells += [f"{ours:.0f}" if ours else "–", f"{theirs:.0f}" if theirs else "–", ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
