"""Rejection kernels against the torch path and against the bytes they must move.

    python benchmarks/rejection_kernels.py                       # the table of docs/kernels.md; needs a GPU and triton
    python benchmarks/rejection_kernels.py --batch 64 --k 7 --no-torch --block 4096
    python benchmarks/rejection_kernels.py --sweep               # also other launch shapes, and every launch alone

Every case is captured as one CUDA graph that verifies a ring of different inputs, more than the last-level cache
holds and at least 12, and timed by events over replays: the time is the device's, without launch overhead of the host.
(The start of a replay takes 4 to 6 microseconds, which are shared by the calls of the ring.) Bytes are the
least that must be read: every row that judges a draft or gives a token once (twice where the draft was rejected), and
for probabilistic drafts their laws in the same way. Acceptance of the generated drafts is measured and counted in.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
import triton
from device_timing import copy_bandwidth, median_microseconds

from specflow.core.draft import Verdict, VerifyInputs
from specflow.kernels.rejection import pipeline as pipeline_module
from specflow.kernels.rejection.pipeline import RejectionPipeline
from specflow.kernels.rejection.workspace import LaunchShape, launch_shape
from specflow.samplers.standard import StandardOptions, StandardSampler

SHAPE_OPTIONS = tuple(field.name for field in fields(LaunchShape))
MODES = ("greedy", "one-hot", "probabilistic")
Verify = Callable[[torch.Tensor, VerifyInputs], Verdict]
Case = tuple[torch.Tensor, VerifyInputs]


@dataclass(frozen=True)
class Row:
    """One line of the table; times in microseconds."""

    mode: str
    batch: int
    k: int
    accepted: float  # mean accepted drafts of a request
    megabytes: float  # least bytes to read
    floor: float  # these bytes at the copy bandwidth
    kernels: float
    torch: float | None

    @property
    def share(self) -> float:
        """Reached part of the copy bandwidth."""
        return self.floor / self.kernels


def make_case(mode: str, batch: int, k: int, vocab: int, seed: int) -> Case:
    """Random logits like a model's (a few likely ids above a wide bulk); drafts that are often right."""
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = batch * (k + 1)
    logits = torch.randn(rows, vocab, generator=generator, device="cuda") * 2
    logits.scatter_add_(1, *_peaks(rows, vocab, generator))
    steps = logits.view(batch, k + 1, vocab)[:, :k]
    draft_logits = None
    if mode == "probabilistic":
        draft_logits = (steps + 1.5 * torch.randn(steps.shape, generator=generator, device="cuda")).to(torch.bfloat16)
        draws = torch.multinomial(draft_logits.float().flatten(0, 1).softmax(-1), 1, generator=generator)
        draft_ids = draws.view(batch, k)
    else:
        draft_ids = steps.argmax(-1)
    wrong = torch.rand(draft_ids.shape, generator=generator, device="cuda") < 0.15
    anything = torch.randint(vocab, draft_ids.shape, generator=generator, device="cuda")
    ints = torch.arange(batch + 1, device="cuda")
    heat = 0.0 if mode == "greedy" else 1.0
    return logits.to(torch.bfloat16), VerifyInputs(
        cu_rows=ints * (k + 1),
        draft_ids=torch.where(wrong & (mode != "probabilistic"), anything, draft_ids),
        num_drafts=torch.full((batch,), k, device="cuda"),
        positions=ints[:-1] + 100 * seed,
        temperature=torch.full((batch,), heat, device="cuda"),
        seeds=ints[:-1] * 7919 + seed,
        rounds=torch.zeros_like(ints[:-1]),
        draft_logits=draft_logits,
        all_greedy=mode == "greedy",
    )


def _peaks(rows: int, vocab: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and additions of eight likely tokens per row; the first carries most of the mass."""
    ids = torch.randint(vocab, (rows, 8), generator=generator, device="cuda")
    heights = 10 - 1.5 * torch.arange(8, device="cuda") + torch.randn(rows, 8, generator=generator, device="cuda")
    heights[:, 0] += 8
    return ids, heights


def least_bytes(case: Case, verdict: Verdict) -> int:
    """Bytes that any implementation of this split has to read; outputs and statistics are a thousandth of that."""
    logits, inputs = case
    row = logits.shape[1] * logits.element_size()
    drafts, batch = int(inputs.num_drafts.sum()), len(inputs.num_drafts)
    if inputs.all_greedy:
        return (drafts + batch) * row
    total = (drafts + batch) * row
    if inputs.draft_logits is not None:
        rejected = int((verdict.num_accepted < inputs.num_drafts).sum())
        total += (drafts + rejected) * logits.shape[1] * inputs.draft_logits.element_size()
    return total


def time_of(verify: Verify, cases: Sequence[Case], repeats: int) -> float:
    """Median microseconds of one verification, from replays of a graph over all cases."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for case in cases[:2]:
            verify(*case)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [verify(*case) for case in cases]
    return median_microseconds(graph.replay, repeats, 3) / len(kept)


def ring(mode: str, batch: int, k: int, vocab: int, cache_bytes: int) -> list[Case]:
    """Enough different inputs to outgrow the cache twice and to share the start of a replay, 12 to 96 of them."""
    rows = batch * (k + 1) + (batch * k if mode == "probabilistic" else 0)
    count = max(12, min(96, -(-2 * cache_bytes // (rows * vocab * 2))))
    return [make_case(mode, batch, k, vocab, seed) for seed in range(count)]


def measure(mode: str, batch: int, k: int, options: argparse.Namespace, bandwidth: float) -> Row:
    """Kernels and torch path on one ring of inputs."""
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    cases = ring(mode, batch, k, options.vocab, cache)
    plain = StandardSampler(StandardOptions())
    exact = [(logits, with_float_laws(inputs)) for logits, inputs in cases]  # the torch path's contract
    verdicts = [plain.verify(*case) for case in exact]
    needed = statistics.mean(least_bytes(*pair) for pair in zip(cases, verdicts, strict=True))
    accepted = statistics.mean(float(verdict.num_accepted.double().mean()) for verdict in verdicts)
    torch_time = time_of(plain.verify, exact, options.repeats) if options.torch else None
    pipeline = RejectionPipeline(shape=shape_from(options, batch * (k + 1)))
    check(pipeline, cases, verdicts)
    kernels = time_of(pipeline.verify, cases, options.repeats)
    return Row(mode, batch, k, accepted, needed / 1e6, needed / bandwidth * 1e6, kernels, torch_time)


def with_float_laws(inputs: VerifyInputs) -> VerifyInputs:
    """The same draft laws in float32."""
    return inputs if inputs.draft_logits is None else replace(inputs, draft_logits=inputs.draft_logits.float())


def check(pipeline: RejectionPipeline, cases: Sequence[Case], verdicts: Sequence[Verdict]) -> None:
    """The kernels must emit the torch path's tokens; a difference is counted and shown, never hidden."""
    pairs = zip(cases, verdicts, strict=True)
    wrong = sum(int((pipeline.verify(*case).token_ids != verdict.token_ids).any(1).sum()) for case, verdict in pairs)
    if wrong:
        print(f"{wrong} of {len(cases) * len(verdicts[0].num_emitted)} requests differ from the torch path")


def shape_from(options: argparse.Namespace, num_rows: int) -> LaunchShape:
    """The default shape with what the command line changes."""
    given = {name: getattr(options, name) for name in SHAPE_OPTIONS if getattr(options, name) is not None}
    return replace(launch_shape(num_rows), **given)


def sweep(options: argparse.Namespace, batch: int, k: int, bandwidth: float) -> None:
    """Launch shapes one after the other on one ring of inputs per mode; each has to emit the torch path's tokens."""
    print(f"\nlaunch shapes, batch {batch}, K = {k}: microseconds, part of the copy bandwidth")
    for mode in options.mode:
        cases = ring(mode, batch, k, options.vocab, torch.cuda.get_device_properties(0).L2_cache_size)
        plain = StandardSampler(StandardOptions())
        verdicts = [plain.verify(logits, with_float_laws(inputs)) for logits, inputs in cases]
        floor = statistics.mean(least_bytes(*pair) for pair in zip(cases, verdicts, strict=True)) / bandwidth * 1e6
        times = {}
        for shape in shapes_to_try(shape_from(options, batch * (k + 1)), mode):
            pipeline = RejectionPipeline(shape=shape)
            check(pipeline, cases[:2], verdicts[:2])
            times[shape] = time_of(pipeline.verify, cases, 8)
            share = 100 * floor / times[shape]
            print(f"  {mode:13} {times[shape]:6.1f}  {share:3.0f} %  {differences(shape)}", flush=True)
        best = min(times, key=lambda shape: times[shape])
        print(f"  {mode:13} best: {times[best]:.1f}  {differences(best)}")


def shapes_to_try(base: LaunchShape, mode: str) -> list[LaunchShape]:
    """The given shape and what changes it: block and warps together, else one thing."""
    blocks = ((2048, 1, 2), (4096, 2, 4), (4096, 4, 4), (4096, 8, 8), (8192, 4, 8), (8192, 8, 8), (16384, 8, 16))
    changes: list[dict[str, Any]] = [{}, {"evict_first": not base.evict_first}, {"overlap": not base.overlap}]
    changes += [{"finish_warps": warps} for warps in (2, 4)]
    changes += [{"block": block, "stats_warps": stats, "masses_warps": masses} for block, stats, masses in blocks]
    if mode == "probabilistic":
        changes += [{"masses_warps": 2}, {"masses_warps": 8}]
    return list(dict.fromkeys(replace(base, **change) for change in changes))


def differences(shape: LaunchShape) -> str:
    """What a shape has that the default has not."""
    default = asdict(LaunchShape())
    changed = [f"{name}={value}" for name, value in asdict(shape).items() if value != default[name]]
    return ", ".join(changed) or "default"


def breakdown(options: argparse.Namespace, batch: int, k: int) -> None:
    """Time of each launch alone, the others left out, on what a whole call has left in the buffers."""
    print(f"\neach launch alone, batch {batch}, K = {k}: microseconds")
    for mode in options.mode:
        cases = ring(mode, batch, k, options.vocab, torch.cuda.get_device_properties(0).L2_cache_size)
        pipeline = RejectionPipeline(shape=shape_from(options, batch * (k + 1)))
        together = time_of(pipeline.verify, cases, options.repeats)
        names = [
            "block_stats_kernel",
            *(["reject_kernel", "masses_kernel"] if mode == "probabilistic" else []),
            "finish_kernel",
        ]
        parts = [f"{name} {_alone(name, pipeline, cases, options.repeats):.1f}" for name in names]
        print(f"  {mode:13} {', '.join(parts)}; all {together:.1f}", flush=True)


def _alone(name: str, pipeline: RejectionPipeline, cases: Sequence[Case], repeats: int) -> float:
    launch = pipeline_module._run

    def only(kernel: Any, *arguments: Any, **named: Any) -> None:
        if kernel.fn.__name__ == name:
            launch(kernel, *arguments, **named)

    pipeline_module._run = only
    try:
        return time_of(pipeline.verify, cases, repeats)
    finally:
        pipeline_module._run = launch


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 64])
    parser.add_argument("--k", nargs="+", type=int, default=[3, 7, 15])
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--bandwidth", type=float, help="bytes per second of a copy; measured when not given")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--sweep", action="store_true", help="then each launch alone and other shapes, smallest K")
    for name in SHAPE_OPTIONS:
        flag = isinstance(getattr(LaunchShape(), name), bool)
        extra: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if flag else {"type": int}
        parser.add_argument(f"--{name.replace('_', '-')}", default=None, **extra)
    return parser.parse_args()


def main() -> None:
    """Print the table."""
    options = parse()
    bandwidth = options.bandwidth or copy_bandwidth(2**30, 10, 3)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s, vocabulary {options.vocab}, bf16 logits")
    print("| drafts | batch | K | accepted | MB | floor µs | kernels µs | of copy | torch µs | times faster |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for mode in options.mode:
        for batch in options.batch:
            for k in options.k:
                rows.append(measure(mode, batch, k, options, bandwidth))
                print(_line(rows[-1]), flush=True)
    if options.sweep:
        for k in sorted({min(options.k), max(options.k)}):
            breakdown(options, max(options.batch), k)
        for batch in sorted({min(options.batch), max(options.batch)}, reverse=True):
            sweep(options, batch, min(options.k), bandwidth)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


def _line(row: Row) -> str:
    slow = "–" if row.torch is None else f"{row.torch:.0f}"
    times = "–" if row.torch is None else f"{row.torch / row.kernels:.1f}"
    return (
        f"| {row.mode} | {row.batch} | {row.k} | {row.accepted:.1f} | {row.megabytes:.1f} | {row.floor:.1f} "
        f"| {row.kernels:.1f} | {100 * row.share:.0f} % | {slow} | {times} |"
    )


if __name__ == "__main__":
    main()
