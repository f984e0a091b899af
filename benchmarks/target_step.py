"""The target's pass of a decoding step, alone: milliseconds by part, and the share of the memory's bandwidth.

    python benchmarks/target_step.py FOLDER                      # a folder with config.json; needs a GPU and triton
    python benchmarks/target_step.py FOLDER --linears torch      # without our kernels for products
    python benchmarks/target_step.py FOLDER --tune               # launch shapes of them, product by product
    python benchmarks/target_step.py FOLDER --sweep              # the same in the whole pass, one product changed

Weights are random (load_format=dummy). Every case is one CUDA graph of the pass as the engine runs it (layers, final
norm, output head at every token), replayed with all requests at the given context; median of the replays by device
events. Parts: `linears` is a graph of the products alone, the gate included; `attention` is what the pass costs more
than one that skips the attention kernel; `others` is the rest. `torch` is the joined products alone by
torch.nn.functional.linear. Bytes are the weights and the keys and values, read once; their share is of the bandwidth
that a large device-to-device copy reaches in the same run.
"""

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
import torch.nn.functional as F
import triton
from device_timing import copy_bandwidth

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.core.batch import PackedBatch
from specflow.core.limits import EngineLimits
from specflow.kernels.few_rows_triton import FewRowsShape
from specflow.kernels.many_rows import ManyRowsShape
from specflow.targets.base import Taps
from specflow.targets.gpu_layers import GpuLayers
from specflow.targets.hf import HfOptions, HfTarget
from specflow.targets.linear_choice import BUCKETS, FEW, PRODUCTS, Choices, LinearShape, time_of, trial_of
from specflow.targets.linears import Linears

BLOCK = 16


@dataclass(frozen=True)
class Row:
    """One line of the table; times in milliseconds."""

    batch: int
    query: int
    total: float
    linears: float
    attention: float
    torch: float
    gigabytes: float
    share: float  # of the copy bandwidth

    @property
    def others(self) -> float:
        """What is neither."""
        return self.total - self.linears - self.attention


def load(options: argparse.Namespace) -> HfTarget:
    """The model with random weights, attached to pages for the largest case."""
    begun = time.perf_counter()
    target = HfTarget(HfOptions(path=options.folder, dtype=options.dtype, load_format="dummy", linears=options.linears))
    target.load(SimpleNamespace(device=torch.device("cuda"), name="cuda"))
    per_request = -(-(options.context + max(options.query)) // BLOCK)
    limits = EngineLimits(
        max_num_seqs=max(options.batch),
        max_model_len=options.context + max(options.query),
        max_num_batched_tokens=4096,
        block_size=BLOCK,
        num_blocks=1 + max(options.batch) * per_request,
        num_speculative_tokens=max(options.query) - 1,
        lookahead_tokens=0,
        vocab_size=target.facts.vocab_size,
        device=torch.device("cuda"),
        dtype=target.facts.dtype,
        paged_kernels=target.facts.paged_kernels,
    )
    torch.cuda.synchronize()
    print(f"loaded in {time.perf_counter() - begun:.1f} s", flush=True)
    target.attach(limits, Taps())
    for key in ("target", "dtype", "layers", "products of few rows", "attention proof"):
        print(f"  {key}: {target.describe()[key]}", flush=True)
    return target


def make_batch(target: HfTarget, batch: int, query: int, context: int) -> PackedBatch:
    """All requests with `query` tokens up to position context - 1; blocks in random order."""
    torch.manual_seed(0)
    per_request = -(-context // BLOCK)
    table = torch.randperm(batch * per_request, device="cuda").view(batch, per_request) + 1
    positions = torch.arange(context - query, context, device="cuda").repeat(batch)
    owners = torch.arange(batch, device="cuda").repeat_interleave(query)
    starts = torch.arange(batch + 1, device="cuda") * query
    return PackedBatch(
        token_ids=torch.randint(target.facts.vocab_size, (batch * query,), device="cuda"),
        positions=positions,
        slots=torch.arange(batch, device="cuda"),
        query_start=starts,
        logit_rows=torch.arange(batch * query, device="cuda"),
        attention=AttentionInputs(
            positions=positions,
            slot_mapping=table[owners, positions // BLOCK] * BLOCK + positions % BLOCK,
            block_table=table,
            seq_len=torch.full((batch,), context, device="cuda"),
            groups=[QueryGroup(0, batch, 0, query, context, None)],
            query_start=starts,
        ),
        query_len_host=np.full(batch, query),
    )


def without_attention(target: HfTarget) -> None:
    """Let the layers run on with the queries where attention's result would be."""
    pages: Any = target._attention
    pages.leave(target.model)
    pages._kernels = replace(pages._kernels, attend=lambda query, *_, **__: query)
    pages.enter(target.model)


def products_alone(layers: GpuLayers, head: torch.Tensor, rows: int, by_torch: bool) -> Callable[[], None]:
    """All products of a pass on random values, without anything that depends on another."""
    first = layers.layers[0]

    def new(columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, device="cuda", dtype=first.qkv.dtype)

    hidden, mixed, wide = new(first.qkv.shape[1]), new(first.output.shape[1]), new(first.down.shape[1])
    linears = Linears(layers.ops.gated_silu)
    linears.choices = Choices() if by_torch else layers.linears.choices

    def run() -> None:
        for layer in layers.layers:
            linears.product("qkv", hidden, layer.qkv)
            linears.product("output", mixed, layer.output)
            if by_torch:
                F.linear(hidden, layer.gate_up)
            else:
                linears.gated(hidden, layer.gate_up)
            linears.product("down", wide, layer.down)
        linears.product("head", hidden, head)

    return run


def measure(options: argparse.Namespace, target: HfTarget, bandwidth: float) -> list[Row]:
    """All cases; those without attention last, for that cannot be undone."""
    layers, head = target._fused, target.token_tables().head
    assert isinstance(layers, GpuLayers), "the layers are not fused, see above"
    weights = sum(one.nbytes for layer in layers.layers for one in (layer.qkv, layer.output, layer.gate_up, layer.down))
    cases = [(batch, query) for batch in options.batch for query in options.query]
    totals = [_pass_time(options, target, *case) for case in cases]
    without_attention(target)
    rest = [_pass_time(options, target, *case) for case in cases]
    rows = []
    for (batch, query), total, bare in zip(cases, totals, rest, strict=True):
        num_bytes = weights + head.nbytes + batch * options.context * target.facts.kv_bytes_per_token
        times = {
            by_torch: time_of(products_alone(layers, head, batch * query, by_torch), options.repeats)
            for by_torch in (False, True)
        }
        share = num_bytes / bandwidth / (total * 1e-3)
        rows.append(Row(batch, query, total, times[False], total - bare, times[True], num_bytes / 1e9, share))
        print(_line(rows[-1]), flush=True)
    return rows


def _pass_time(options: argparse.Namespace, target: HfTarget, batch: int, query: int) -> float:
    packed = make_batch(target, batch, query, options.context)
    return time_of(lambda: target.forward(packed), options.repeats)


def _line(row: Row) -> str:
    numbers = (row.total, row.linears, row.attention, row.others, row.torch)
    times = " | ".join(f"{number:.2f}" for number in numbers)
    return f"| {row.batch} | {row.query} | {times} | {row.gigabytes:.1f} | {100 * row.share:.0f} % |"


def shapes_to_try(name: str, rows: int) -> Iterator[LinearShape]:
    """Launch shapes of a product that are worth a measurement."""
    if rows > FEW[-1]:
        for panel, panels, block_k, split in itertools.product((16, 32, 64, 128), (1, 3), (64, 128), (1, 2)):
            groups = 1 if rows <= 64 else 2
            shape = ManyRowsShape(groups=groups, panel=panel, panels=panels, block_k=block_k, split=split)
            tile = (shape.block_m + shape.block_n) * block_k * 2
            if shape.block_n <= 192:  # the sums of four warps must find room in their registers
                yield replace(shape, stages=min(14, 225 * 1024 // tile))
        return
    streams = (
        ((32, 128, 3), (32, 128, 4), (32, 256, 2), (16, 256, 2), (16, 256, 3), (64, 128, 2), (64, 128, 3))
        if name == "gate_up"
        else ((16, 256, 4), (16, 256, 6), (16, 256, 8), (16, 256, 12), (32, 256, 4), (32, 256, 6), (32, 256, 8))
    )
    for block_n, block_k, stages in streams:
        for early in (False, True):
            warps = block_n // 16
            yield FewRowsShape(
                block_n=block_n, block_k=block_k, warps=warps, stages=stages, next_early=early, stream=True
            )
    for block_n, block_k, warps, stages in (
        (16, 256, 2, 4), (16, 256, 2, 6), (16, 512, 2, 4), (16, 512, 4, 4), (16, 256, 1, 6), (32, 256, 2, 4),
        (32, 256, 4, 4), (64, 128, 4, 4), (16, 128, 1, 8),
    ):  # fmt: skip
        yield FewRowsShape(block_n=block_n, block_k=block_k, warps=warps, stages=stages)


def sweep(options: argparse.Namespace, target: HfTarget) -> list[dict[str, Any]]:
    """The whole pass with one product in another launch shape, or by torch: what a product alone cannot show."""
    layers, head = target._fused, target.token_tables().head.detach()
    assert isinstance(layers, GpuLayers)
    chosen, found = layers.linears.choices, []
    cases = [(batch, query) for batch in options.batch for query in options.query if batch * query <= FEW[-1]]
    for name in PRODUCTS:
        weight = head if name == "head" else getattr(layers.layers[0], name)
        for shape in (None, *shapes_to_try(name, FEW[-1])):
            layers.linears.choices = chosen
            trials = [trial_of(name, rows, weight, layers.ops.gated_silu, shape) for rows in FEW] if shape else []
            if not all(trial.agrees() for trial in trials):
                continue
            for bucket in FEW:
                layers.linears.choices = layers.linears.choices.replaced([(name, shape)], bucket)
            times = [_pass_time(options, target, *case) for case in cases]
            print(f"{name}: {' '.join(f'{one:.3f}' for one in times)}  {shape or 'torch'}", flush=True)
            found.append({"name": name, "shape": shape and asdict(cast(Any, shape)), "cases": cases, "times": times})
    layers.linears.choices = chosen
    return found


def tune(target: HfTarget) -> list[dict[str, Any]]:
    """Times of every product in every launch shape; prints torch's and the best ones."""
    layers = target._fused
    assert isinstance(layers, GpuLayers)
    head = target.token_tables().head.detach()
    return [_tune_one(name, rows, layers, head) for name in PRODUCTS for rows in BUCKETS]


def _tune_one(name: str, rows: int, layers: GpuLayers, head: torch.Tensor) -> dict[str, Any]:
    weights = [head] if name == "head" else [getattr(layer, name) for layer in layers.layers[:8]]
    shapes = [one for one in shapes_to_try(name, rows) if one.fits(weights[0], name == "gate_up")]
    trials = [trial_of(name, rows, weights[0], layers.ops.gated_silu, shape) for shape in shapes]
    with ThreadPoolExecutor(14) as pool:  # compiles
        errors = list(pool.map(lambda trial: trial.error(), trials))

    def micros(product: Callable[[torch.Tensor], torch.Tensor]) -> float:
        return 1e3 * time_of(lambda: [product(weight) for weight in weights]) / len(weights)

    times = [(micros(trial.ours), error, trial.shape) for trial, error in zip(trials, errors, strict=True) if error < 1]
    by_torch, floor = micros(trials[0].reference), weights[0].nbytes / 4.8e12 * 1e6
    print(f"{name}, {rows} rows: torch {by_torch:.1f} µs, at 4.8 TB/s {floor:.1f} µs")
    for time_, error, shape in sorted(times, key=lambda one: one[0])[:4]:
        print(f"    {time_:7.1f} µs  error {error:.0e}  {shape}", flush=True)
    ours = [(time_, error, asdict(cast(Any, shape))) for time_, error, shape in times]
    return {"name": name, "rows": rows, "torch": by_torch, "ours": ours}


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="holds config.json")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--query", nargs="+", type=int, default=[1, 4, 16], help="tokens per request")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--linears", choices=["auto", "torch"], default="auto")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Print the table, or what tuning found."""
    options = parse()
    bandwidth = copy_bandwidth(2**28, 8)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, copy bandwidth "
          f"{bandwidth / 1e12:.2f} TB/s")  # fmt: skip
    target = load(options)
    if options.tune or options.sweep:
        result: Any = tune(target) if options.tune else sweep(options, target)
    else:
        print(f"context {options.context}; milliseconds\n"
              "| batch | query | pass | linears | attention | others | torch's linears | GB | of copy |\n"
              "|---|---|---|---|---|---|---|---|---|")  # fmt: skip
        result = [asdict(row) | {"others": row.others} for row in measure(options, target, bandwidth)]
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"bandwidth": bandwidth, "rows": result}, file, indent=1)


if __name__ == "__main__":
    main()
