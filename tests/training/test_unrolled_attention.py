"""Attention over packs by blocks, against one dense mask over the grown keys."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specflow.training.streamed_attention import StreamedAttention, visible_blocks
from specflow.training.unrolled_attention import Block, UnrolledAttention, plan_blocks

T, HEADS, KV, D, STEPS = 13, 4, 2, 8, 3
DOCUMENTS = torch.tensor([0] * 6 + [1] * 4 + [-1] * 3)


def parts(seed: int = 0, requires_grad: bool = False) -> list[tuple[Tensor, Tensor, Tensor]]:
    rows = torch.Generator().manual_seed(seed)
    return [
        tuple(torch.randn(T, heads, D, generator=rows, requires_grad=requires_grad) for heads in (HEADS, KV, KV))
        for _ in range(STEPS)
    ]  # type: ignore[misc]


def dense(steps: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    numbers = torch.arange(T)
    first = (numbers[:, None] >= numbers) & (DOCUMENTS[:, None] == DOCUMENTS)
    outputs = []
    for s, (query, _, _) in enumerate(steps):
        mask = torch.cat([first, *[torch.eye(T, dtype=torch.bool)] * s], 1)
        keys = torch.cat([key for _, key, _ in steps[: s + 1]])
        values = torch.cat([value for _, _, value in steps[: s + 1]])
        by_head = (part.transpose(0, 1)[None] for part in (query, keys, values))
        outputs.append(F.scaled_dot_product_attention(*by_head, attn_mask=mask, enable_gqa=True)[0].transpose(0, 1))
    return outputs


def blocked(
    steps: list[tuple[Tensor, Tensor, Tensor]], rows: int | None, recompute: bool = False, layer: int = 0
) -> list[Tensor]:
    attend = UnrolledAttention(DOCUMENTS, plan_blocks(DOCUMENTS, rows), recompute)
    outputs = []
    for number, (query, key, value) in enumerate(steps):
        if number:
            attend.next_step()
        outputs.append(attend(layer, query, key, value))
    return outputs


def test_plan() -> None:
    assert plan_blocks(DOCUMENTS, 4) == [Block(0, 4, 0), Block(4, 8, 0), Block(8, 12, 6), Block(12, 13, 10)]
    assert plan_blocks(DOCUMENTS) == [Block(0, T, 0)]


@pytest.mark.parametrize("rows", [1, 4, 5, None])
@pytest.mark.parametrize("recompute", [False, True])
def test_blocks_equal_one_dense_mask(rows: int | None, recompute: bool) -> None:
    steps = parts(requires_grad=True)
    leaves = [part for step in steps for part in step]
    expected, found = dense(steps), blocked(steps, rows, recompute)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    wanted = torch.autograd.grad(sum(out.square().sum() for out in expected), leaves)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(sum(out.square().sum() for out in found), leaves)  # type: ignore[arg-type]
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


def test_scores_of_all_rows_never_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    original = torch.softmax

    def watched(values: Tensor, dim: int) -> Tensor:
        nonlocal largest
        largest = max(largest, values.shape[-2] * values.shape[-1])
        return original(values, dim)

    monkeypatch.setattr(torch, "softmax", watched)
    blocked(parts(), 4)
    assert largest <= 4 * (8 + STEPS - 1)


def test_half_precision() -> None:
    steps = [tuple(part.bfloat16() for part in step) for step in parts()]
    for ours, theirs in zip(blocked(steps, 4), dense(parts()), strict=True):  # type: ignore[arg-type]
        assert ours.dtype == torch.bfloat16
        torch.testing.assert_close(ours.float(), theirs, atol=0.05, rtol=0.05)


def streamed(steps: list[tuple[Tensor, Tensor, Tensor]], documents: Tensor, compiled: bool) -> list[Tensor]:
    attend = StreamedAttention(visible_blocks(documents), compiled)
    outputs = []
    for number, (query, key, value) in enumerate(steps):
        if number:
            attend.next_step()
        outputs.append(attend(0, query, key, value))
    return outputs


def test_streamed_attention_equals_one_dense_mask() -> None:
    steps = parts()
    for ours, theirs in zip(streamed(steps, DOCUMENTS, compiled=False), dense(steps), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_streamed_layers_keep_their_own_keys() -> None:
    attend = StreamedAttention(visible_blocks(DOCUMENTS), compiled=False)
    one, two = parts(1), parts(2)
    for number in range(STEPS):
        if number:
            attend.next_step()
        outputs = [attend(0, *one[number]), attend(1, *two[number])]
    torch.testing.assert_close(outputs[0], dense(one)[-1])
    torch.testing.assert_close(outputs[1], dense(two)[-1])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [16, 64])
def test_gradients_of_streamed_attention(size: int) -> None:
    rows = torch.Generator().manual_seed(3)
    documents = torch.tensor([0] * 300 + [1] * 17 + [2] * 160 + [-1] * 35)

    def made(heads: int) -> Tensor:
        return torch.randn(len(documents), heads, size, generator=rows).cuda().requires_grad_()

    steps = [(made(HEADS), made(KV), made(KV)) for _ in range(STEPS)]
    leaves = [part for step in steps for part in step]
    attend = UnrolledAttention(documents.cuda(), plan_blocks(documents.cuda(), 512))
    expected = []
    for number, step in enumerate(steps):
        if number:
            attend.next_step()
        expected.append(attend(0, *step))
    found = streamed(steps, documents.cuda(), compiled=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)
    wanted = torch.autograd.grad(sum(out.square().sum() for out in expected), leaves)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(sum(out.square().sum() for out in found), leaves)  # type: ignore[arg-type]
    for ours, theirs in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-2, rtol=1e-2)
