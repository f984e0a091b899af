"""Choosing, by measurement, which products of a few rows our kernel runs, and in which launch shape.

What a product costs alone says little: the next one begins while it drains. So some layers run one after the other,
with everything but attention, as a graph. Beginning with torch's products, or with ours where these are faster all
together, one product after the other tries every launch shape, and torch, and keeps what made the whole chain fastest.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from specflow.kernels.few_rows_triton import FewRowsShape
    from specflow.targets.gpu_layers import GpuLayer, LayerOps
    from specflow.targets.linears import Linears

BUCKETS = (1, 8, 16)
PRODUCTS = ("qkv", "output", "gate_up", "down", "head")
_CHAIN_BYTES = 2**31  # of weights in a chain, of which no cache keeps anything
_LEAST_GAIN = 0.003  # of the chain's time; less is noise
_MOST_ERROR = {
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}  # of a product, relative to its largest number


@dataclass(frozen=True)
class Choices:
    """Launch shapes of the products that our kernel runs, by name and most rows."""

    shapes: dict[str, dict[int, "FewRowsShape"]] = field(default_factory=dict)

    def shape(self, name: str, rows: int) -> "FewRowsShape | None":
        """For a product of so many rows; None = torch runs it."""
        known = self.shapes.get(name)
        if not known or rows > BUCKETS[-1]:
            return None
        return known.get(next(bucket for bucket in BUCKETS if rows <= bucket))

    def any(self, name: str) -> bool:
        """Whether our kernel runs this product for any number of rows."""
        return bool(self.shapes.get(name))

    def __str__(self) -> str:
        if not any(self.shapes.values()):
            return "torch"
        parts = [f"{name} {', '.join(map(str, sorted(self.shapes[name])))}" for name in PRODUCTS if self.any(name)]
        return f"own kernel up to so many rows: {'; '.join(parts)}; else torch"

    def replaced(self, changes: Iterable[tuple[str, "FewRowsShape | None"]], rows: int) -> "Choices":
        """The same, but for these products and this bucket; None hands a product back to torch."""
        shapes = dict(self.shapes)
        for name, shape in changes:
            others = {bucket: kept for bucket, kept in shapes.pop(name, {}).items() if bucket != rows}
            if others or shape is not None:
                shapes[name] = others if shape is None else others | {rows: shape}
        return Choices(shapes)


def candidates(name: str, rows: int, device: torch.device) -> tuple["FewRowsShape", ...]:
    """Launch shapes of a product that were good on an H200 at the sizes of Qwen3-8B (benchmarks/target_step.py --tune
    and --sweep), the best first."""
    from specflow.kernels.few_rows_triton import FewRowsShape
    from specflow.kernels.launch_overlap import early_start

    by_triton = (
        FewRowsShape(block_n=32, block_k=256, warps=2, stages=4),
        FewRowsShape(block_n=32, block_k=256, warps=2, stages=4, next_early=True),
        FewRowsShape(block_n=16, block_k=256, warps=2, stages=4),
        FewRowsShape(block_n=64, block_k=128, warps=4, stages=4),
    )
    if not early_start(device):
        return by_triton
    if name == "gate_up":
        wide = FewRowsShape(block_n=32, block_k=128, warps=2, stages=4 if rows == 1 else 3, stream=True)
        narrow = FewRowsShape(block_n=16, block_k=256, warps=1, stages=3, stream=True)
        return wide, replace(wide, next_early=True), narrow, by_triton[0]
    # Rings are as large as leaves room for a program of the next product; the values of one row take none of it.
    rings = ((16, 12), (16, 8), (32, 4), (32, 8)) if rows == 1 else ((32, 4), (32, 6), (16, 4), (16, 6))
    streams = [FewRowsShape(block_n=high, block_k=256, warps=high // 16, stages=s, stream=True) for high, s in rings]
    return *streams, by_triton[0]


def can_measure(like: torch.Tensor) -> bool:
    """Whether weights like this are of a kind that our kernel may run: on a GPU, in half precision."""
    return like.is_cuda and like.dtype in (torch.float16, torch.bfloat16)


@torch.inference_mode()
def choose_shapes(
    linears: "Linears",
    layers: Sequence["GpuLayer"],
    head: torch.Tensor | None,
    ops: "LayerOps",
    buckets: Sequence[int] = BUCKETS,
) -> Choices:
    """Measure all products of a model; nothing is chosen off a GPU and in float32. head [V, E]: None if it is none of
    ours; buckets: some of `BUCKETS`. Leaves `linears` with what it returns."""
    like = layers[0].qkv
    linears.choices = Choices()
    if not can_measure(like):
        return linears.choices
    names = PRODUCTS if head is not None else PRODUCTS[:-1]
    some = list(_some_layers(layers))
    for rows in buckets:
        run = chain(linears, some, head, rows, ops)
        best = time_of(run)
        right = _right_ones(names, rows, layers, head, linears)
        for changes in _changes(names, right):
            before = linears.choices
            linears.choices = before.replaced(changes, rows)
            if linears.choices == before:
                continue
            time = time_of(run)
            if time < best * (1 - _LEAST_GAIN):
                best = time
            else:
                linears.choices = before
    return linears.choices


def _changes(
    names: Sequence[str], right: Sequence[tuple[str, "FewRowsShape"]]
) -> Iterator[Sequence[tuple[str, "FewRowsShape | None"]]]:
    """What to try, in this order: everything ours, for products that begin early gain from one another; then product
    by product."""
    yield list(dict(reversed(right)).items())  # the first of each product
    for name in names:
        yield from ([(name, shape)] for known, shape in right if known == name)
        yield [(name, None)]


def _some_layers(layers: Sequence["GpuLayer"]) -> Iterator["GpuLayer"]:
    total = 0
    for layer in layers:
        if total < _CHAIN_BYTES:
            total += layer.qkv.nbytes + layer.output.nbytes + layer.gate_up.nbytes + layer.down.nbytes
            yield layer


def chain(
    linears: "Linears", layers: Sequence["GpuLayer"], head: torch.Tensor | None, rows: int, ops: "LayerOps"
) -> Callable[[], torch.Tensor]:
    """These layers on random values, one after the other, without attention; then the head."""
    first = layers[0]
    values = _random(rows, first.gate_up)

    def run() -> torch.Tensor:
        stream, normed = ops.add_rms_norm(None, values, first.post_norm.weight, first.post_norm.eps)
        for layer in layers:
            # The first layer of a head reads two norms side by side.
            read = normed.repeat(1, layer.qkv.shape[1] // normed.shape[1]) if layer is first else normed
            mixed = linears.product("qkv", read, layer.qkv, layer.qkv_bias).flatten()[: rows * layer.output.shape[1]]
            delta = linears.product("output", mixed.view(rows, -1), layer.output)
            stream, normed = ops.add_rms_norm(delta, stream, layer.post_norm.weight, layer.post_norm.eps)
            delta = linears.product("down", linears.gated(normed, layer.gate_up), layer.down)
            stream, normed = ops.add_rms_norm(delta, stream, layer.post_norm.weight, layer.post_norm.eps)
        return normed if head is None else linears.product("head", normed, head)

    return run


def _random(rows: int, weight: torch.Tensor) -> torch.Tensor:
    """Inputs [rows, K] of a weight [N, K]."""
    generator = torch.Generator(weight.device).manual_seed(rows)
    return torch.randn(rows, weight.shape[1], device=weight.device, dtype=weight.dtype, generator=generator)


def _right_ones(
    names: Sequence[str], rows: int, layers: Sequence["GpuLayer"], head: torch.Tensor | None, linears: "Linears"
) -> list[tuple[str, "FewRowsShape"]]:
    """Products and launch shapes that compile on this device and agree with torch; the compiling is done side by
    side."""
    trials, on_gpu = [], layers[0].qkv.is_cuda
    for name in names:
        weights: Any = [head] if name == "head" else [getattr(layer, name) for layer in layers]
        aligned = all(weight.data_ptr() % 16 == 0 for weight in weights)
        shapes = [one for one in candidates(name, rows, weights[0].device) if aligned or not one.stream]
        trials += [trial_of(name, rows, weights[0], linears.gated_silu, shape) for shape in shapes]
    with ThreadPoolExecutor(8 if on_gpu else 1) as pool:  # Triton's interpreter knows one thread only
        right = list(pool.map(lambda trial: trial.agrees(), trials))
    return [(trial.name, trial.shape) for trial, good in zip(trials, right, strict=True) if good]


@dataclass(frozen=True)
class Trial:
    """One product on random values."""

    name: str
    shape: "FewRowsShape"
    weight: torch.Tensor
    ours: Callable[[torch.Tensor], torch.Tensor]  # of a weight
    reference: Callable[[torch.Tensor], torch.Tensor]

    @torch.inference_mode()
    def error(self) -> float:
        """Largest difference from torch over the largest number; infinite where our kernel does not run."""
        try:
            found = self.ours(self.weight).double()
        except torch.OutOfMemoryError:
            raise
        except Exception:  # a compiler refuses in many ways, and torch runs everywhere
            return float("inf")
        expected = self.reference(self.weight).double()
        return float((found - expected).abs().max() / expected.abs().max())

    def agrees(self) -> bool:
        """Whether rounding explains the difference."""
        return self.error() <= _MOST_ERROR[self.weight.dtype]


def trial_of(
    name: str,
    rows: int,
    weight: torch.Tensor,
    gated_silu: Callable[[torch.Tensor], torch.Tensor],
    shape: "FewRowsShape",
) -> Trial:
    """A product of so many rows."""
    from specflow.kernels.few_rows import few_rows_linear as reference
    from specflow.kernels.few_rows_triton import few_rows_linear

    values = _random(rows, weight)
    gated = name == "gate_up"

    def by_torch(weight: torch.Tensor) -> torch.Tensor:
        product = reference(values, weight)
        return gated_silu(product) if gated else product

    return Trial(
        name, shape, weight, lambda weight: few_rows_linear(values, weight, gated=gated, shape=shape), by_torch
    )


@torch.inference_mode()
def time_of(work: Callable[[], object], repeats: int = 9) -> float:
    """Median milliseconds of replays of a graph of `work`."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])
