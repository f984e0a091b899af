"""Paged attention by Triton kernels against the torch reference, compiled where there is a GPU."""

from dataclasses import replace

import pytest
import torch

from specflow.core.attention import AttentionInputs
from specflow.kernels import paged_attention as reference
from tests.kernels.paged_cases import HEADS, RULES, STEPS, Paged
from tests.kernels.rejection_cases import DEVICE

pytest.importorskip("triton")

from specflow.kernels import paged_attention_triton as kernels
from specflow.kernels import streamed_attention
from specflow.kernels.paged_attention_triton import LaunchShape, Run, plan_runs
from specflow.kernels.streamed_attention import can_stream

# Several tiles of query rows, several tiles of keys, several splits of them: at sizes that the interpreter can do.
SMALL = LaunchShape(block_m=16, block_n=16)


def on_device(paged: Paged, dtype: torch.dtype, **options: bool) -> tuple[list[torch.Tensor], AttentionInputs]:
    """Query, pages and inputs where the kernels run."""
    inputs = paged.inputs(**options)
    names = ("positions", "slot_mapping", "block_table", "seq_len", "query_start")
    moved = {name: getattr(inputs, name) for name in names}
    moved = {name: None if tensor is None else tensor.to(DEVICE) for name, tensor in moved.items()}
    tensors = (paged.query, paged.key_pages, paged.value_pages)
    return [tensor.to(DEVICE, dtype) for tensor in tensors], replace(inputs, **moved)


def agree(
    paged: Paged, rules: dict, shape: LaunchShape, dtype: torch.dtype = torch.float32, *, with_starts: bool = True
) -> None:
    """The kernels give what the reference gives, within the rounding of dtype."""
    rules = rules | {"scale": 0.3}
    if rules.get("sinks"):
        rules["sinks"] = torch.linspace(-1, 2, paged.query.shape[1], device=DEVICE)
    tensors, inputs = on_device(paged, dtype, with_starts=with_starts)
    found = kernels.paged_attention(*tensors, inputs, **rules, shape=shape)
    clean = [tensor.nan_to_num(0.0) for tensor in tensors]  # what the reference reads and gives no weight
    expected = reference.paged_attention(*clean, inputs, **rules)
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    near = {torch.float32: (1e-4, 1e-5), torch.bfloat16: (2e-2, 2e-2), torch.float16: (5e-3, 5e-3)}[dtype]
    torch.testing.assert_close(found, expected, rtol=near[0], atol=near[1])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("step", "splits"),
    [("one token", 1), ("block", 2), ("prompt", 1), ("ragged tokens", 3), ("ragged blocks", 1), ("mixed", 2)],
)
def test_equals_the_reference(step: str, rule: str, splits: int) -> None:
    """Every kind of step and rule. Pages hold NaN where nothing was written; block 4 is no multiple of a tile."""
    paged = Paged(STEPS[step], HEADS["grouped"], (16, 16), "scattered", junk=float("nan"))
    agree(paged, RULES[rule], replace(SMALL, splits=splits))


@pytest.mark.parametrize("heads", [*HEADS.values(), (14, 2)], ids=str)
@pytest.mark.parametrize("rule", ["causal", "both ways, all"])
def test_groups_of_heads(heads: tuple[int, int], rule: str) -> None:
    """One, several and odd numbers of query heads to a KV head; more rows than a tile has."""
    agree(Paged([(4, 37), (2, 20)], heads, (16, 16), "scattered"), RULES[rule], replace(SMALL, splits=2))


@pytest.mark.parametrize("block", [8, 16, 64])
@pytest.mark.parametrize("sizes", [(80, 80), (96, 96), (32, 256), (24, 16), (8, 8)], ids=str)
def test_pages_and_head_sizes(sizes: tuple[int, int], block: int) -> None:
    """Sizes that are no power of two, and keys of another size than values (latent attention)."""
    paged = Paged([(2, 41), (3, 70)], (4, 2), sizes, "scattered", block=block, junk=float("nan"))
    agree(paged, {"window": 30}, replace(SMALL, splits=2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", ["all", "both ways"])
def test_half_precision(dtype: torch.dtype, rule: str) -> None:
    """Products in half precision, sums and softmax in float32, as in the reference."""
    agree(Paged([(4, 50), (4, 31)], (4, 2), (32, 32), "scattered"), RULES[rule], replace(SMALL, splits=2), dtype)


def test_sizes_chosen_by_the_kernel() -> None:
    """Without a launch shape; the interpreter's device gets one split."""
    agree(Paged(STEPS["mixed"], (4, 2), (16, 16), "scattered"), {}, LaunchShape())


def test_more_splits_than_work_and_than_a_small_join() -> None:
    """Splits past the sequence leave at once; the join reads none of what they did not write."""
    agree(Paged([(3, 70), (3, 5)], (4, 2), (16, 16), "scattered"), {"sinks": True}, replace(SMALL, splits=40))


def test_mixed_steps_take_both_paths() -> None:
    """A long prompt between short blocks; without query_start every group is launched alone."""
    paged = Paged([(1, 9), (3, 12), (40, 40), (2, 5), (2, 18), (1, 30)], (4, 2), (16, 16), "scattered")
    for with_starts in (True, False):
        agree(paged, {"window": 11}, replace(SMALL, splits=2), with_starts=with_starts)
    runs = plan_runs(paged.inputs(with_starts=True))
    assert [(type(run) is Run, run.first_request, run.num_requests, run.query_len) for run in runs] == [
        (True, 0, 2, 3), (False, 2, 1, 40), (True, 3, 3, 2),
    ]  # fmt: skip
    assert [type(run) is Run for run in plan_runs(paged.inputs())] == [True, True, False, True, True]


def test_strided_queries_and_pages() -> None:
    """Heads in front of tokens; keys and values of a drafter in one tensor; part of a wider block table; columns."""
    paged = Paged(STEPS["mixed"], (6, 2), (16, 16), "scattered")
    (query, keys, values), inputs = on_device(paged, torch.float32, with_starts=True)
    both = torch.cat([keys, values], 2)
    inputs = replace(inputs, block_table=torch.cat([inputs.block_table, inputs.block_table], 1)[:, :-1])
    by_head = query.transpose(0, 1).contiguous().transpose(0, 1)
    columns = {name: torch.stack([getattr(inputs, name), getattr(inputs, name) * 0], 1)[:, 0]
               for name in ("positions", "seq_len")}  # fmt: skip
    assert not columns["positions"].is_contiguous()
    inputs = replace(inputs, **columns)
    found = kernels.paged_attention(by_head, both[:, :, :2], both[:, :, 2:], inputs, scale=0.3, shape=SMALL)
    torch.testing.assert_close(found.cpu().double(), paged.expected(0.3), rtol=1e-4, atol=1e-5)


def test_positions_decide_and_padding_stays_in_block_zero() -> None:
    """Rows that repeat a position, as drafters have them, and a padded request whose table is all zeros."""
    paged = Paged([(4, 20), (4, 9)], (4, 2), (16, 16), "scattered")
    tensors, inputs = on_device(paged, torch.float32)
    positions, table = inputs.positions.clone(), inputs.block_table.clone()
    positions[2:4] = positions[1]
    positions[4:], table[1] = 0, 0
    inputs = replace(inputs, positions=positions, block_table=table)
    for group in inputs.groups:
        group.cache.clear()
    found = kernels.paged_attention(*tensors, inputs, scale=0.3, shape=SMALL)
    torch.testing.assert_close(found, reference.paged_attention(*tensors, inputs, scale=0.3), rtol=1e-4, atol=1e-5)
    assert torch.isfinite(found).all()


def test_what_can_be_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 128 values in half precision under no rule but causality, where the kernel runs."""
    query, pages = torch.zeros(1, 8, 128, dtype=torch.bfloat16), torch.zeros(2, 16, 2, 128, dtype=torch.bfloat16)
    plain = {"window": None, "softcap": None, "sinks": None}
    assert not can_stream(query, pages, pages, plain)
    monkeypatch.setattr(streamed_attention, "has_group_products", lambda _device: True)
    monkeypatch.setattr(streamed_attention, "_runs", lambda *_: True)
    assert can_stream(query, pages, pages, plain)
    assert not any(can_stream(query, pages, pages, plain | {name: 1.0}) for name in plain)
    assert not can_stream(query.float(), pages.float(), pages.float(), plain)
    assert not can_stream(query, pages[..., :64], pages[..., :64], plain)
    assert not can_stream(query, pages, pages.transpose(1, 2), plain)
    monkeypatch.setattr(streamed_attention, "_runs", lambda *_: False)
    assert not can_stream(query, pages, pages, plain)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the kernel may run")
def test_what_does_not_compile_is_done_by_the_other_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here: on a CPU, where Gluon cannot run."""
    monkeypatch.setattr(streamed_attention, "has_group_products", lambda _device: True)
    streamed_attention._runs.cache_clear()
    try:
        agree(Paged([(16, 40)], (4, 1), (128, 128), "scattered", block=16), {}, LaunchShape(), torch.bfloat16)
        assert not streamed_attention._runs(DEVICE, torch.bfloat16)
    finally:
        streamed_attention._runs.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rule", RULES)
def test_compiled_rules(rule: str, dtype: torch.dtype) -> None:
    """Every rule in launch shapes of the kernel's own choice; few tokens and many, ragged, one split and several."""
    rules = RULES[rule] | ({"window": 100} if RULES[rule].get("window", 0) > 1 else {})
    for spans in ([(1, 701), (1, 33), (1, 260)], [(32, 900), (5, 33), (16, 16), (2, 90)]):
        agree(Paged(spans, (8, 2), (128, 128), "scattered", block=16, junk=float("nan")), rules, LaunchShape(), dtype)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "sizes"),
    [((16, 16), (64, 64)), ((14, 2), (64, 64)), ((8, 1), (256, 256)), ((8, 4), (80, 80)), ((4, 4), (192, 128))],
    ids=str,
)
def test_compiled_sizes(heads: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Head sizes and groups of real models, up to the largest tile."""
    agree(Paged([(16, 700), (16, 33)], heads, sizes, "scattered", block=16), {}, LaunchShape(), dtype)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("causal", [True, False])
def test_a_captured_call_replays_with_longer_texts(causal: bool) -> None:
    """Captured over short texts, replayed over others; nothing waits for the device."""
    cases = [Paged([(4, end + row) for row in range(8)], (8, 2), (64, 64), "scattered", seed=end, block=16)
             for end in (2000, 40, 700, 1999)]  # fmt: skip
    tensors, inputs = on_device(cases[0], torch.bfloat16)
    static = AttentionInputs(
        inputs.positions.clone(), inputs.slot_mapping, inputs.block_table.clone(), inputs.seq_len.clone(),
        [replace(group, cache={}) for group in inputs.groups],
    )  # fmt: skip
    pages = [tensor.clone() for tensor in tensors]
    kernels.paged_attention(*pages, static, scale=0.1, causal=causal)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = kernels.paged_attention(*pages, static, scale=0.1, causal=causal)
        kernels.paged_attention(*pages, static, scale=0.1, causal=causal)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for paged in cases[1:]:
        tensors, inputs = on_device(paged, torch.bfloat16)
        for buffer, values in zip(pages, tensors, strict=True):
            buffer[: len(values)] = values
        static.positions.copy_(inputs.positions)
        static.seq_len.copy_(inputs.seq_len)
        static.block_table.zero_()
        static.block_table[:, : inputs.block_table.shape[1]] = inputs.block_table
        graph.replay()
        expected = reference.paged_attention(*tensors, inputs, scale=0.1, causal=causal)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
