"""A block run at once, without pages, and the tokens chosen one after the other: what the engine's way must equal."""

import torch
from specflow_dspark.checkpoint import LoadedDSpark
from torch import Tensor

from specflow.heads.dflash import DFlashHead
from specflow.kernels.rotary import rotary_table


def block_states(head: DFlashHead, features: Tensor, anchor: int, rows: int) -> Tensor:
    """States [J, E] of the rows that say a draft, behind features [s, A, Et] of all positions before the anchor.

    Full attention in both directions only.
    """
    config, start = head.config, len(features)
    table = rotary_table(config.shape.rope, start + rows, torch.device("cpu"), torch.float32)
    before, inside = table.rows(torch.arange(start)), table.rows(torch.arange(start, start + rows))
    context = head.context_keys_values(head.context(features), before)
    shared = config.shape.num_heads // config.shape.num_kv_heads

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        keys, values = (torch.cat(pair) for pair in zip(context[layer], (key, value), strict=True))
        keys, values = keys.repeat_interleave(shared, 1), values.repeat_interleave(shared, 1)
        scores = torch.einsum("qhd,khd->hqk", query, keys) * config.shape.head_dim**-0.5
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)

    ids = torch.full((rows,), config.mask_token_id)
    ids[0] = anchor
    return head(head.embed(ids), inside, attend)[config.answers]


def corrected(loaded: LoadedDSpark, states: Tensor, previous: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [J, Vd] and confidence logits [J] of drafts whose tokens before, [J] target ids, are given."""
    assert loaded.markov is not None
    assert loaded.confidence is not None
    embedded = loaded.markov.embed(previous)
    latents = loaded.markov.latents(embedded.unsqueeze(0), states.unsqueeze(0))[0]
    read = embedded if loaded.confidence.with_markov else None
    return loaded.block.head.logits(states) + loaded.markov.bias(latents), loaded.confidence(states, read)


def greedy_drafts(loaded: LoadedDSpark, features: Tensor, anchor: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Drafts [J], their corrected logits and the confidence logits."""
    states = block_states(loaded.block.head, features, anchor, rows)
    previous = [anchor]
    for index in range(len(states)):
        known = torch.tensor(previous + [0] * (len(states) - 1 - index))
        logits, _ = corrected(loaded, states, known)
        best = int(logits[index].argmax())
        previous.append(int(loaded.block.head.ids[best]) if loaded.block.head.config.reduced else best)
    logits, confidence = corrected(loaded, states, torch.tensor(previous[:-1]))
    return torch.tensor(previous[1:]), logits, confidence
