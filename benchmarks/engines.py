"""specflow, transformers and vLLM side by side: plain decoding and ngram on the same requests, in one table.

    SPECFLOW_VLLM_PYTHON=ENV/bin/python python benchmarks/engines.py --target FOLDER --output docs/engines_smollm2.md

Batch 1 runs on every engine; larger batches leave transformers out, whose assisted generation takes one request at a
time. Each engine measures its speed-up over its own plain decoding, and its answers are compared with specflow's plain
decoding token for token. Other words are handed on to specflow as overrides, for instance workload=jsonl
workload.path=FILE. Written is a Markdown page; the runs stay under --folder with all their numbers.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from specflow import cli
from specflow.report.records import RunRecord, read_record, run_folders
from specflow.report.rows import ResultRow, rows_of

ONE_AT_A_TIME = ("transformers",)
# Prompt lookup of transformers goes down to one token, so all engines do.
NGRAM = ("+proposer=ngram", "proposer.prompt_lookup_min=1", "proposer.prompt_lookup_max=3")
_VERDICTS = {
    "verified": "equal",
    "verified_up_to_ties": "equal up to ties",
    "failed": "DIFFERENT",
    "not_applicable": "",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run every engine at every batch size and write the page. Returns 1 when a run failed."""
    args, words = _parser().parse_known_args(argv)
    records: list[RunRecord] = []
    failed = False
    for batch_size in args.batch_sizes:
        engines = [name for name in args.engines if batch_size == 1 or name not in ONE_AT_A_TIME]
        folder = (args.folder / f"batch-{batch_size}").absolute()
        fixed = [
            f"engine={','.join(engines)}", *NGRAM, "target=hf", f"target.path={args.target}",
            f"target.dtype={args.dtype}", f"task.batch_sizes=[{batch_size}]", f"task.repeats={args.repeats}",
            f"sampling.max_tokens={args.max_tokens}", f"hydra.sweep.dir={folder}",
        ]  # fmt: skip
        failed |= cli.main(["-m", *fixed, *words]) != 0
        records += [read_record(run) for run in run_folders(folder)]
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(page(records, args), encoding="utf-8")
    print(f"written: {args.output}")
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the model")
    parser.add_argument("--output", type=Path, required=True, help="the page, a .md file")
    parser.add_argument("--folder", type=Path, default=Path("runs/engines"), help="where the runs go; must be new")
    parser.add_argument("--engines", nargs="+", default=["specflow", "transformers", "vllm"])
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=128)
    return parser


def page(records: Sequence[RunRecord], args: argparse.Namespace) -> str:
    """The page: what ran, the table, what failed."""
    done = [record for record in records if record.summary]
    rows = sorted(rows_of(done), key=lambda row: (row.batch_size, args.engines.index(row.engine), not row.is_plain))
    lines = ["# Engines side by side", "", "Written by `benchmarks/engines.py`, which also says how.", ""]
    lines += [*_facts(done), f"- repeats: {args.repeats}; speeds are medians over them", ""]
    lines += [
        "| batch | engine | method | tokens/s | slowest–fastest | speed-up | acceptance rate | mean acceptance length "
        "| TTFT ms | TPOT ms | answers |",
        "| ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
        *(_line(row, _verdict(row, done)) for row in rows),
        "",
        "Speed-up: over plain decoding by the same engine. Answers: against specflow's plain decoding of the same "
        "requests, token by token; a tie is a gap within rounding between the target's two best logits.",
    ]
    failures = [record for record in records if record.status != "finished"]
    if failures:
        lines += ["", "Failed:", "", *(f"- {record.name}: {record.reason}" for record in failures)]
    return "\n".join([*lines, ""])


def _facts(records: Sequence[RunRecord]) -> list[str]:
    found: list[str] = []
    for record in records:
        ran = record.really_ran
        target, backend, run = ran.get("target", {}), ran.get("backend", {}), ran.get("run", {})
        found.append(f"- target: {target.get('target')}, {target.get('parameters')} parameters")
        found.append(f"- device: {backend.get('device')}, threads, vLLM apart: {backend.get('threads')}")
        found.append(f"- decoding: temperature {run.get('temperature')}, up to {run.get('max_tokens')} tokens")
        workload = (record.summary or {}).get("workload", {})
        found.append(f"- prompts: {workload.get('prompts')} of {Path(workload.get('source', '?')).name}")
        engine = ran.get("engine", {"engine": "specflow", "torch": record.facts.get("torch", "?")})
        dtype = engine.get("dtype") or target.get("dtype")
        shown = {"version": record.facts.get("specflow"), **engine}
        found.append(f"- {shown['engine']} {shown['version']}: torch {shown['torch']}, {dtype}")
    return list(dict.fromkeys(found))


def _verdict(row: ResultRow, records: Sequence[RunRecord]) -> str:
    """Plain decoding of another engine was compared as well, in the run of its drafts."""
    if row.is_plain and row.engine == "specflow":
        return ""
    of_run = [record for record in records if record.name == row.run]
    status = ((of_run[0].summary or {}).get("lossless", {}) if of_run else {}).get("status", "not_applicable")
    return _VERDICTS[status]


def _line(row: ResultRow, verdict: str) -> str:
    def number(value: float | None, digits: int, factor: float = 1.0, unit: str = "") -> str:
        return "–" if value is None else f"{value * factor:.{digits}f}{unit}"

    spread = f"{row.range[0]:.1f}–{row.range[1]:.1f}" if row.range else "–"
    cells = [
        str(row.batch_size), row.engine, row.method, number(row.tokens_per_second, 1), spread,
        number(row.speedup, 2, unit="×"),
        "–" if row.is_plain else number(row.acceptance_rate, 1, 100, "%"),
        "–" if row.is_plain else number(row.mean_acceptance_length, 2),
        number(row.ttft_p50, 1, 1000), number(row.tpot_p50, 1, 1000), verdict,
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
