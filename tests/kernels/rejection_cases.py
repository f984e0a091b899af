"""Random inputs for the rejection kernels, on a GPU where there is one and in Triton's interpreter elsewhere."""

import os
from dataclasses import fields, replace

import torch

from specflow.core.draft import Verdict, VerifyInputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
if DEVICE.type == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when the kernels are imported, below in every test module


def make_case(
    batch: int,
    num_drafts: int,
    vocab: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    with_law: bool = False,
    heat: float | None = None,
    padded: bool = False,
) -> tuple[torch.Tensor, VerifyInputs]:
    """Ragged drafts, a fifth of them placeholders or nonsense; a third of the requests greedy unless heat is given."""
    g, big = torch.Generator().manual_seed(seed), torch.Generator(DEVICE).manual_seed(seed)
    counts = torch.randint(0, num_drafts + 1, (batch,), generator=g)
    counts[-1] = num_drafts
    sizes = torch.full((batch,), num_drafts + 1) if padded else counts + 1
    cu_rows = torch.cat([torch.zeros(1, dtype=torch.int64), torch.cumsum(sizes, 0)])
    num_rows = int(cu_rows[-1])
    logits = 3 * torch.randn(num_rows, vocab, generator=big, device=DEVICE)
    logits[torch.arange(num_rows), torch.randint(vocab, (num_rows,), generator=g)] += 14
    logits = logits.to(dtype)
    steps = torch.arange(num_drafts)
    seen = logits[(cu_rows[:-1, None] + steps).clamp(max=num_rows - 1)].float()
    law = seen + torch.randn(seen.shape, generator=big, device=DEVICE)
    ids = law.argmax(-1).cpu() if num_drafts else torch.zeros(batch, 0, dtype=torch.int64)
    chance = torch.rand(ids.shape, generator=g)
    ids = torch.where(chance < 0.1, torch.randint(vocab, ids.shape, generator=g), ids)
    ids = ids.masked_fill((chance > 0.9) | (steps >= counts[:, None]), -1)
    temperature = torch.rand(batch, generator=g) + 0.5
    temperature[torch.rand(batch, generator=g) < 0.3] = 0.0
    if heat is not None:
        temperature[:] = heat
    inputs = VerifyInputs(
        cu_rows=cu_rows,
        draft_ids=ids,
        num_drafts=counts,
        positions=torch.randint(0, 9999, (batch,), generator=g),
        temperature=temperature,
        seeds=torch.randint(-(2**62), 2**62, (batch,), generator=g),
        rounds=torch.zeros(batch, dtype=torch.int64),
        draft_logits=law.to(dtype) if with_law else None,
        all_greedy=bool((temperature == 0).all()),
    )
    return logits, to_device(inputs)


def to_device(inputs: VerifyInputs) -> VerifyInputs:
    """All tensors where the kernels run."""
    tensors = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return replace(inputs, **{name: t.to(DEVICE) for name, t in tensors.items() if isinstance(t, torch.Tensor)})


def reorder(logits: torch.Tensor, inputs: VerifyInputs, order: list[int]) -> tuple[torch.Tensor, VerifyInputs]:
    """The same requests in another order."""
    starts, sizes = inputs.cu_rows[:-1], inputs.cu_rows.diff()
    rows = torch.cat([torch.arange(int(starts[i]), int(starts[i] + sizes[i]), device=DEVICE) for i in order])
    names = ("draft_ids", "num_drafts", "positions", "temperature", "seeds", "rounds", "draft_logits")
    picked = {name: getattr(inputs, name) for name in names}
    changed = {name: value[order] for name, value in picked.items() if value is not None}
    cu_rows = torch.nn.functional.pad(torch.cumsum(sizes[order], 0), (1, 0))
    return logits[rows], replace(inputs, cu_rows=cu_rows, **changed)


def same(left: Verdict, right: Verdict) -> bool:
    """All three tensors equal in value and type."""
    names = ("token_ids", "num_emitted", "num_accepted")
    return all(
        torch.equal(getattr(left, n), getattr(right, n)) and getattr(left, n).dtype == getattr(right, n).dtype
        for n in names
    )
