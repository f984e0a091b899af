"""The training loop of every head: packs in, weights out, and nothing that depends on where a run was interrupted.

The gradient of a step is the sum over all its packs, of all processes, divided by the sum of their weights: so packs of
unequal size, and processes, are averaged exactly. Sums over processes are one `all_reduce` of the gradients per step;
heads are small, and a pack without a label, which leaves some gradients empty, cannot make a process wait for another.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from specflow.errors import ConfigError
from specflow.training.batches import make_batch
from specflow.training.documents import Document
from specflow.training.hidden_provider import HiddenProvider
from specflow.training.measures import MeasureSums, simulated_acceptance_length
from specflow.training.objective import LossParts, TrainableHead, TrainBatch
from specflow.training.packing import Packs
from specflow.training.processes import Processes
from specflow.training.stopping import StopRequest, stop_request
from specflow.training.train_checkpoint import Checkpoint, Checkpoints
from specflow.training.train_options import TrainOptions

__all__ = ["Curve", "Trainer", "learning_rate", "loss_of", "measure_documents"]

Curve = Mapping[str, float]  # one point of every curve, by name


@dataclass
class Listener:
    """Whom the trainer tells what. `evaluate` runs in the first process alone, the head standing still."""

    on_step: Callable[[int], None] = lambda step: None
    on_point: Callable[[int, Curve], None] = lambda step, values: None
    evaluate: Callable[[int], None] = lambda step: None


@dataclass
class Trainer:
    """One training run. `run` does all steps that are not done yet."""

    head: TrainableHead
    documents: Sequence[Document]
    provider: HiddenProvider
    options: TrainOptions
    checkpoints: Checkpoints
    device: torch.device
    processes: Processes = field(default_factory=Processes)
    listener: Listener = field(default_factory=Listener)

    step: int = field(default=0, init=False)
    tokens: int = field(default=0, init=False)  # trained on, padding left out
    seconds: float = field(default=0.0, init=False)  # of training alone

    def __post_init__(self) -> None:
        options = self.options
        if options.packs_per_step % self.processes.size:
            raise ConfigError(
                f"task.packs_per_step={options.packs_per_step} cannot be shared by {self.processes.size} processes: "
                "make it a multiple of their number."
            )
        self.packs = Packs([len(document) for document in self.documents], options.pack_length, options.seed)
        self.steps = options.steps or math.ceil(self.packs.count(options.epochs) / options.packs_per_step)
        self._optimizer = _optimizer(options, self.head, self.device)
        self._sums = MeasureSums(self.device)
        self._lengths = [len(document) for document in self.documents]
        self._restore()

    def _restore(self) -> None:
        state = self.checkpoints.newest(self.device)
        if state is None:
            return
        self.head.load_state(state.head)
        self.head.module.load_state_dict(dict(state.module))
        self._optimizer.load_state_dict(dict(state.optimizer))
        self.step, self.tokens, self.seconds = state.step, state.tokens, state.seconds
        if self.processes.first:
            self._sums.load(state.window)

    def run(self) -> None:
        """Train to the end. Raises `KeyboardInterrupt`, with the state saved, after a SIGTERM or Ctrl-C."""
        self.head.module.train()
        with stop_request() as stop:
            while self.step < self.steps:
                begun = time.perf_counter()
                self._one_step()
                last = self.step == self.steps
                logs = last or self.step % self.options.log_every == 0
                if logs and self.device.type == "cuda":
                    torch.cuda.synchronize(self.device)
                self.seconds += time.perf_counter() - begun
                self.listener.on_step(self.step)
                if logs:
                    self._point()
                stopped = self._stopped(stop)
                if not (stopped or last) and _every(self.options.evaluate_every, self.step):
                    self._evaluate()  # before the checkpoint: a run that goes on behind it has been evaluated
                if stopped or last or _every(self.options.checkpoint_every, self.step):
                    self._save()
                if stopped:
                    raise KeyboardInterrupt(f"stopped by {stopped}; step {self.step} of {self.steps} is saved")

    # -- one step --------------------------------------------------------------------------------------------------
    def _one_step(self) -> None:
        first = self.step * self.options.packs_per_step
        packs = [self.packs[first + index] for index in range(self.options.packs_per_step)]
        self.tokens += sum(self._lengths[index] for pack in packs for index in pack.documents)
        mine = packs[self.processes.rank :: self.processes.size]
        chosen = [[self.documents[index] for index in pack.documents] for pack in mine]
        found = self.provider.states([document for documents in chosen for document in documents])
        weight = torch.zeros((), device=self.device)
        for pack, documents in zip(mine, chosen, strict=True):
            states, found = found[: len(documents)], found[len(documents) :]
            dtype = None if self.options.bf16 else torch.float32
            batch = make_batch(documents, states, self.options.pack_length, pack.seed, dtype)
            parts = loss_of(self.head, batch, self.options.bf16)
            if parts.total.requires_grad:  # not so for a pack without a label
                parts.total.backward()
            weight += parts.weight.detach()
            self._sums.add(parts)
        self._update(weight)
        self.step += 1

    def _update(self, weight: Tensor) -> None:
        parameters = [value for value in self.head.module.parameters() if value.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        self.processes.add_up(weight, *gradients)
        torch._foreach_div_(gradients, weight.clamp(min=1e-12))
        self._gradient_norm = torch.nn.utils.clip_grad_norm_(parameters, self.options.gradient_clip)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.options, self.step + 1, self.steps) * group.get("factor", 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    # -- what is kept and told -------------------------------------------------------------------------------------
    def _point(self) -> None:
        norm = self._finite_norm()
        means = self._sums.means(self.processes)
        length = simulated_acceptance_length(means)
        values = {f"train/{name}": value for name, value in means.items()}
        if length is not None:
            values["train/simulated_acceptance_length"] = length
        values["train/learning_rate"] = learning_rate(self.options, self.step, self.steps)
        values["train/gradient_norm"] = norm
        values["train/tokens_per_second"] = self.tokens / self.seconds if self.seconds else 0.0
        self.listener.on_point(self.step, values)

    def _finite_norm(self) -> float:
        """Norm of the last gradient. Raises `ConfigError` when it is not finite: no later one will be."""
        norm = float(self._gradient_norm)
        if not math.isfinite(norm):
            raise ConfigError(
                f"the gradient is not finite at step {self.step}: lower task.learning_rate, or set task.bf16=false. "
                f"The checkpoints in {self.checkpoints.folder} are from before."
            )
        return norm

    def _save(self) -> None:
        self._finite_norm()
        window = self._sums.read(self.processes)
        if self.processes.first:
            self.checkpoints.save(
                Checkpoint(
                    step=self.step,
                    module=self.head.module.state_dict(),
                    optimizer=self._optimizer.state_dict(),
                    head=self.head.state(),
                    window=window,
                    seconds=self.seconds,
                    tokens=self.tokens,
                )
            )
        self.processes.wait()

    def _evaluate(self) -> None:
        if self.processes.first:
            self.head.module.eval()
            self.listener.evaluate(self.step)
            self.head.module.train()
        self.processes.wait()

    def _stopped(self, stop: StopRequest) -> str | None:
        """The signal, if any process got one; all agree on it."""
        if self.processes.size == 1:
            return stop.signal
        got = torch.tensor([float(stop.signal is not None)], device=self.device)
        self.processes.add_up(got)
        return (stop.signal or "a signal to another process") if float(got) else None


def _every(interval: int, step: int) -> bool:
    return interval > 0 and step % interval == 0


def loss_of(head: TrainableHead, batch: TrainBatch, bf16: bool) -> LossParts:
    """The head's loss in the precision of training; torch's generators start from the pack's own seed."""
    device = batch.token_ids.device
    torch.manual_seed(batch.seed)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=bf16):
        return head.loss(batch)


@torch.no_grad()
def measure_documents(
    head: TrainableHead, documents: Sequence[Document], provider: HiddenProvider, options: TrainOptions
) -> dict[str, float]:
    """Loss and measures on documents in their first packing, and the simulated acceptance length; nothing is learnt."""
    packs = Packs([len(document) for document in documents], options.pack_length, options.seed)
    sums: MeasureSums | None = None
    for number, indices in enumerate(packs.epoch(0)):
        chosen = [documents[index] for index in indices]
        found = provider.states(chosen)
        sums = sums or MeasureSums(found[0].hidden.device)
        dtype = None if options.bf16 else torch.float32
        batch = make_batch(chosen, found, options.pack_length, packs[number].seed, dtype)
        sums.add(loss_of(head, batch, options.bf16))
    means = sums.means(Processes()) if sums else {}
    length = simulated_acceptance_length(means)
    return means if length is None else means | {"simulated_acceptance_length": length}


def learning_rate(options: TrainOptions, step: int, steps: int) -> float:
    """Rate of a step (from 1): linear warm-up, then a cosine fall to `final_rate_fraction` of the peak."""
    warmup = math.ceil(options.warmup * steps)
    if step <= warmup:
        return options.learning_rate * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    fraction = options.final_rate_fraction
    return options.learning_rate * (fraction + (1 - fraction) * (1 + math.cos(math.pi * done)) / 2)


def _optimizer(options: TrainOptions, head: TrainableHead, device: torch.device) -> torch.optim.AdamW:
    """AdamW over the float32 parameters. Raises `ConfigError` for a head with none, or with others."""
    named = {name: value for name, value in head.module.named_parameters() if value.requires_grad}
    parameters, factors = list(named.values()), head.rate_factors()
    if not parameters or any(value.dtype != torch.float32 for value in parameters):
        raise ConfigError("a head that is trained needs parameters, and all of them in float32.")
    groups: list[dict[str, Any]] = []
    for factor in (1.0, *sorted(set(factors.values()) - {1.0})):
        own = [value for name, value in named.items() if factors.get(name, 1.0) == factor]
        matrices, vectors = [value for value in own if value.dim() >= 2], [value for value in own if value.dim() < 2]
        groups.append({"params": matrices, "weight_decay": options.weight_decay, "factor": factor})
        groups.append({"params": vectors, "weight_decay": 0.0, "factor": factor})
    groups = [group for group in groups if group["params"]]
    betas = (options.beta1, options.beta2)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=betas, fused=device.type == "cuda")
