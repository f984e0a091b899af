"""Plain decoding at batch 1: specflow's engine against transformers' own `generate`, in turn, in one process.

    python benchmarks/decode_speed.py --model FOLDER_OR_HUB_ID [--dtype float32] [--tokens 64] [--rounds 5]

Both decode the same prompt greedily for the same number of tokens; the outputs must be equal in float32. The median of
the rounds counts. Decode speed leaves the prompt's pass out: seconds from the first new token to the last.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specflow import Engine, SamplingParams

PROMPT = "Write a short story about a lighthouse keeper who learns to read the weather from the birds.\n"


class FirstTokenTimer:
    """A transformers streamer that notes when the first new token arrives."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def put(self, value: Any) -> None:
        """Called with the prompt, then with every token."""
        self.calls.append(time.perf_counter())

    def end(self) -> None:
        """Called at the end; nothing to do."""


def by_transformers(model: Any, ids: list[int], tokens: int) -> tuple[float, list[int]]:
    """Decode seconds and new ids of one `generate` call."""
    timer = FirstTokenTimer()
    inputs = torch.tensor([ids])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=timer,
    )
    return timer.calls[-1] - timer.calls[1], output[0, len(ids) :].tolist()


def by_specflow(engine: Engine, ids: list[int], tokens: int) -> tuple[float, list[int]]:
    """Decode seconds and new ids of one request."""
    sampling = SamplingParams(max_tokens=tokens, min_tokens=tokens)
    output = engine.generate([ids], sampling)[0]
    return output.token_times[-1] - output.token_times[0], list(output.token_ids)


def main() -> None:
    """Run both in turn and print the table."""
    from transformers import AutoModelForCausalLM

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=getattr(torch, arguments.dtype)).eval()
    engine = Engine.from_config({"target": {"name": "hf", "path": arguments.model, "dtype": arguments.dtype}})
    ids = engine.target.tokenizer(PROMPT)["input_ids"]
    seconds: dict[str, list[float]] = {"transformers generate": [], "specflow, plain": []}
    same = True
    for index in track(range(arguments.rounds + 1), description="decoding", console=Console(stderr=True)):
        with torch.inference_mode():
            theirs, expected = by_transformers(model, ids, arguments.tokens)
        ours, found = by_specflow(engine, ids, arguments.tokens)
        same = same and found == expected
        if index:  # the first round warms up
            seconds["transformers generate"].append(theirs)
            seconds["specflow, plain"].append(ours)
    show(arguments, seconds, same)


def show(arguments: argparse.Namespace, seconds: dict[str, list[float]], same: bool) -> None:
    """Print medians, range and ratio."""
    speeds = {name: [(arguments.tokens - 1) / one for one in values] for name, values in seconds.items()}
    title = (
        f"{arguments.model}, {arguments.dtype}, batch 1, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    table = Table("", "tokens/s", "slowest … fastest", "ratio", title=title)
    baseline = statistics.median(speeds["transformers generate"])
    for name, values in speeds.items():
        middle = statistics.median(values)
        table.add_row(name, f"{middle:.1f}", f"{min(values):.1f} … {max(values):.1f}", f"{middle / baseline:.2f}")
    console = Console()
    console.print(table)
    console.print(f"outputs equal: {'yes' if same else 'no'}")


if __name__ == "__main__":
    main()
