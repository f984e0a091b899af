"""Trained heads on public prompts: acceptance and speed-up against plain decoding in the same run.

    python benchmarks/trained_heads.py --target FOLDER --head eagle3=FOLDER --head dflash=FOLDER \
        --files gsm8k.jsonl humaneval.jsonl --output docs/trained_heads.md [--prompts 20]

A file holds a JSON object with `turns` per line; its first prompts that fit are decoded greedily, with the chat
template where there is one, by plain decoding and with every head in turn over one loaded target. Every output is
compared with plain decoding's. The tables take the place of what stands between the two marks in the output file; a
file without them is refused, and one that does not exist is begun.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model_free import Listener
from model_free_page import Group, Row, lossless, table, with_totals
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from specflow import Engine, SamplingParams
from specflow.engine.losslessness import comparable, find_differences
from specflow.engine.prompts import encode_prompt
from specflow.errors import ConfigError, SpecflowError
from specflow.metrics.summary import PLAIN
from specflow.plugins.component import Kind
from specflow.plugins.registry import load_plugins
from specflow.report import wording
from specflow.tasks.bench import judge
from specflow.tasks.measure import Measurement, measure
from specflow.tracking.events import Series
from specflow.workloads.prompt_list import fit_template
from specflow.workloads.turns import render_turn

BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"
_WARMUP_TOKENS = 8


class Bench:
    """The target, loaded once, and an engine per head over it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self._registry = arguments, load_plugins()
        self.sampling = SamplingParams(max_tokens=arguments.max_tokens)
        self.backend = self._build(Kind.BACKEND, arguments.device)
        self.backend.setup()
        self.target = self._build(Kind.TARGET, "hf", path=arguments.target, dtype=arguments.dtype)
        self.target.load(self.backend)
        self.target.load = lambda backend: None  # every engine calls it, and attaches to the same weights

    def _build(self, kind: Kind, name: str, **options: Any) -> Any:
        return self._registry.get(kind, name).build({"name": name, **options})

    def engine(self, method: str) -> Engine:
        """A new engine on the loaded target; the one before cannot be used any more."""
        arguments = self.arguments
        scheduler = self._build(
            Kind.SCHEDULER,
            "continuous",
            max_num_seqs=arguments.batch_size,
            max_model_len=min(arguments.max_model_len, self.target.facts.max_model_len),
        )
        proposer = None
        if method != PLAIN:
            proposer = self._build(Kind.PROPOSER, method, path=str(arguments.heads[method]))
        return Engine(self.target, proposer, self._build(Kind.SAMPLER, "standard"), scheduler, self.backend)

    def group(self, file: Path) -> Group:
        """The first prompts of a file whose first turn fits. Raises `ConfigError` when none does."""
        arguments = self.arguments
        workload = self._build(Kind.WORKLOAD, "jsonl", path=str(file), limit=None)
        has_template = bool(getattr(self.target.tokenizer, "chat_template", None))
        prompts, note = fit_template(workload, workload.load(), has_template)
        taken, skipped = [], 0
        for prompt in prompts:
            if len(taken) == arguments.prompts:
                break
            ids = encode_prompt(self.target.tokenizer, render_turn(prompt, 0, []), self.target.facts.vocab_size)
            fits = len(ids) + arguments.max_tokens * (2 * len(prompt.turns) - 1) <= arguments.max_model_len
            taken += [prompt] if fits else []
            skipped += not fits
        if not taken:
            raise ConfigError(f"no prompt of {file.name} fits --max-model-len {arguments.max_model_len}: raise it.")
        return Group(file.stem, taken, skipped, note)

    def turns(self, groups: Sequence[Group]) -> list[Sequence[Group]]:
        """Groups that an engine runs before the next one has its turn.

        A CPU changes its speed, so there the methods take turns file by file. A GPU captures graphs whenever an engine
        is made, so there each is made once.
        """
        return [[group] for group in groups] if self.backend.device.type == "cpu" else [groups]

    def measure_groups(self, groups: Sequence[Group], listener: Listener) -> list[Row]:
        """Plain decoding of all groups, then every head."""
        arguments = self.arguments
        plain: dict[str, tuple[Row, Measurement]] = {}
        rows: list[Row] = []
        for method in (PLAIN, *arguments.heads):
            engine = self.engine(method)
            for group in groups:
                listener.where = group.name
                one = self._measure(engine, method, group, listener)
                row = Row(group.name, method, arguments.batch_size)
                row.add(one)
                first, expected = plain.setdefault(group.name, (row, one))
                if row is not first:
                    row.speedup = row.speed / first.speed
                    found = find_differences(engine, expected.outputs, one.outputs, self.sampling)
                    requests, tokens = comparable(expected.outputs, one.outputs)
                    row.verdict = judge(found, requests, tokens, len(one.outputs) - requests)
                rows.append(row)
        order = [group.name for group in groups]
        return sorted(rows, key=lambda row: order.index(row.group))

    def _measure(self, engine: Engine, method: str, group: Group, listener: Listener) -> Measurement:
        arguments = self.arguments
        series = Series(method, method, arguments.batch_size, len(group.prompts))
        short = SamplingParams(max_tokens=min(_WARMUP_TOKENS, arguments.max_tokens))
        # On a GPU kernels are compiled for lengths and batches as these are first met.
        prompts, sampling = (group.prompts, self.sampling) if arguments.device == "cuda" else (group.prompts[:1], short)
        warmup = Series(method, method, arguments.batch_size, len(prompts), warmup=True)
        measure(engine, prompts, sampling, warmup, listener, seed=0)
        return measure(engine, group.prompts, self.sampling, series, listener, seed=0)

    def facts(self) -> dict[str, str]:
        """What ran where."""
        arguments, target, backend = self.arguments, self.target.describe(), self.backend.describe()
        return {
            "target": f"{arguments.name or self.target.facts.name}, {target['parameters']} parameters, "
            f"{target['dtype']}, weights {target['weights']}",
            "device": f"{backend['device']}, threads {backend.get('threads', 'n/a')}, torch {backend['torch']}",
            "decoding": f"greedy, up to {arguments.max_tokens} tokens, batch {arguments.batch_size}, "
            f"the first {arguments.prompts} prompts of each file",
        }


def tables(facts: Mapping[str, str], rows: Sequence[Row]) -> str:
    """The measured part of the page."""
    complete = with_totals(rows)
    deepest = max((len(row.acceptance.per_position_unconditional) for row in complete), default=0)
    header = ("prompts", "method", "mean acceptance length", "tokens/s", "speed-up", "lossless")
    places = tuple(str(position + 1) for position in range(deepest))
    speeds, positions = [], []
    for row in complete:
        name, plain = ("**all**" if row.group == "all" else row.group), row.method == PLAIN
        length = "–" if plain else wording.count(row.acceptance.mean_acceptance_length, 2)
        speedup = "1.00×" if plain else wording.times(row.speedup)
        speeds.append((name, row.method, length, wording.count(row.speed), speedup, lossless(row)))
        if not plain:
            found = [wording.percent(share) for share in row.acceptance.per_position_unconditional]
            positions.append((name, row.method, *found, *[""] * (deepest - len(found))))
    lines = [f"- {key}: {value}" for key, value in facts.items()]
    heading = "Share of the rounds in which draft 1, 2, … is accepted:"
    shares = table(("prompts", "method", *places), positions)
    return "\n".join([*lines, "", table(header, speeds), "", heading, "", shares])


def put(page: Path, measured: str) -> None:
    """Write the tables into a page. Raises `ConfigError` for one without the two marks."""
    old = page.read_text(encoding="utf-8") if page.exists() else f"# Trained heads, measured\n\n{BEGIN}\n{END}\n"
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{page} has no lines {BEGIN} and {END} to put the tables between: add them.")
    page.write_text(f"{before}{BEGIN}\n\n{measured}\n\n{END}{after}", encoding="utf-8")


# -- command line --------------------------------------------------------------------------------------------------
def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of a causal language model")
    parser.add_argument("--head", required=True, action="append", metavar="PROPOSER=FOLDER", help="may be repeated")
    parser.add_argument("--files", required=True, nargs="+", type=Path, metavar="FILE.jsonl")
    parser.add_argument("--output", required=True, type=Path, help="Markdown file that holds the tables")
    parser.add_argument("--name", help="the target's name in the page; without it, its folder's")
    parser.add_argument("--prompts", type=int, default=20, help="prompts per file")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens per request")
    parser.add_argument("--max-model-len", type=int, default=2048, help="longer prompts are skipped")
    parser.add_argument("--batch-size", type=int, default=8, help="requests at the same time")
    parser.add_argument("--dtype", default="float32", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "rocm"])
    arguments = parser.parse_args(words)
    if min(arguments.prompts, arguments.max_tokens, arguments.batch_size) < 1:
        parser.error("--prompts, --max-tokens and --batch-size must be 1 or more")
    if not all("=" in head for head in arguments.head):
        parser.error("--head takes PROPOSER=FOLDER")
    arguments.heads = dict(head.split("=", 1) for head in arguments.head)
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Measure and write; 1 when an output differs from plain decoding by more than ties."""
    arguments = parse(words)
    console = Console(stderr=True)
    rows: list[Row] = []
    try:
        bench = Bench(arguments)
        groups = [bench.group(file) for file in arguments.files]
        requests = sum(len(prompt.turns) for group in groups for prompt in group.prompts)
        columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn()
        with Progress(*columns, console=console, refresh_per_second=2) as progress:
            listener = Listener(progress, requests * (1 + len(arguments.heads)))
            for turn in bench.turns(groups):
                rows += bench.measure_groups(turn, listener)
                put(arguments.output, tables(bench.facts(), rows))  # what is done is kept
    except SpecflowError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        return 2
    return int(not all(row.verdict.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
