"""The chunked loss against the plain definition: values, gradients, subsets, and what never exists."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specflow.training.chunked_loss import LossKind, Teacher, chunked_loss

N, S, E, WIDTH, V = 7, 3, 8, 6, 20
IDS = torch.tensor([0, 2, 3, 7, 8, 11, 15, 19])


def case(subset: bool) -> tuple[Tensor, Tensor, Teacher, Tensor, Tensor | None]:
    rows = torch.Generator().manual_seed(1)
    ids = IDS if subset else None
    states = torch.randn(N, S, E, generator=rows, requires_grad=True)
    head = torch.randn(len(IDS) if subset else V, E, generator=rows, requires_grad=True)
    teacher = Teacher(torch.randn(N, WIDTH, generator=rows), torch.randn(V, WIDTH, generator=rows), softcap=3.0)
    return states, head, teacher, torch.rand(N, S, generator=rows), ids


def dense(
    states: Tensor, head: Tensor, teacher: Teacher, kind: LossKind, ids: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses, hits and acceptance [N, S] with every logit in memory, by autograd."""
    cap = teacher.softcap or 1.0
    law = torch.softmax(cap * torch.tanh(teacher.states @ teacher.head.T / cap), -1)
    label = law.argmax(-1)
    logits = states @ head.T
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    chosen = torch.arange(V) if ids is None else ids
    part = law[:, chosen]
    mass = part.sum(-1, keepdim=True)
    logq = torch.log_softmax(logits, -1)
    found = (chosen == label[:, None]).float()
    if kind == "ce":
        losses = -(logq * found[:, None]).sum(-1)
    elif kind == "tv":
        losses = 1 - torch.minimum(part[:, None], logq.exp()).sum(-1)
    else:
        each = F.kl_div(logq, (part / mass)[:, None].expand_as(logq), reduction="none").sum(-1)
        losses = mass * each
    acceptance = torch.minimum(part[:, None], logq.exp()).sum(-1)
    return losses, chosen[logits.argmax(-1)] == label[:, None], acceptance


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("subset", [False, True])
@pytest.mark.parametrize("kind", ["kl", "ce", "tv"])
@pytest.mark.parametrize("chunk_values", [1, 3 * S * V, 1 << 20])
def test_equals_the_dense_computation(kind: LossKind, subset: bool, softcap: float | None, chunk_values: int) -> None:
    states, head, teacher, weights, ids = case(subset)
    losses, hits, acceptance = dense(states, head, teacher, kind, ids, softcap)
    expected = torch.autograd.grad((losses * weights).sum() * 0.5, [states, head])
    result = chunked_loss(
        states, head, teacher, weights, kind=kind, ids=ids, softcap=softcap, chunk_values=chunk_values
    )
    torch.testing.assert_close(result.total, (losses * weights).sum())
    torch.testing.assert_close(result.losses, losses)
    torch.testing.assert_close(result.acceptance, acceptance)
    assert torch.equal(result.hits, hits)
    for ours, theirs in zip(torch.autograd.grad(result.total * 0.5, [states, head]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_several_kinds_are_weighed() -> None:
    states, head, teacher, weights, ids = case(True)
    share: dict[LossKind, float] = {"kl": 0.5, "ce": 0.1, "tv": 1.8}
    losses = sum(part * dense(states, head, teacher, kind, ids, None)[0] for kind, part in share.items())
    assert isinstance(losses, Tensor)
    result = chunked_loss(states, head, teacher, weights, kind=share, ids=ids, chunk_values=1)
    torch.testing.assert_close(result.losses, losses)
    expected = torch.autograd.grad((losses * weights).sum(), [states, head])
    for ours, theirs in zip(torch.autograd.grad(result.total, [states, head]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("frozen", [False, True])
def test_what_is_added_stands_behind_the_soft_cap(frozen: bool) -> None:
    states, head, teacher, weights, _ = case(False)
    head = head.detach() if frozen else head
    rows = torch.Generator().manual_seed(2)
    more = torch.randn(N, S, 2, generator=rows, requires_grad=True)
    matrix = torch.randn(V, 2, generator=rows, requires_grad=True)
    law = torch.softmax(3 * torch.tanh(teacher.states @ teacher.head.T / 3), -1)
    logits = 2 * torch.tanh(states @ head.T / 2) + more @ matrix.T
    losses = F.kl_div(torch.log_softmax(logits, -1), law[:, None].expand_as(logits), reduction="none").sum(-1)
    trained = [states, more, matrix] if frozen else [states, more, matrix, head]
    expected = torch.autograd.grad((losses * weights).sum(), trained)
    result = chunked_loss(states, head, teacher, weights, softcap=2.0, added=(more, matrix), chunk_values=1)
    torch.testing.assert_close(result.losses, losses)
    for ours, theirs in zip(torch.autograd.grad(result.total, trained), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)


def test_a_frozen_head_and_one_student() -> None:
    states, head, teacher, weights, _ = case(False)
    single = states.detach()[:, 0].requires_grad_()
    result = chunked_loss(single, head.detach(), teacher, weights[:, 0])
    result.total.backward()
    losses, _, _ = dense(states[:, :1], head, teacher, "kl", None, None)
    torch.testing.assert_close(result.losses, losses)
    assert single.grad is not None
    assert single.grad.shape == (N, E)
    with torch.no_grad():
        assert not chunked_loss(single, head, teacher, weights[:, 0]).total.requires_grad


def test_given_labels() -> None:
    states, head, teacher, weights, _ = case(False)
    labels = torch.arange(N)
    result = chunked_loss(states, head, teacher, weights, kind="ce", labels=labels)
    logits = states @ head.T
    wanted = F.cross_entropy(logits.flatten(0, 1), labels.repeat_interleave(S), reduction="none")
    torch.testing.assert_close(result.losses, wanted.view(N, S))
    assert torch.equal(result.hits, logits.argmax(-1) == labels[:, None])


def test_a_perfect_student_has_no_loss_and_is_always_accepted() -> None:
    _, _, teacher, weights, _ = case(False)
    result = chunked_loss(teacher.states[:, None], teacher.head, teacher, weights[:, :1], softcap=teacher.softcap)
    assert result.losses.abs().max() < 1e-6
    assert result.hits.all()
    torch.testing.assert_close(result.acceptance, torch.ones(N, 1))
    law = torch.softmax(3 * torch.tanh(teacher.states @ teacher.head.T / 3), -1)
    torch.testing.assert_close(result.entropy, torch.distributions.Categorical(law).entropy())


@pytest.mark.parametrize("shape", [(0,), (0, S)])
def test_no_rows(shape: tuple[int, ...]) -> None:
    states, head, teacher, _, _ = case(False)
    empty = Teacher(teacher.states[:0], teacher.head)
    result = chunked_loss(states[:0, 0] if len(shape) == 1 else states[:0], head, empty, torch.zeros(shape))
    result.total.backward()
    assert float(result.total.detach()) == 0.0
    assert result.losses.shape == (0, shape[-1] if len(shape) == 2 else 1)


def test_ids_that_are_impossible_leave_the_loss_finite() -> None:
    states, head, _, weights, _ = case(False)
    sharp = Teacher(torch.full((N, 1), 1e4), torch.arange(V).float().unsqueeze(1))
    result = chunked_loss(states, head, sharp, weights)
    result.total.backward()
    assert result.total.isfinite()
    assert states.grad is not None
    assert states.grad.isfinite().all()


def test_mixed_types_and_autocast() -> None:
    states, head, teacher, weights, _ = case(False)
    half = Teacher(teacher.states.bfloat16(), teacher.head.bfloat16(), teacher.softcap)
    exact = chunked_loss(states, head, teacher, weights).total
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = chunked_loss(states.bfloat16(), head, half, weights).total
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, rtol=0.05, atol=0.05)
    rounded.backward()
    assert head.grad is not None
    assert head.grad.dtype == torch.float32


def test_logits_of_all_rows_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    states, head, teacher, weights, _ = case(False)
    largest = 0
    original = torch.log_softmax

    def watched(values: Tensor, *rest: int) -> Tensor:
        nonlocal largest
        largest = max(largest, values.numel())
        return original(values, *rest)

    monkeypatch.setattr(torch, "log_softmax", watched)
    chunked_loss(states, head, teacher, weights, chunk_values=2 * S * V).total.backward()
    assert largest == 2 * S * V
