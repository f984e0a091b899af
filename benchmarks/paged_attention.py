"""Paged attention: Triton kernels against the torch reference and against the bytes they must read.

    python benchmarks/paged_attention.py                        # the table; needs a GPU and triton
    python benchmarks/paged_attention.py --batch 8 --query 1 8 --seq 2048 --no-torch
    python benchmarks/paged_attention.py --sweep                # also other launch shapes, for every case

The default sizes are those of Qwen3-8B: 32 query heads, 8 KV heads of 128 values, bf16, blocks of 16 positions in
random order. Every case is captured as one CUDA graph over several layers' pages, together more than twice the
last-level cache, and timed by events over replays: the time is the device's, without launch overhead of the host.
Bytes are the least that must be read: keys and values of every request once. The reference keeps what it shares
between layers (masks, block lists), as in a step of the engine.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import torch
import triton
from device_timing import copy_bandwidth, median_microseconds

from specflow.core.attention import AttentionInputs, QueryGroup
from specflow.kernels import paged_attention as reference
from specflow.kernels import paged_attention_triton as kernels
from specflow.kernels.paged_attention_triton import LaunchShape

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, AttentionInputs], torch.Tensor]
BLOCK = 16


@dataclass(frozen=True)
class Row:
    """One line of the table; times in microseconds."""

    batch: int
    query: int
    seq: int
    megabytes: float  # least bytes to read
    floor: float  # these bytes at the copy bandwidth
    kernels: float
    torch: float | None
    difference: float  # largest between both results

    @property
    def share(self) -> float:
        """Reached part of the copy bandwidth."""
        return self.floor / self.kernels


@dataclass(frozen=True)
class Case:
    """One step over several layers."""

    query: torch.Tensor  # [T, Hq, D]
    layers: list[tuple[torch.Tensor, torch.Tensor]]  # keys and values [num_blocks, BLOCK, Hkv, D]
    inputs: AttentionInputs
    num_bytes: int  # of one layer's keys and values


def make_case(options: argparse.Namespace, batch: int, query: int, seq: int) -> Case:
    """Random queries, keys and values; blocks in random order."""
    torch.manual_seed(0)
    per_request = -(-seq // BLOCK)
    table = torch.randperm(batch * per_request, device="cuda").view(batch, per_request) + 1
    shape = (batch * per_request + 1, BLOCK, options.kv_heads, options.head_dim)
    num_bytes = 2 * batch * seq * options.kv_heads * options.head_dim * 2
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    layers = [
        (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
            torch.randn(shape, device="cuda", dtype=torch.bfloat16),
        )
        for _ in range(max(2, min(64, -(-2 * cache // num_bytes))))
    ]
    positions = torch.arange(seq - query, seq, device="cuda").repeat(batch)
    inputs = AttentionInputs(
        positions=positions,
        slot_mapping=positions,
        block_table=table,
        seq_len=torch.full((batch,), seq, device="cuda"),
        groups=[QueryGroup(0, batch, 0, query, seq, None)],
    )
    rows = torch.randn(batch * query, options.heads, options.head_dim, device="cuda", dtype=torch.bfloat16)
    return Case(rows, layers, inputs, num_bytes)


def time_of(attend: Attend, case: Case, repeats: int) -> float:
    """Median microseconds of one layer's attention, from replays of a graph over all layers."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        attend(case.query, *case.layers[0], case.inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for pages in case.layers:
            attend(case.query, *pages, case.inputs)
    return median_microseconds(graph.replay, repeats) / len(case.layers)


def by_triton(options: argparse.Namespace, shape: LaunchShape) -> Attend:
    """The kernels, launched in a given shape."""
    scale = options.head_dim**-0.5
    return lambda *tensors: kernels.paged_attention(*tensors, scale=scale, shape=shape)


def measure(options: argparse.Namespace, case: Case, sizes: tuple[int, int, int], bandwidth: float) -> Row:
    """Kernels and reference on one case."""

    def plain(*tensors):
        return reference.paged_attention(*tensors, scale=options.head_dim**-0.5)

    ours = by_triton(options, LaunchShape())
    found, expected = (attend(case.query, *case.layers[0], case.inputs) for attend in (ours, plain))
    floor = case.num_bytes / bandwidth * 1e6
    return Row(
        *sizes,
        megabytes=case.num_bytes / 1e6,
        floor=floor,
        kernels=time_of(ours, case, options.repeats),
        torch=time_of(plain, case, max(3, options.repeats // 3)) if options.torch else None,
        difference=float((found.float() - expected.float()).abs().max()),
    )


def sweep(options: argparse.Namespace, case: Case, row: Row) -> None:
    """Other launch shapes of one case, one change at a time; only those that gain are shown."""
    changes = [{"splits": count} for count in (1, 2, 4, 8, 16, 32, 64)]
    changes += [{"stages": 2}, {"stages": 4}, {"block_n": 32}, {"block_n": 128}, {"warps": 2}, {"warps": 8}]
    changes += [{"block_m": 16}, {"block_m": 64}, {"block_m": 128, "warps": 8}]
    for change in changes:
        try:
            time = time_of(by_triton(options, replace(LaunchShape(), **change)), case, 5)
        except triton.runtime.errors.OutOfResources:
            continue
        if time < 0.97 * row.kernels:
            print(f"    {time:8.1f} µs with {change}", flush=True)


def parse() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--query", nargs="+", type=int, default=[1, 4, 8, 16, 32], help="tokens per request")
    parser.add_argument("--seq", nargs="+", type=int, default=[256, 2048, 16384])
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--torch", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--sweep", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Print the table."""
    options = parse()
    bandwidth = copy_bandwidth(2**29, 8)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; {options.heads} heads, {options.kv_heads} KV heads of "
          f"{options.head_dim}, bf16, blocks of {BLOCK}")  # fmt: skip
    print("| batch | query | seq | MB | floor µs | kernels µs | of copy | torch µs | times faster | difference |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    rows = []
    for batch in options.batch:
        for seq in options.seq:
            for query in options.query:
                case = make_case(options, batch, query, seq)
                rows.append(measure(options, case, (batch, query, seq), bandwidth))
                print(_line(rows[-1]), flush=True)
                if options.sweep:
                    sweep(options, case, rows[-1])
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(row) for row in rows], file, indent=1)


def _line(row: Row) -> str:
    slow = "–" if row.torch is None else f"{row.torch:.0f}"
    times = "–" if row.torch is None else f"{row.torch / row.kernels:.1f}"
    return (
        f"| {row.batch} | {row.query} | {row.seq} | {row.megabytes:.1f} | {row.floor:.1f} | {row.kernels:.1f} "
        f"| {100 * row.share:.0f} % | {slow} | {times} | {row.difference:.1e} |"
    )


if __name__ == "__main__":
    main()
