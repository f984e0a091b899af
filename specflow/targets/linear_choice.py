"""Choosing, by measurement, which products of up to 128 rows our kernels run, and in which launch shape.

What a product costs alone says little: the next launch begins while it drains. So some layers run one after the other
as a graph, attention over a few hundred keys included. Beginning with torch's products, or with ours where these are
faster all together, one product after the other tries every launch shape, and torch, and keeps what made the whole
chain fastest.
"""

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch

from specflow.kernels.many_rows import ManyRowsShape
from specflow.kernels.triton_choice import has_group_products

if TYPE_CHECKING:
    from specflow.targets.gpu_layers import GpuLayer, LayerOps
    from specflow.targets.linears import Linears

FEW = (1, 8, 16)  # rows up to which a product's time is that of its weights alone
BUCKETS = (*FEW, 32, 64, 128)  # beyond, torch's products reach what a GPU's power allows
PRODUCTS = ("qkv", "output", "gate_up", "down", "head")
_CHAIN_BYTES = 2**31  # of weights in a chain, of which no cache keeps anything
_LEAST_GAIN = 0.003  # of the chain's time; less is noise
_MOST_ERROR = {
    torch.float32: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 3e-2,
}  # of a product, relative to its largest number


Mix = Callable[[torch.Tensor], torch.Tensor]  # what a layer does between its first two products


class LinearShape(Protocol):
    """A kernel and how it is launched: `FewRowsShape` or `ManyRowsShape`."""

    def fits(self, weight: torch.Tensor, gated: bool) -> bool:
        """Whether it can be launched with a weight [N or 2 N, K]."""
        ...

    def product(
        self, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> torch.Tensor:
        """See `few_rows.few_rows_linear`."""
        ...


@dataclass(frozen=True)
class Choices:
    """Launch shapes of the products that our kernels run, by name and most rows."""

    shapes: dict[str, dict[int, LinearShape]] = field(default_factory=dict)

    def shape(self, name: str, rows: int) -> LinearShape | None:
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

    def replaced(self, changes: Iterable[tuple[str, LinearShape | None]], rows: int) -> "Choices":
        """The same, but for these products and this bucket; None hands a product back to torch."""
        shapes = dict(self.shapes)
        for name, shape in changes:
            others = {bucket: kept for bucket, kept in shapes.pop(name, {}).items() if bucket != rows}
            if others or shape is not None:
                shapes[name] = others if shape is None else others | {rows: shape}
        return Choices(shapes)


def candidates(name: str, rows: int, device: torch.device) -> tuple[LinearShape, ...]:
    """Launch shapes of a product that were good on an H200 at the sizes of Qwen3-8B (benchmarks/target_step.py --tune
    and --sweep), the best first."""
    return _few_rows(name, rows, device) if rows <= FEW[-1] else _many_rows(name, rows, device)


def _few_rows(name: str, rows: int, device: torch.device) -> tuple[LinearShape, ...]:
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


def _many_rows(name: str, rows: int, device: torch.device) -> tuple[LinearShape, ...]:
    if not has_group_products(device):
        return ()
    wide = ManyRowsShape(panel=64, panels=3, block_k=128, stages=3)
    deep = ManyRowsShape(panel=32, block_k=128, stages=8)
    if rows <= 64:
        narrow = ManyRowsShape(panel=64, stages=12)
        return ({"qkv": narrow, "output": deep, "gate_up": wide, "down": deep, "head": wide}[name],)
    narrow = ManyRowsShape(groups=2, panel=64, stages=8)
    shapes = {
        "qkv": narrow,
        "output": replace(deep, groups=2, stages=5),
        "gate_up": replace(wide, groups=2, block_k=64, stages=5),
        "down": replace(narrow, split=2),
    }
    return (shapes[name],) if name in shapes else ()


def can_measure(like: torch.Tensor) -> bool:
    """Whether weights like this are of a kind that our kernels may run: on a GPU, in half precision."""
    return like.is_cuda and like.dtype in (torch.float16, torch.bfloat16)


@torch.inference_mode()
def choose_shapes(
    linears: "Linears",
    layers: Sequence["GpuLayer"],
    head: torch.Tensor | None,
    ops: "LayerOps",
    mixes: Callable[[Sequence["GpuLayer"], int], Sequence[Mix]],
    buckets: Sequence[int] = BUCKETS,
) -> Choices:
    """Measure all products of a model; nothing is chosen off a GPU and in float32. head [V, E]: None if it is none of
    ours; mixes: attention of these layers for so many rows; buckets: some of `BUCKETS`. Leaves `linears` with what it
    returns."""
    like = layers[0].qkv
    linears.choices = Choices()
    if not can_measure(like):
        return linears.choices
    names = PRODUCTS if head is not None else PRODUCTS[:-1]
    some = list(_some_layers(layers))
    for rows in buckets:
        run = chain(linears, some, head, rows, ops, mixes(some, rows))
        best = captured(run)
        right = _right_ones(names, rows, layers, head, linears)
        for changes in _changes(names, right):
            before = linears.choices
            linears.choices = before.replaced(changes, rows)
            if linears.choices == before:
                continue
            trial = captured(run)
            old, new = times_of((best, trial))
            if new < old * (1 - _LEAST_GAIN):
                best = trial
            else:
                linears.choices = before
    return linears.choices


def _changes(
    names: Sequence[str], right: Sequence[tuple[str, LinearShape]]
) -> Iterator[Sequence[tuple[str, LinearShape | None]]]:
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
    linears: "Linears",
    layers: Sequence["GpuLayer"],
    head: torch.Tensor | None,
    rows: int,
    ops: "LayerOps",
    mixes: Sequence[Mix],
) -> Callable[[], torch.Tensor]:
    """These layers on random values, one after the other; then the head."""
    first = layers[0]
    values = _random(rows, first.gate_up)

    def run() -> torch.Tensor:
        stream, normed = ops.add_rms_norm(None, values, first.post_norm.weight, first.post_norm.eps)
        for layer, mix in zip(layers, mixes, strict=True):
            # The first layer of a head reads two norms side by side.
            read = normed.repeat(1, layer.qkv.shape[1] // normed.shape[1]) if layer is first else normed
            mixed = mix(linears.product("qkv", read, layer.qkv, layer.qkv_bias))
            delta = linears.product("output", mixed, layer.output)
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
) -> list[tuple[str, LinearShape]]:
    """Products and launch shapes that compile on this device and agree with torch; the compiling is done side by
    side."""
    trials, on_gpu = [], layers[0].qkv.is_cuda
    for name in names:
        weights: Any = [head] if name == "head" else [getattr(layer, name) for layer in layers]
        tried, gated = candidates(name, rows, weights[0].device), name == "gate_up"
        shapes = [shape for shape in tried if all(shape.fits(weight, gated) for weight in weights)]
        trials += [trial_of(name, rows, weights[0], linears.gated_silu, shape) for shape in shapes]
    with ThreadPoolExecutor(8 if on_gpu else 1) as pool:  # Triton's interpreter knows one thread only
        list(pool.map(lambda trial: trial.error(), trials))
    # What counts is said by this thread: in another one, a launch of what was compiled before can lack the device's
    # context, which tiles of the copy engine need, and would be refused.
    return [(trial.name, trial.shape) for trial in trials if trial.agrees()]


@dataclass(frozen=True)
class Trial:
    """One product on random values."""

    name: str
    shape: LinearShape
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
    shape: LinearShape,
) -> Trial:
    """A product of so many rows."""
    from specflow.kernels.few_rows import few_rows_linear as reference

    values = _random(rows, weight)
    gated = name == "gate_up"

    def by_torch(weight: torch.Tensor) -> torch.Tensor:
        product = reference(values, weight)
        return gated_silu(product) if gated else product

    return Trial(name, shape, weight, lambda weight: shape.product(values, weight, gated=gated), by_torch)


@torch.inference_mode()
def captured(work: Callable[[], object]) -> Callable[[], None]:
    """`work` as a graph: what replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def times_of(works: Sequence[Callable[[], object]], repeats: int = 9) -> list[float]:
    """Median milliseconds of each, run in turn: how fast a GPU is depends on how hard it worked just before."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(repeats):
        for work, mine in zip(works, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            work()
            end.record()
            end.synchronize()
            mine.append(start.elapsed_time(end))
    return [statistics.median(mine[2:]) for mine in times]


def time_of(work: Callable[[], object], repeats: int = 9) -> float:
    """Median milliseconds of replays of a graph of `work`."""
    return times_of([captured(work)], repeats)[0]
