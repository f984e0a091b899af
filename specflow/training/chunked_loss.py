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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LossKind = Literal["kl", "ce", "tv"]


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
    kind: LossKind | Mapping[LossKind, float] = "kl",
    ids: Tensor | None = None,
    labels: Tensor | None = None,
    softcap: float | None = None,
    added: tuple[Tensor, Tensor] | None = None,
    chunk_values: int = 1 << 25,
) -> ChunkedLoss:
    """Loss of students that predict the same N distributions as a teacher.

    states: [N, S, E] or [N, E] (S = 1) of any floating type, the direct input of the head. S students of one label
        (the steps of an unrolled head) share the teacher's logits.
    head: [V', E]. Trained when it is a parameter (`requires_grad`), frozen otherwise.
    weights: [N, S] or [N] float; rows of weight 0 count for nothing, but their measures are returned.
    kind: kl = divergence from the teacher, ce = cross-entropy of the label, tv = the total variation distance
        1 - sum_v min(p, q); or a weight for each of several.
    ids: [V'] int64 ascending, ids that the head's rows stand for; None = all of the target's. With a subset, kl is the
        divergence from the teacher restricted to it, times the mass it has there, so that what the head cannot say
        neither teaches nor counts; ce leaves out labels that are not in it. `acceptance` and `hits` take the full p.
    labels: [N] int64 target ids for ce and for `hits`; None = the teacher's most likely id.
    softcap: of the student's logits.
    added: states [N, S, r] or [N, r] and a matrix [V', r], whose product is added to the logits behind the soft cap.
    chunk_values: most logits of one chunk, teacher's or student's.

    Under autocast the products run in its type and everything after them in float32. The shapes [N, S] of the result
    keep S = 1. Gradients reach `states`, `head` and both of `added`.
    """
    if states.dim() == 2:
        states = states.unsqueeze(1)
    weights = (weights.unsqueeze(1) if weights.dim() == 1 else weights).expand(states.shape[:2])
    kind_of_device = states.device.type
    product = torch.get_autocast_dtype(kind_of_device) if torch.is_autocast_enabled(kind_of_device) else None
    terms = [states, head]
    if added is not None:
        terms += [added[0].unsqueeze(1) if added[0].dim() == 2 else added[0], added[1]]
    wanted = tuple(torch.is_grad_enabled() and term.requires_grad for term in terms)
    rows = max(1, chunk_values // max(len(teacher.head), states.shape[1] * len(head)))
    kinds = {kind: 1.0} if isinstance(kind, str) else dict(kind)
    plan = _Plan(teacher, kinds, ids, labels, softcap, product, wanted, rows)
    return ChunkedLoss(*_Loss.apply(plan, weights.float(), *terms))


@dataclass(frozen=True)
class _Plan:
    teacher: Teacher
    kinds: Mapping[LossKind, float]
    ids: Tensor | None
    labels: Tensor | None
    softcap: float | None
    product: torch.dtype | None  # type of matrix products; None = that of the states
    wanted: tuple[bool, ...]  # which of states, head and both of `added` get a gradient
    rows: int  # of the teacher, per chunk


class _Product:
    """states @ matrix.T a chunk at a time, and what comes back of it."""

    def __init__(
        self, states: Tensor, matrix: Tensor, wants_states: bool, wants_matrix: bool, product: torch.dtype
    ) -> None:
        """What gets a gradient, and the type of the matrix products."""
        self._states, self._matrix, self._dtype = states.detach(), matrix.detach().to(product), matrix.dtype
        self.of_states = torch.zeros_like(states) if wants_states else None
        self._of_matrix = torch.zeros_like(matrix, dtype=torch.float32) if wants_matrix else None

    @property
    def wanted(self) -> bool:
        """Whether anything of it has a gradient."""
        return self.of_states is not None or self._of_matrix is not None

    @property
    def of_matrix(self) -> Tensor | None:
        """Gradient of the matrix."""
        return None if self._of_matrix is None else self._of_matrix.to(self._dtype)

    def _flat(self, part: slice) -> Tensor:
        return self._states[part].flatten(0, 1).to(self._matrix.dtype)

    def logits(self, part: slice) -> Tensor:
        """[n * S, V'] float32."""
        return (self._flat(part) @ self._matrix.T).float()

    def back(self, part: slice, slopes: Tensor) -> None:
        """Take slopes [n * S, V'] of the logits."""
        slopes = slopes.to(self._matrix.dtype)
        if self.of_states is not None:
            self.of_states[part] = (slopes @ self._matrix).view_as(self.of_states[part]).to(self.of_states.dtype)
        if self._of_matrix is not None:
            self._of_matrix += (slopes.T @ self._flat(part)).float()


class _Loss(torch.autograd.Function):
    """Values and gradients in one pass over the chunks."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, weights: Tensor, *terms: Tensor) -> tuple[Tensor, ...]:
        """See `chunked_loss`; terms: states, head, and both of `added` where there is something added."""
        product = plan.product or terms[0].dtype
        with torch.autocast(terms[0].device.type, enabled=False):
            pairs = zip(terms[::2], terms[1::2], plan.wanted[::2], plan.wanted[1::2], strict=True)
            products = [_Product(*pair, product) for pair in pairs]
            return _run(ctx, plan, weights, products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Gradients kept by forward, times that of the total."""
        return None, None, *(None if kept is None else kept * grad_total.to(kept.dtype) for kept in ctx.gradients)


def _run(ctx: Any, plan: _Plan, weights: Tensor, products: Sequence[_Product]) -> tuple[Tensor, ...]:
    count, students = weights.shape
    measured = [torch.zeros(count, students, device=weights.device) for _ in range(2)]
    hits = torch.zeros(count, students, dtype=torch.bool, device=weights.device)
    entropy = torch.zeros(count, device=weights.device)
    for first in range(0, count, plan.rows):
        part = slice(first, first + plan.rows)
        expected = _expected(plan, part)
        entropy[part] = expected.entropy
        logits = products[0].logits(part)
        damping = None
        if plan.softcap is not None:
            logits = plan.softcap * torch.tanh(logits / plan.softcap)
            damping = 1 - (logits / plan.softcap) ** 2
        for product in products[1:]:
            logits += product.logits(part)
        losses, hit, acceptance, slopes = _compare(logits.view(-1, students, logits.shape[1]), expected, plan.kinds)
        measured[0][part], hits[part], measured[1][part] = losses, hit, acceptance
        if not any(product.wanted for product in products):
            continue
        slopes = slopes.mul_(weights[part].unsqueeze(-1)).flatten(0, 1)
        for product in products[1:]:
            product.back(part, slopes)
        products[0].back(part, slopes if damping is None else slopes.mul_(damping))
    ctx.gradients = [gradient for product in products for gradient in (product.of_states, product.of_matrix)]
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


def _compare(
    logits: Tensor, expected: _Expected, kinds: Mapping[LossKind, float]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses, hits and acceptance, [n, S] each, and d loss / d logits [n, S, V'] for student logits [n, S, V']."""
    sayable = expected.sayable.unsqueeze(1)
    label = expected.label.unsqueeze(1)
    hits = (logits.argmax(-1) == label) & sayable
    log_student = torch.log_softmax(logits, -1)
    student = log_student.exp()
    law = expected.law.unsqueeze(1)
    acceptance = torch.minimum(law, student).sum(-1)
    losses, slopes = torch.zeros_like(acceptance), None
    for kind, weight in kinds.items():
        if kind == "ce":
            column = label.unsqueeze(-1).expand(-1, logits.shape[1], 1)
            loss = -log_student.gather(-1, column).squeeze(-1) * sayable
            slope = student.scatter_add(-1, column, torch.full_like(column, -1, dtype=student.dtype))
            slope.mul_(sayable.unsqueeze(-1))
        elif kind == "tv":
            short = student * (student < law)  # more of these ids would be accepted
            loss = 1 - acceptance
            slope = (student * short.sum(-1, keepdim=True)).sub_(short)
        else:
            loss = expected.own.unsqueeze(1) - (law * log_student).sum(-1)  # mass * KL(law / mass || student)
            slope = (student * expected.mass[:, None, None]).sub_(law)
        losses.add_(loss, alpha=weight)
        slopes = slope.mul_(weight) if slopes is None else slopes.add_(slope, alpha=weight)
    assert slopes is not None, "a loss of no kind"
    return losses, hits, acceptance, slopes
