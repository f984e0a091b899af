"""Loss of a drafting head against its target over a large vocabulary, a few rows at a time.

Logits of all rows and ids never exist together: teacher and student logits of a chunk are made, turned into losses,
measures and gradients of the states (and of the head), and dropped. Backward only scales what forward kept, so every
matrix product runs once; peak memory is two chunks of logits plus one gradient of the head if it is trained.

How to call it (DFlash, EAGLE-3, …):

    teacher = Teacher(batch.last_hidden[rows], tables.head, tables.logit_softcap)
    result = chunked_loss(states, head, teacher, weights, kind="kl")
    LossParts(total=result.total, weight=weights.sum(), measures={"accuracy/0": (hits, count), …})

`rows` are the rows of the pack whose target distribution is to be met: the target's state at t predicts token t + 1, so
the label x_j is taught by row j - 1. Leave out rows without a label beforehand: they cost as much as the others.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LossKind = Literal["kl", "ce"]


@dataclass(frozen=True)
class Teacher:
    """Where the target's distributions come from: softmax(softcap(states @ head.T)), never with a gradient."""

    states: Tensor  # [N, Et] after the final norm
    head: Tensor  # [V, Et]
    softcap: float | None = None  # logits l are c * tanh(l / c)


@dataclass(frozen=True)
class ChunkedLoss:
    """A loss and what was measured on the way; only `total` has a gradient."""

    total: Tensor  # scalar float32: sum of weights * losses
    losses: Tensor  # [N, S] float32, unweighted, in nats
    hits: Tensor  # [N, S] bool: the student's most likely id is the label
    acceptance: Tensor  # [N, S] float32: sum_v min(p, q), p over the whole vocabulary
    entropy: Tensor  # [N] float32 of p, in nats


def chunked_loss(
    states: Tensor,
    head: Tensor,
    teacher: Teacher,
    weights: Tensor,
    *,
    kind: LossKind = "kl",
    ids: Tensor | None = None,
    labels: Tensor | None = None,
    softcap: float | None = None,
    chunk_values: int = 1 << 25,
) -> ChunkedLoss:
    """Loss of students that predict the same N distributions as a teacher.

    states: [N, S, E] or [N, E] (S = 1) of any floating type, the direct input of the head. S students of one label
        (the steps of an unrolled head) share the teacher's logits.
    head: [V', E]. Trained when it is a parameter (`requires_grad`), frozen otherwise.
    weights: [N, S] or [N] float; rows of weight 0 count for nothing, but their measures are returned.
    kind: kl = divergence from the teacher, ce = cross-entropy of the label.
    ids: [V'] int64 ascending, ids that the head's rows stand for; None = all of the target's. With a subset, kl is the
        divergence from the teacher restricted to it, times the mass it has there, so that what the head cannot say
        neither teaches nor counts; ce leaves out labels that are not in it. `acceptance` and `hits` take the full p.
    labels: [N] int64 target ids for ce and for `hits`; None = the teacher's most likely id.
    softcap: of the student's logits.
    chunk_values: most logits of one chunk, teacher's or student's.

    Under autocast the products run in its type and everything after them in float32. The shapes [N, S] of the result
    keep S = 1. Gradients reach `states` and `head`.
    """
    if states.dim() == 2:
        states = states.unsqueeze(1)
    weights = (weights.unsqueeze(1) if weights.dim() == 1 else weights).expand(states.shape[:2])
    kind_of_device = states.device.type
    product = torch.get_autocast_dtype(kind_of_device) if torch.is_autocast_enabled(kind_of_device) else None
    wanted = (torch.is_grad_enabled() and states.requires_grad, torch.is_grad_enabled() and head.requires_grad)
    rows = max(1, chunk_values // max(len(teacher.head), states.shape[1] * len(head)))
    plan = _Plan(teacher, kind, ids, labels, softcap, product, wanted, rows)
    return ChunkedLoss(*_Loss.apply(states, head, weights.float(), plan))


@dataclass(frozen=True)
class _Plan:
    teacher: Teacher
    kind: LossKind
    ids: Tensor | None
    labels: Tensor | None
    softcap: float | None
    product: torch.dtype | None  # type of matrix products; None = that of the states
    wanted: tuple[bool, bool]  # gradients of states, of head
    rows: int  # of the teacher, per chunk


class _Loss(torch.autograd.Function):
    """Values and gradients in one pass over the chunks."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, head: Tensor, weights: Tensor, plan: _Plan) -> tuple[Tensor, ...]:
        """See `chunked_loss`."""
        with torch.autocast(states.device.type, enabled=False):
            return _run(ctx, states, head, weights, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients kept by forward, times that of the total."""
        of_states, of_head = ctx.gradients
        return (
            None if of_states is None else of_states * grad_total.to(of_states.dtype),
            None if of_head is None else of_head * grad_total.to(of_head.dtype),
            None,
            None,
        )


def _run(ctx: Any, states: Tensor, head: Tensor, weights: Tensor, plan: _Plan) -> tuple[Tensor, ...]:
    count, students, width = states.shape
    product = plan.product or states.dtype
    matrix = head.detach().to(product)
    of_states = torch.zeros_like(states) if plan.wanted[0] else None
    of_head = torch.zeros_like(head, dtype=torch.float32) if plan.wanted[1] else None
    measured = [torch.zeros(count, students, device=states.device) for _ in range(2)]
    hits = torch.zeros(count, students, dtype=torch.bool, device=states.device)
    entropy = torch.zeros(count, device=states.device)
    for first in range(0, count, plan.rows):
        part = slice(first, first + plan.rows)
        expected = _expected(plan, part)
        entropy[part] = expected.entropy
        flat = states.detach()[part].reshape(-1, width).to(product)
        logits = (flat @ matrix.T).float()
        damping = None
        if plan.softcap is not None:
            logits = plan.softcap * torch.tanh(logits / plan.softcap)
            damping = 1 - (logits / plan.softcap) ** 2
        losses, hit, acceptance, slopes = _compare(logits.view(-1, students, len(head)), expected, plan.kind)
        measured[0][part], hits[part], measured[1][part] = losses, hit, acceptance
        if of_states is None and of_head is None:
            continue
        slopes = slopes.mul_(weights[part].unsqueeze(-1)).flatten(0, 1)
        slopes = (slopes if damping is None else slopes.mul_(damping)).to(product)
        if of_states is not None:
            of_states[part] = (slopes @ matrix).view(-1, students, width).to(of_states.dtype)
        if of_head is not None:
            of_head += (slopes.T @ flat).float()
    ctx.gradients = (of_states, None if of_head is None else of_head.to(head.dtype))
    total = (measured[0] * weights).sum()
    ctx.mark_non_differentiable(measured[0], hits, measured[1], entropy)
    return total, measured[0], hits, measured[1], entropy


@dataclass(frozen=True)
class _Expected:
    """What the teacher says of one chunk of n rows."""

    law: Tensor  # [n, V'] float32: p of the ids that the head can say, not renormalised
    mass: Tensor  # [n] float32: sum of the law
    own: Tensor  # [n] float32: sum of law * log(law / mass)
    entropy: Tensor  # [n] float32, of the whole p
    label: Tensor  # [n] int64: column of the label in the head
    sayable: Tensor  # [n] bool: the head has the label


def _expected(plan: _Plan, part: slice) -> _Expected:
    teacher = plan.teacher
    logits = (teacher.states.detach()[part].to(teacher.head.dtype) @ teacher.head.detach().T).float()
    if teacher.softcap is not None:
        logits = teacher.softcap * torch.tanh(logits / teacher.softcap)
    label = logits.argmax(-1) if plan.labels is None else plan.labels[part]
    log_law = torch.log_softmax(logits, -1)
    law = log_law.exp()
    entropy = -(law * log_law).sum(-1)
    if plan.ids is None:
        sayable = torch.ones_like(label, dtype=torch.bool)
        return _Expected(law, law.new_ones(len(law)), -entropy, entropy, label, sayable)
    part_law = law[:, plan.ids]
    mass = part_law.sum(-1)
    own = (part_law * log_law[:, plan.ids]).sum(-1) - torch.special.xlogy(mass, mass)
    column = torch.searchsorted(plan.ids, label).clamp_(max=len(plan.ids) - 1)
    return _Expected(part_law, mass, own, entropy, column, plan.ids[column] == label)


def _compare(logits: Tensor, expected: _Expected, kind: LossKind) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses, hits and acceptance, [n, S] each, and d loss / d logits [n, S, V'] for student logits [n, S, V']."""
    sayable = expected.sayable.unsqueeze(1)
    label = expected.label.unsqueeze(1)
    hits = (logits.argmax(-1) == label) & sayable
    log_student = torch.log_softmax(logits, -1)
    student = log_student.exp()
    law = expected.law.unsqueeze(1)
    acceptance = torch.minimum(law, student).sum(-1)
    if kind == "ce":
        column = label.unsqueeze(-1).expand(-1, logits.shape[1], 1)
        losses = -log_student.gather(-1, column).squeeze(-1) * sayable
        slopes = student.scatter_add_(-1, column, torch.full_like(column, -1, dtype=student.dtype))
        return losses, hits, acceptance, slopes.mul_(sayable.unsqueeze(-1))
    losses = expected.own.unsqueeze(1) - (law * log_student).sum(-1)  # mass * KL(law / mass || student)
    slopes = student.mul_(expected.mass[:, None, None]).sub_(law)
    return losses, hits, acceptance, slopes
