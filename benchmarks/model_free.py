"""Drafting without weights on public prompts: ngram, ngram_gpu and suffix against plain decoding in the same run.

    python benchmarks/model_free.py --target FOLDER --data FOLDER --output docs/model_free.md [--prompts 10]

The data folder holds humaneval.jsonl, swe-bench.jsonl and spec-bench.jsonl, a JSON object with `turns` per line. Of
each group the first prompts that fit into the context are taken, its categories in turn. All methods decode the same
prompts greedily over one loaded target, one after the other, each with its default options, and every output is
compared with plain decoding's. A method that learns from earlier requests begins with an empty memory and then runs
the same prompts a second time, with what it has learnt from its own answers. Written are a Markdown page, and beside
it a picture and all numbers as JSON.
"""

import argparse
import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from model_free_page import AGAIN, COLD, SPEC_BENCH, Group, Row, write
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from specflow import Engine, SamplingParams
from specflow.engine.losslessness import Difference, comparable, find_differences
from specflow.engine.prompts import encode_prompt
from specflow.errors import ConfigError, SpecflowError
from specflow.metrics.summary import PLAIN
from specflow.plugins.component import Kind
from specflow.plugins.registry import load_plugins
from specflow.proposers.base import Proposer
from specflow.tasks.bench import judge
from specflow.tasks.measure import Measurement, measure
from specflow.tracking.events import RequestRow, Series, StepRecord
from specflow.workloads.base import Prompt
from specflow.workloads.prompt_list import fit_template

GROUPS = {  # name: workload, file, category
    "humaneval": ("humaneval", "humaneval.jsonl", None),
    "swe_bench": ("swe_bench", "swe-bench.jsonl", None),
    **{name: ("spec_bench", "spec-bench.jsonl", name) for name in SPEC_BENCH},
}
METHODS = ("ngram", "ngram_gpu", "suffix")
_WARMUP_TOKENS = 8


# -- what is measured ----------------------------------------------------------------------------------------------
class Listener:
    """Takes the place of the life-cycle hooks: one bar over all requests."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._task, self._counts = progress, progress.add_task("loading", total=total), False
        self.where = ""

    def specflow_series_started(self, series: Series) -> None:
        """Say what runs."""
        self._counts = not series.warmup
        self._progress.update(self._task, description=f"{self.where}: {series.name}")

    def specflow_step_finished(self, record: StepRecord) -> None:
        """Nothing to draw."""

    def specflow_request_finished(self, row: RequestRow) -> None:
        """One more."""
        self._progress.advance(self._task, int(self._counts))


class Bench:
    """The target, loaded once, and the engines over it, one at a time."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self._registry = arguments, load_plugins()
        self.sampling = SamplingParams(max_tokens=arguments.max_tokens)
        # Wrong names and missing files are told before the weights are read.
        self.learns = {name: type(self._proposer(name)).reset is not Proposer.reset for name in arguments.methods}
        self._workloads = {name: self._workload(name) for name in arguments.groups}
        self.backend = self._build(Kind.BACKEND, arguments.device)
        self.backend.setup()
        self.target = self._build(Kind.TARGET, "hf", path=arguments.target, dtype=arguments.dtype)
        self.target.load(self.backend)
        self.target.load = lambda backend: None  # every engine calls it, and attaches to the same weights
        self.max_model_len = min(arguments.max_model_len, self.target.facts.max_model_len)

    def _build(self, kind: Kind, name: str, **options: Any) -> Any:
        return self._registry.get(kind, name).build({"name": name, **options})

    def _proposer(self, method: str) -> Proposer:
        return self._build(Kind.PROPOSER, method)

    def _workload(self, group: str) -> Any:
        name, file, category = GROUPS[group]
        return self._build(Kind.WORKLOAD, name, path=str(self.arguments.data / file), category=category, limit=None)

    def engine(self, method: str) -> Engine:
        """A new engine on the loaded target, with nothing learnt; the one before cannot be used any more."""
        scheduler = self._build(
            Kind.SCHEDULER,
            "continuous",
            max_num_seqs=max(self.arguments.batch_sizes),
            max_model_len=self.max_model_len,
        )
        proposer = None if method == PLAIN else self._proposer(method)
        return Engine(self.target, proposer, self._build(Kind.SAMPLER, "standard"), scheduler, self.backend)

    def group(self, name: str) -> Group:
        """The first prompts of a group that fit. Raises `ConfigError` when none does."""
        workload = self._workloads[name]
        has_template = bool(getattr(self.target.tokenizer, "chat_template", None))
        prompts, note = fit_template(workload, workload.load(), has_template)
        taken: list[Prompt] = []
        skipped = 0
        for prompt in _in_turn(prompts):
            if len(taken) == self.arguments.prompts:
                break
            if self._longest(prompt) <= self.max_model_len:
                taken.append(prompt)
            else:
                skipped += 1
        if not taken:
            raise ConfigError(f"no prompt of {name} fits into --max-model-len {self.max_model_len}: raise it.")
        return Group(name, taken, skipped, note)

    def _longest(self, prompt: Prompt) -> int:
        """Tokens at the end of the conversation; earlier answers may take more when they are read again as text."""
        messages: list[dict[str, str]] = []
        for turn in prompt.turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": ""}]
        rendered = messages[:-1] if prompt.chat else prompt.turns[0]
        ids = encode_prompt(self.target.tokenizer, rendered, self.target.facts.vocab_size)
        return len(ids) + self.arguments.max_tokens * (2 * len(prompt.turns) - 1)

    def measure_group(self, group: Group, batch_size: int, listener: Listener) -> list[Row]:
        """All methods, plain decoding first; a method that learns also has a row for its second pass."""
        rows: dict[tuple[str, int], Row] = {}
        differences: dict[tuple[str, int], list[Difference]] = defaultdict(list)
        compared: dict[tuple[str, int], list[tuple[int, int, int]]] = defaultdict(list)
        for repeat in range(self.arguments.repeats):
            expected: Measurement | None = None
            for method in (PLAIN, *self.arguments.methods):
                engine = self.engine(method)
                for number, one in enumerate(self._passes(engine, group, method, batch_size, repeat, listener)):
                    memory = AGAIN if number else COLD
                    rows.setdefault((method, number), Row(group.name, method, batch_size, memory)).add(one)
                    expected = expected or one
                    if method != PLAIN:
                        found = find_differences(engine, expected.outputs, one.outputs, self.sampling)
                        differences[method, number] += found
                        requests, tokens = comparable(expected.outputs, one.outputs)
                        compared[method, number].append((requests, tokens, len(one.outputs) - requests))
        for key, row in rows.items():
            if row.method != PLAIN:
                row.speedup = row.speed / rows[PLAIN, 0].speed
                row.verdict = judge(differences[key], *map(sum, zip(*compared[key], strict=True)))
        return list(rows.values())

    def _passes(
        self, engine: Engine, group: Group, method: str, batch_size: int, repeat: int, listener: Listener
    ) -> Iterator[Measurement]:
        """The measured passes of one engine, behind a warm-up that is forgotten."""
        series = Series(f"{method}, batch {batch_size}", method, batch_size, len(group.prompts), repeat=repeat)
        first = dataclasses.replace(group.prompts[0], turns=group.prompts[0].turns[:1])
        short = dataclasses.replace(self.sampling, max_tokens=min(_WARMUP_TOKENS, self.sampling.max_tokens))
        measure(engine, [first], short, dataclasses.replace(series, warmup=True), listener, seed=0)
        if engine.proposer is not None:
            engine.proposer.reset()
        for _ in range(self.num_passes(method)):
            yield measure(engine, group.prompts, self.sampling, series, listener, seed=0)

    def num_passes(self, method: str) -> int:
        """Measured passes of one engine."""
        return 2 if self.learns.get(method) else 1

    def facts(self) -> dict[str, str]:
        """What ran where."""
        target, backend = self.target.describe(), self.backend.describe()
        return {
            "target": f"{self.arguments.name or self.target.facts.name}, {target['parameters']} parameters, "
            f"{target['dtype']}, weights {target['weights']}",
            "device": f"{backend['device']}, threads {backend.get('threads', 'n/a')}, torch {backend['torch']}",
            "decoding": f"greedy, up to {self.arguments.max_tokens} tokens, context {self.max_model_len}",
            "methods": f"{', '.join(self.arguments.methods)}, each with its default options",
            "repeats": f"{self.arguments.repeats}; speeds are medians over them",
        }


def _in_turn(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The first of each category, then the second of each: MT-Bench's stand one after the other in its file."""
    ranks: dict[str, int] = defaultdict(int)
    keyed = []
    for prompt in prompts:
        keyed.append((ranks[prompt.category], prompt))
        ranks[prompt.category] += 1
    return [prompt for _, prompt in sorted(keyed, key=lambda pair: pair[0])]


# -- command line --------------------------------------------------------------------------------------------------
def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, help="folder or hub id of a causal language model")
    parser.add_argument("--data", required=True, type=Path, help="folder with the prompt files")
    parser.add_argument("--output", required=True, type=Path, help="Markdown file; .png and .json stand beside it")
    parser.add_argument("--name", help="the target's name in the page; without it, its folder's")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), default=list(GROUPS), metavar="GROUP")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), metavar="METHOD")
    parser.add_argument("--prompts", type=int, default=10, help="prompts per group")
    parser.add_argument("--max-tokens", type=int, default=128, help="output tokens per request")
    parser.add_argument("--max-model-len", type=int, default=2048, help="longer prompts are skipped")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 8], help="requests at the same time")
    parser.add_argument("--repeats", type=int, default=1, help="measurements of each; the median speed counts")
    parser.add_argument("--dtype", default="float32", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "rocm"])
    arguments = parser.parse_args(words)
    if min(arguments.prompts, arguments.max_tokens, arguments.repeats, *arguments.batch_sizes) < 1:
        parser.error("--prompts, --max-tokens, --repeats and --batch-sizes must be 1 or more")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Measure and write; 1 when an output differs from plain decoding by more than ties."""
    arguments = parse(words)
    console = Console(stderr=True)
    try:
        bench = Bench(arguments)
        groups = [bench.group(name) for name in arguments.groups]
    except SpecflowError as error:
        console.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        return 2
    passes = arguments.repeats * sum(bench.num_passes(method) for method in (PLAIN, *arguments.methods))
    requests = sum(len(prompt.turns) for group in groups for prompt in group.prompts)
    total = requests * passes * len(arguments.batch_sizes)
    columns = TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn()
    rows: list[Row] = []
    with Progress(*columns, console=console, refresh_per_second=2) as progress:
        listener = Listener(progress, total)
        for count, group in enumerate(groups, start=1):
            for batch_size in arguments.batch_sizes:
                listener.where = group.name
                rows += bench.measure_group(group, batch_size, listener)
            write(arguments.output, bench.facts(), groups[:count], rows)  # what is done is kept
    console.print(f"{arguments.output} and beside it .png and .json", highlight=False, soft_wrap=True)
    return int(not all(row.verdict.passed for row in rows))


if __name__ == "__main__":
    sys.exit(main())
