"""Suffix trees: time to append and to draft, memory, and the ratio to arctic-inference where that is installed.

    python benchmarks/suffix_tree.py [--outputs 10000] [--tokens 500] [--depth 24] [--drafts 2000] [--no-peer]

The shared tree is filled with synthetic outputs: ids from a Zipf law, and between them phrases that earlier outputs
used too. Then one more request decodes; before each draft it commits one to four tokens. Half of its text repeats an
earlier output. Both implementations see the same tokens, and their drafts are compared. A turn is what a request costs
per step: append to both trees and draft from the better one. Medians and 99th percentiles over the turns.
"""

import argparse
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from rich.console import Console
from rich.table import Table

from specflow.proposers.suffix_cache import SuffixCache

VOCAB, PHRASES, PHRASE = 32000, 4000, 12


@dataclass
class Result:
    """Measurements of one implementation."""

    fill: float = 0.0  # µs per token of the shared tree
    slowest: float = 0.0  # ms of the slowest output while it was filled
    nbytes: float = 0.0  # per cached token
    appends: list[float] = field(default_factory=list)  # µs
    drafts: list[float] = field(default_factory=list)  # µs
    tokens: list[list[int]] = field(default_factory=list)


def make_outputs(number: int, length: int, generator: np.random.Generator) -> list[np.ndarray]:
    """Synthetic outputs, each [length] int32: two thirds of the tokens belong to phrases that come again."""
    phrases = generator.zipf(1.3, (PHRASES, PHRASE)) % VOCAB
    outputs = []
    for _ in range(number):
        parts: list[np.ndarray] = []
        while sum(map(len, parts)) < length:
            parts.append(phrases[min(PHRASES - 1, int(generator.zipf(1.2)) - 1)][: generator.integers(4, PHRASE + 1)])
            parts.append(generator.zipf(1.3, 4) % VOCAB)
        outputs.append(np.concatenate(parts)[:length].astype(np.int32))
    return outputs


def microseconds(call: Callable[[], object]) -> float:
    """Duration of one call."""
    begun = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - begun)


def resident() -> int:
    """Most memory this process has had, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_ours(outputs: list[np.ndarray], turns: list[np.ndarray], depth: int) -> Result:
    """Fill the cache, then decode one request."""
    result, cache = Result(), SuffixCache(depth, len(outputs) + 1)
    times = []
    for index, ids in enumerate(outputs):
        cache.start(f"past-{index}", 0)
        times.append(microseconds(lambda name=f"past-{index}", ids=ids: cache.update(name, ids)))  # type: ignore[misc]
        cache.stop(f"past-{index}")
    # Half of it is the request's own tree.
    result.fill, result.slowest = sum(times) / max(1, sum(map(len, outputs))), max(times, default=0) / 1000
    result.nbytes = cache.shared.nbytes / max(1, cache.shared.num_tokens)
    cache.start("new", 0)
    text = np.zeros(0, np.int64)
    for fresh in turns:
        text = np.concatenate([text, fresh])
        result.appends.append(microseconds(lambda text=text: cache.update("new", text)))  # type: ignore[misc]
        begun = time.perf_counter()
        found = cache.draft("new", text, depth, 1.0, 0.1)
        result.drafts.append(1e6 * (time.perf_counter() - begun))
        result.tokens.append(found.token_ids.tolist())
    return result


def measure_peer(outputs: list[np.ndarray], turns: list[np.ndarray], depth: int) -> Result | None:
    """The same with arctic-inference; None when it is not installed."""
    try:
        from arctic_inference.suffix_decoding import SuffixDecodingCache
    except ImportError:
        return None
    result, cache = Result(), SuffixDecodingCache(depth, len(outputs) + 1)
    times = []
    before = resident()
    empty = np.zeros(0, np.int32)
    for index, ids in enumerate(outputs):
        cache.start_request(index, empty)
        times.append(microseconds(lambda index=index, ids=ids: cache.add_active_response(index, ids)))  # type: ignore[misc]
        cache.stop_request(index)
    result.fill, result.slowest = sum(times) / max(1, sum(map(len, outputs))), max(times, default=0) / 1000
    result.nbytes = (resident() - before) / max(1, sum(map(len, outputs)))
    cache.start_request("new", empty)
    text = np.zeros(0, np.int32)
    for fresh in turns:
        text = np.concatenate([text, fresh])
        result.appends.append(microseconds(lambda fresh=fresh: cache.add_active_response("new", fresh)))  # type: ignore[misc]
        begun = time.perf_counter()
        found = cache.speculate("new", text[-depth:], max_spec_tokens=depth)
        result.drafts.append(1e6 * (time.perf_counter() - begun))
        result.tokens.append(list(found.token_ids))
    return result


def make_turns(number: int, outputs: list[np.ndarray], generator: np.random.Generator) -> list[np.ndarray]:
    """What one request commits step by step: stretches of past outputs and of new text in turn."""
    turns = []
    while len(turns) < number:
        source = outputs[generator.integers(len(outputs))]
        start = int(generator.integers(max(1, len(source) - 40)))
        stretch = np.concatenate([source[start : start + 40], generator.zipf(1.3, 40).astype(np.int32) % VOCAB])
        turns += np.split(stretch, np.cumsum(generator.integers(1, 5, 40))[:30])
    return [turn for turn in turns[:number] if len(turn)]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outputs", type=int, default=10000)
    parser.add_argument("--tokens", type=int, default=500)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--drafts", type=int, default=2000)
    parser.add_argument("--no-peer", action="store_true")
    arguments = parser.parse_args()

    generator = np.random.default_rng(0)
    outputs = make_outputs(arguments.outputs, arguments.tokens, generator)
    turns = make_turns(arguments.drafts, outputs, generator)
    warm_up = make_outputs(20, 100, generator)
    measure_ours(warm_up, warm_up[:1], arguments.depth)
    peer = None if arguments.no_peer else measure_peer(outputs, turns, arguments.depth)
    show(arguments, measure_ours(outputs, turns, arguments.depth), peer)


def show(arguments: argparse.Namespace, ours: Result, peer: Result | None) -> None:
    """One row a quantity; the ratio says how many times as fast or as small specflow is."""
    title = f"{arguments.outputs} cached outputs of {arguments.tokens} tokens, depth {arguments.depth}"
    table = Table("", "specflow", "arctic-inference", "ratio", title=title)
    quantities: dict[str, Callable[[Result], float]] = {
        "append while filling, µs a token": lambda result: result.fill,
        "slowest output while filling, ms": lambda result: result.slowest,
        "append, µs a turn": lambda result: float(np.median(result.appends)),
        "draft, µs": lambda result: float(np.median(result.drafts)),
        "draft, µs, 99th percentile": lambda result: float(np.percentile(result.drafts, 99)),
        "turn, µs": lambda result: float(np.median(np.add(result.appends, result.drafts))),
        "memory, bytes a cached token": lambda result: result.nbytes,
    }
    for name, value in quantities.items():
        theirs = f"{value(peer):.2f}" if peer else "not installed"
        table.add_row(name, f"{value(ours):.2f}", theirs, f"{value(peer) / value(ours):.1f}" if peer else "")
    console = Console()
    console.print(table)
    drafted = sum(map(bool, ours.tokens))
    console.print(f"{drafted} of {len(ours.tokens)} turns with a draft, {sum(map(len, ours.tokens))} tokens in all")
    if peer:
        same = sum(one == other for one, other in zip(ours.tokens, peer.tokens, strict=True))
        console.print(f"equal drafts: {same} of {len(ours.tokens)}")


if __name__ == "__main__":
    main()
