"""Checks of what a proposer may do on the decode path: no host read, fixed shapes, fixed buffers, capture in a graph.

Host reads are found on a CPU as well, where they cost nothing: operations whose result the host waits for, or whose
shape depends on values, are caught as they are dispatched. All checks raise AssertionError.
"""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from specflow.core.draft import Draft
from specflow.core.limits import EngineLimits
from specflow.proposers.base import Features, HostView, ProposeContext, Proposer
from specflow.testing.conformance import assert_idle, assert_same
from specflow.testing.subject import PROMPTS, Subject, greedy
from specflow.testing.wrappers import Wrapper

if TYPE_CHECKING:
    from specflow.targets.base import Target

__all__ = [
    "HostReads",
    "check_buffers",
    "check_graph_capture",
    "check_host_reads",
    "check_host_reads_on_a_gpu",
    "check_run_ahead",
    "check_static_context",
]

# Operations that end in a device-to-host copy, or in an output whose size only the device knows.
_OPERATIONS = {
    "_local_scalar_dense", "nonzero", "nonzero_numpy", "masked_select", "unique_dim", "_unique", "_unique2",
    "unique_consecutive", "unique_dim_consecutive", "is_nonzero", "equal", "bincount", "argwhere", "histc",
}  # fmt: skip
_METHODS = {"item", "tolist", "cpu", "__bool__", "__int__", "__float__", "__index__", "__contains__"}
_NOT_ENTERED = ("torch", "numpy", "transformers", "builtins", "collections", "typing", "specflow.targets")
_WARM_UP = 3  # steps before buffers have to stand where they are


class HostReads:
    """A `with` block that notes every read of a device value on the host, with the line that did it, in `found`."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._modes: tuple[Any, ...] = (_Dispatched(self.found), _Called(self.found))

    def __enter__(self) -> "HostReads":
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*error)


class _Dispatched(TorchDispatchMode):
    """Sees operations."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        masks = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1]
        )
        by_tensor = name == "repeat_interleave" and func._schema.overload_name in ("Tensor", "self_Tensor")
        counts = by_tensor and (kwargs or {}).get("output_size") is None
        if name in _OPERATIONS or masks or counts:
            self._found.append(f"{name}{' with a mask' if masks else ''} at {_place()}")
        return func(*args, **(kwargs or {}))


class _Called(TorchFunctionMode):
    """Sees methods that read the memory of a CPU tensor without any operation."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _METHODS and args and isinstance(args[0], torch.Tensor):
            self._found.append(f"{name}() at {_place()}")
        return func(*args, **(kwargs or {}))


def _place() -> str:
    """File and line of the innermost caller that is neither torch nor this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module != __name__ and module.partition(".")[0] != "torch":
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "an unknown line"


class _Guarded(Wrapper):
    """Notes the host reads of every `propose`."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.reads = HostReads()

    def propose(self, context: ProposeContext) -> Draft:
        with self.reads:
            return self.inner.propose(context)


def check_host_reads(subject: Subject) -> None:
    """`propose` reads no device value on the host. Of proposers that do not declare `Requirements.host_tokens`."""
    engine = subject.engine(_Guarded, max_num_seqs=3, max_num_batched_tokens=24)
    assert_same(subject.plain(PROMPTS, greedy(16)), engine.generate(PROMPTS, greedy(16)))
    assert isinstance(engine.proposer, _Guarded)
    found = list(dict.fromkeys(engine.proposer.reads.found))
    assert not found, (
        "propose waits for the device: " + "; ".join(found) + ". Read host integers from context.host; a method that "
        "works on the host declares Requirements(host_tokens=True) and reads context.host.token_table."
    )


class _StrictlyQueued(Wrapper):
    """Lets CUDA refuse every synchronisation within `propose`."""

    def propose(self, context: ProposeContext) -> Draft:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return self.inner.propose(context)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def check_host_reads_on_a_gpu(subject: Subject) -> None:
    """The same on a GPU, where CUDA itself tells. The first run compiles kernels and is not watched."""
    subject = dataclasses.replace(subject, backend="cuda")
    expected = subject.engine().generate(PROMPTS, greedy(16))
    engine = subject.engine(_StrictlyQueued)
    assert_same(expected, engine.generate(PROMPTS, greedy(16)))


# -- buffers -------------------------------------------------------------------------------------------------------
class _Inspected(Wrapper):
    """Notes which tensors the proposer holds after `attach` and after every step, and the shapes of what it returns."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.attached: dict[str, Held] = {}
        self.held: list[tuple[int, dict[str, Held]]] = []  # requests of the step, tensors by path
        self.shapes: list[tuple[int, tuple[Any, ...]]] = []

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        super().attach(target, limits)
        self.attached = dict(held_tensors(self.inner))

    def propose(self, context: ProposeContext) -> Draft:
        draft = self.inner.propose(context)
        size = len(context.host.slots)
        self.held.append((size, dict(held_tensors(self.inner))))
        self.shapes.append((size, (tuple(draft.token_ids.shape), tuple(draft.num_drafts.shape))))
        return draft


def check_buffers(subject: Subject) -> None:
    """Shapes follow from the number of requests alone; buffers stay where `attach` made them; memory does not grow."""
    engine = subject.engine(_Inspected)
    engine.generate(PROMPTS, greedy(16))
    engine.generate(PROMPTS[:1], greedy(8))
    inspected = engine.proposer
    assert isinstance(inspected, _Inspected)
    by_size: dict[int, Any] = {}
    for size, shape in inspected.shapes:
        assert by_size.setdefault(size, shape) == shape, (
            f"propose returned shapes {by_size[size]} and {shape} for {size} requests: they must not depend on values"
        )
    most = max(_bytes(held) for _, held in inspected.held[:_WARM_UP])
    for number, (_, held) in enumerate(inspected.held):
        for path, tensor in inspected.attached.items():
            assert held.get(path, tensor) == tensor, (
                f"proposer.{path} was {tensor} after attach() and is {held[path]} after {number + 1} steps: write to "
                "buffers in place, so that a graph can be captured"
            )
        assert _bytes(held) <= most, (
            f"the proposer holds {_bytes(held)} bytes of tensors after {number + 1} steps, {most} at the beginning: "
            "allocate in attach() all that is kept"
        )


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor that an object keeps."""

    shape: tuple[int, ...]
    address: int
    bytes: int  # of its whole storage

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Held":
        """Where it is now."""
        storage = tensor.untyped_storage()
        return cls(tuple(tensor.shape), storage.data_ptr(), storage.nbytes())

    def __str__(self) -> str:
        return f"{list(self.shape)} at {self.address:#x}"


def _bytes(held: Mapping[str, Held]) -> int:
    return sum({one.address: one.bytes for one in held.values()}.values())


def held_tensors(value: Any, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, Held]]:
    """Tensors that an object reaches through its attributes and containers, by path."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        yield path, Held.of(value)
    elif isinstance(value, torch.nn.Module):
        for name, tensor in value.state_dict(keep_vars=True).items():
            yield f"{path}.{name}", Held.of(tensor)
    elif isinstance(value, Mapping):
        for key, item in list(value.items()):
            yield from held_tensors(item, f"{path}[{key!r}]", seen)
    elif isinstance(value, list | tuple | set):
        for index, item in enumerate(value):
            yield from held_tensors(item, f"{path}[{index}]", seen)
    elif not isinstance(value, type) and not type(value).__module__.startswith(_NOT_ENTERED):
        names = getattr(value, "__dict__", {}) or dict.fromkeys(getattr(type(value), "__slots__", ()))
        for name in list(names):
            yield from held_tensors(getattr(value, name, None), f"{path}.{name}".lstrip("."), seen)


# -- graphs --------------------------------------------------------------------------------------------------------
class _Static(Wrapper):
    """Asks again with a static context where a step has no prompt, and compares."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self.replays, self.different = 0, 0

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        self._limits = limits
        super().attach(target, limits)

    def propose(self, context: ProposeContext) -> Draft:
        draft, host = self.inner.propose(context), context.host
        if bool((host.chunk_start + 1 < host.prompt_len).any()) or not host.wants_drafts.all():
            return draft
        kept = Draft(draft.token_ids.clone(), draft.num_drafts.clone(), draft.logits)
        bounds = HostView.bounds(len(host.slots), self._limits)
        again = self.repeat(dataclasses.replace(context, static=True, host=bounds))
        self.replays += 1
        used = torch.arange(kept.token_ids.shape[1], device=kept.token_ids.device) < kept.num_drafts.unsqueeze(1)
        same = torch.equal(again.num_drafts, kept.num_drafts)
        self.different += not (same and torch.equal(again.token_ids[used], kept.token_ids[used]))
        return kept

    def repeat(self, context: ProposeContext) -> Draft:
        """The drafts of a static context."""
        return self.inner.propose(context)


class _Captured(_Static):
    """The same, captured in a graph once and replayed in later steps."""

    def __init__(self, inner: Proposer) -> None:
        super().__init__(inner)
        self._graphs: dict[Any, tuple[torch.cuda.CUDAGraph, ProposeContext, Draft]] = {}

    def repeat(self, context: ProposeContext) -> Draft:
        key = tuple((name, tuple(tensor.shape)) for name, tensor in _tensors(context))
        if key not in self._graphs:
            self._graphs[key] = self._capture(context)
        graph, held, result = self._graphs[key]
        for (_, mine), (_, theirs) in zip(_tensors(held), _tensors(context), strict=True):
            if mine.data_ptr() != theirs.data_ptr():
                mine.copy_(theirs)
        graph.replay()
        torch.cuda.synchronize()
        return result

    def _capture(self, context: ProposeContext) -> tuple[torch.cuda.CUDAGraph, ProposeContext, Draft]:
        held = _map_tensors(context, torch.clone)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.inner.propose(held)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            result = self.inner.propose(held)
        return graph, held, result


def check_static_context(subject: Subject) -> None:
    """With lengths known to the device alone, a decoding step gets the drafts that it gets otherwise."""
    _check_again(subject, _Static)


def check_run_ahead(subject: Subject, deterministic: bool) -> None:
    """Decoding with the host one step behind, as in a graph but call by call, changes no token and no counter.

    deterministic: equal calls bring equal drafts, so that counters can be compared.
    """
    sampling = [greedy(count) for count in (24, 9, 17, 1)]
    prompts = [*PROMPTS[: len(sampling)]]
    expected = subject.engine().generate(prompts, sampling)
    engine = dataclasses.replace(subject, backend_options={"run_ahead": True}).engine()
    outputs = engine.generate(prompts, sampling)
    assert_same(subject.plain(prompts, sampling), outputs)
    for before, after in zip(expected, outputs, strict=True):
        counts = [(one.rounds, one.drafted, one.accepted) for one in (before, after)]
        assert counts[0] == counts[1] or not deterministic, (
            f"rounds, drafted and accepted were {counts[0]}, ahead of the host {counts[1]}"
        )
    assert_idle(engine)


def check_graph_capture(subject: Subject) -> None:
    """On a GPU: `propose` of a decoding step can be captured, and a replay drafts what a call drafts."""
    _check_again(dataclasses.replace(subject, backend="cuda"), _Captured)


def _check_again(subject: Subject, wrap: type[_Static]) -> None:
    engine = subject.engine(wrap)
    engine.generate(PROMPTS, greedy(24))
    engine.generate(PROMPTS[:1], greedy(24))  # a lone request is where a length from the host is most tempting
    asked = engine.proposer
    assert isinstance(asked, wrap)
    assert asked.replays, "no step could be asked again: the check is not what it says"
    assert not asked.different, f"{asked.different} of {asked.replays} static contexts got other drafts"


def _tensors(context: ProposeContext) -> Iterator[tuple[str, torch.Tensor]]:
    """The device tensors of a context, the features' included, in a fixed order."""
    found: list[tuple[str, torch.Tensor]] = []
    _map_tensors(context, lambda tensor: found.append(("", tensor)) or tensor)  # type: ignore[func-returns-value]
    yield from found


def _map_tensors(context: ProposeContext, change: Callable[[torch.Tensor], torch.Tensor]) -> ProposeContext:
    """The context with every per-step device tensor replaced; the token table stays the engine's."""
    names = ("slots", "num_tokens", "max_drafts", "block_table", "temperature", "seeds")
    parts: dict[str, Any] = {name: change(getattr(context, name)) for name in names}
    features = context.features
    if features is not None:
        parts["features"] = Features(
            start=change(features.start),
            num_valid=change(features.num_valid),
            positions=change(features.positions),
            hidden={layer: change(tensor) for layer, tensor in features.hidden.items()},
            last_hidden=None if features.last_hidden is None else change(features.last_hidden),
        )
    return dataclasses.replace(context, **parts)
