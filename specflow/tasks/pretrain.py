"""`task=pretrain`: train a small language model and record how it went."""

from dataclasses import replace

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from specflow.plugins.component import Kind
from specflow.tasks.base import Task, TaskContext
from specflow.tracking.events import RunFinished
from specflow.training.pretrain_options import PretrainOptions, PretrainResult
from specflow.training.pretrain_options import Progress as Report

__all__ = ["PretrainTask"]


class PretrainTask(Task):
    """Pre-training of a model such as the bundled ones; the model goes to `task.output`."""

    name = "pretrain"
    needs = (Kind.BACKEND,)

    def __init__(self, options: PretrainOptions) -> None:
        self.options = options

    def run(self, context: TaskContext) -> RunFinished:
        """Train with a progress bar on stderr; returns the measurements as metrics."""
        from specflow.training.language_model import pretrain  # here: loads transformers

        options = self.options
        if options.device is None:
            backend = context.build(Kind.BACKEND)
            backend.setup()
            options = replace(options, device=backend.device.type)
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[report]}"))
        with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
            bar = progress.add_task("pretrain", total=self.options.steps, report="preparing text")
            result = pretrain(options, lambda report: _show(progress, bar, report))
        Console().print(f"model saved in {result.output}", markup=False)
        return RunFinished("finished", metrics=_metrics(result), summary=result)


def _show(progress: Progress, bar: TaskID, report: Report) -> None:
    text = f"loss {report.loss:.3f}, {report.tokens_per_second:,.0f} tokens/s"
    if report.held_out_loss is not None:
        text = f"{text}, held-out {report.held_out_loss:.3f}"
    progress.update(bar, completed=report.step, report=text)


def _metrics(result: PretrainResult) -> dict[str, float]:
    metrics = {
        "train_loss": result.train_loss,
        "held_out_loss": result.held_out_loss,
        "held_out_bits_per_byte": result.held_out_bits_per_byte,
        "parameters": float(result.parameters),
        "tokens_seen": float(result.tokens_seen),
        "training_tokens_per_second": result.tokens_per_second,
    }
    if result.agreement is not None:
        metrics["agreement"] = result.agreement
    for index, share in enumerate(result.agreement_by_draft, start=1):
        metrics[f"agreement_draft_{index}"] = share
    return metrics
