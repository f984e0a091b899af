"""What stands on top of the block: a Markov head that joins its drafts, and a head that foresees their fate.

DeepSeek-AI 2026 (arXiv 2607.05147). The block says the logits U_j of all drafts at once, each as if it knew nothing of
the others. The Markov head adds a low-rank bias that depends on the token before, so that drafts are chosen left to
right: z_j = U_j + W2 f(W1[x_{j-1}], …), x_0 being the anchor. The confidence head says the logit of the chance that
draft j is accepted if those before it were, from the block's state and the token before: draft j itself has no part
in it, so that it may be asked before draft j is drawn.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from specflow.heads.dflash import DFlashConfig, DFlashHead
from specflow.heads.layers import initialise

MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS = get_args(MarkovKind)


@dataclass(frozen=True, kw_only=True)
class SerialConfig:
    """The heads on top of a block."""

    markov_rank: int  # r; 0 = no Markov head
    markov_kind: MarkovKind = "vanilla"  # vanilla = f is the embedding; gated = times a gate; rnn = of all tokens
    confidence: bool = True
    confidence_with_markov: bool = True  # the confidence head reads the embedding of the token before as well


class MarkovHead(nn.Module):
    """Bias of a draft's logits by the token before it, under the tensor names of published checkpoints."""

    def __init__(self, config: SerialConfig, block: DFlashConfig) -> None:
        super().__init__()
        rank, width = config.markov_rank, block.shape.hidden_size
        self.kind, self.rank = config.markov_kind, rank
        self.markov_w1 = nn.Embedding(block.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, block.draft_vocab_size, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(width + rank, rank)
        elif self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + width, 3 * rank)  # rows: gate, candidate, output

    def embed(self, previous: Tensor) -> Tensor:
        """W1 of target ids [...], [..., r]."""
        return self.markov_w1(previous)

    def start(self, embedded: Tensor) -> Tensor:
        """What `step` remembers at the beginning of a block, for embeddings [R, r]."""
        return torch.zeros_like(embedded)

    def step(self, embedded: Tensor, states: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """f of one draft and the memory for the next: embedded [R, r] of the token before, block states [R, E].

        The logits' bias is W2 f. Only `rnn` remembers; its bias reads the memory as it was before this draft.
        """
        if self.kind == "vanilla":
            return embedded, memory
        if self.kind == "gated":
            gate = torch.sigmoid(self.gate_proj(torch.cat([states, embedded], -1)))
            return gate * embedded, memory
        joint = self.joint_proj(torch.cat([memory, embedded, states], -1))
        gate, candidate, output = joint.chunk(3, -1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * memory + (1 - gate) * torch.tanh(candidate)

    def latents(self, embedded: Tensor, states: Tensor) -> Tensor:
        """f of all J drafts of N blocks whose tokens before are known: [N, J, r] and [N, J, E] -> [N, J, r]."""
        memory = self.start(embedded[:, 0])
        if self.kind != "rnn":
            return self.step(embedded, states, memory)[0]
        found = []
        for one, state in zip(embedded.unbind(1), states.unbind(1), strict=True):
            latent, memory = self.step(one, state, memory)
            found.append(latent)
        return torch.stack(found, 1)

    def bias(self, latents: Tensor) -> Tensor:
        """f [..., r] -> what is added to the logits, [..., Vd]."""
        return self.markov_w2(latents)


class ConfidenceHead(nn.Module):
    """One linear form, under the tensor names of published checkpoints."""

    def __init__(self, config: SerialConfig, block: DFlashConfig) -> None:
        super().__init__()
        rank = config.markov_rank if config.confidence_with_markov else 0
        self.with_markov = config.confidence_with_markov
        self.proj = nn.Linear(block.shape.hidden_size + rank, 1)

    def forward(self, states: Tensor, embedded: Tensor | None) -> Tensor:
        """Logits [...] from block states [..., E] and embeddings [..., r] of the tokens before."""
        if self.with_markov:
            assert embedded is not None
            states = torch.cat([states, embedded.to(states.dtype)], -1)
        return self.proj(states).squeeze(-1)


class DSparkHead(DFlashHead):
    """Block, Markov head and confidence head as one module, as they are trained and saved."""

    def __init__(self, block: DFlashConfig, serial: SerialConfig) -> None:
        super().__init__(block)
        self.serial = serial
        self.markov_head = MarkovHead(serial, block) if serial.markov_rank else None
        self.confidence_head = ConfidenceHead(serial, block) if serial.confidence else None

    def fresh(self) -> None:
        """Fresh weights. The bias starts at 0 with embeddings of length 1, so that both of its factors learn at once;
        the confidence head starts at even odds."""
        initialise(self)
        if self.markov_head is not None:
            nn.init.normal_(self.markov_head.markov_w1.weight, std=self.serial.markov_rank**-0.5)
            nn.init.zeros_(self.markov_head.markov_w2.weight)
        if self.confidence_head is not None:
            nn.init.zeros_(self.confidence_head.proj.weight)
