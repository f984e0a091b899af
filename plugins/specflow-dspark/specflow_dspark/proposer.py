"""DSpark: a block of drafts in one pass, chosen left to right, and as many of them submitted as are worth their cost.

DeepSeek-AI 2026 (arXiv 2607.05147). Block, pages and context are those of specflow's block heads; this module adds the
choice of the tokens and of the length. The confidence of draft j follows from the tokens before it, so the decision to
submit draft j is made without looking at it: see `specflow_dspark.prefix`.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from specflow.checkpoints.dflash import LoadedDFlash
from specflow.core.limits import EngineLimits
from specflow.errors import ConfigError
from specflow.proposers.base import HostView, PassCost, ProposeContext, Requirements
from specflow.proposers.block_drafter import BlockRows
from specflow.proposers.dflash import DFlashOptions, DFlashProposer
from specflow.proposers.draft_sampling import DraftSampler
from specflow.proposers.vocabulary import over_all_ids
from specflow.targets.base import lent_tables
from specflow_dspark.checkpoint import LoadedDSpark, load_dspark
from specflow_dspark.prefix import affordable, confident, cost_table, more_per_request

if TYPE_CHECKING:
    from specflow.backends.base import Backend
    from specflow.targets.base import Target

Selection = Literal["cost", "threshold", "all"]
_REPEATS = 6  # timed rounds of drafting, the first not counted
_MANY = 8  # requests that drafting is timed for, besides one
_BUNDLED = Path(__file__).parent / "models" / "dspark"


@dataclass(frozen=True, kw_only=True)
class DSparkOptions(DFlashOptions):
    """Options of `proposer=dspark`. Raises `ConfigError` when a value is out of range."""

    # How many of the drafts are submitted: cost = as many as raise tokens per second; threshold = those before the
    # first whose chance is below `threshold`; all.
    prefix_selection: Selection = "cost"
    threshold: float = 0.3  # least chance of a draft, given those before it, with prefix_selection=threshold
    # Pairs of query tokens and milliseconds of a pass of the target, as [[1, 2.0], [8, 2.6]]; None = measured at the
    # start. Which drafts are submitted, and so what is sampled from a seed, repeats exactly only with given costs.
    verify_costs: tuple[tuple[int, float], ...] | None = None
    # Milliseconds that a round takes besides, drafting included: with one request, and more for each further one, as
    # [2.0, 0.4]; None = measured.
    round_cost: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefix_selection not in get_args(Selection):
            allowed = ", ".join(get_args(Selection))
            raise ConfigError(f"proposer.prefix_selection={self.prefix_selection!r} must be one of {allowed}.")
        if not 0 <= self.threshold <= 1:
            raise ConfigError(f"proposer.threshold={self.threshold} must be from 0 to 1.")
        costs = self.verify_costs
        if costs is not None and (not costs or any(tokens < 1 or cost <= 0 for tokens, cost in costs)):
            raise ConfigError(
                f"proposer.verify_costs={[list(pair) for pair in costs]} must be pairs of tokens from 1 on and "
                "milliseconds above 0, as [[1, 2.0], [8, 2.6]], or null."
            )
        if self.round_cost is not None and min(self.round_cost) < 0:
            raise ConfigError(f"proposer.round_cost={list(self.round_cost)} must be two numbers of 0 or more, or null.")


class DSparkProposer(DFlashProposer):
    """Drafts K tokens in one pass and K small steps, and submits the prefix that is worth verifying."""

    name = "dspark"
    options: DSparkOptions

    def bundled_head(self) -> str:
        """See `DFlashProposer.bundled_head`: the one in this package."""
        if not (_BUNDLED / "config.json").exists():
            raise ConfigError(
                "proposer.path must be given: this version of specflow-dspark brings no head. Train one for the "
                "bundled target with `python -m specflow +experiment=zoo_dspark` (one GPU, minutes), then "
                "proposer.path=runs/zoo/dspark/head."
            )
        return str(_BUNDLED)

    def read_head(self, folder: Path, target: "Target", device: torch.device, dtype: torch.dtype) -> LoadedDFlash:
        """See `DFlashProposer.read_head`."""
        dummy = self.options.load_format == "dummy"
        self._serial: LoadedDSpark = load_dspark(
            folder, target.facts, lent_tables(target), device=device, dtype=dtype, dummy=dummy
        )
        return self._serial.block

    def load(self, target: "Target", backend: "Backend") -> None:
        """See `DFlashProposer.load`. Raises `ConfigError` for a threshold without a confidence head."""
        super().load(target, backend)
        self._backend = backend
        self._selection = self.options.prefix_selection
        if self._serial.confidence is None:
            if self._selection == "threshold":
                raise ConfigError(
                    f"proposer.prefix_selection=threshold needs a confidence head, which {self._folder} lacks: use all."
                )
            self._selection = "all"

    def requirements(self) -> Requirements:
        """See `DFlashProposer.requirements`; and costs, unless they are given."""
        found = super().requirements()
        return replace(found, pass_costs=self._selection == "cost" and self.options.verify_costs is None)

    def attach(self, target: "Target", limits: EngineLimits) -> None:
        """See `DFlashProposer.attach`."""
        super().attach(target, limits)
        self._limits = limits
        shift = self._serial.description.calibration.stacked(limits.device)
        self._calibration = shift[:, :, : self.num_speculative_tokens].contiguous()
        if self._selection == "cost" and self.options.verify_costs is not None:
            given = self.options.verify_costs
            self.calibrate([PassCost(1, tokens, milliseconds / 1000) for tokens, milliseconds in given])

    def calibrate(self, costs: Sequence[PassCost]) -> None:
        """See `Proposer.calibrate`; drafting is timed here unless its cost is given."""
        limits = self._limits
        most = limits.max_num_seqs * (self.num_speculative_tokens + 1)
        self._points = [(cost.tokens, cost.seconds) for cost in costs if cost.requests == 1] or [(1, 1.0)]
        table = cost_table(self._points, most)
        if self.options.round_cost is None:
            one, further = self._drafting_seconds()
            further += more_per_request([(cost.requests, cost.tokens, cost.seconds) for cost in costs], table)
        else:
            one, further = (milliseconds / 1000 for milliseconds in self.options.round_cost)
        self._round_cost = (one, further)
        self._costs = torch.tensor(table, dtype=torch.float32, device=limits.device)

    def choose(self, rows: BlockRows, sampler: DraftSampler, sampled: bool) -> Tensor:
        """See `DFlashProposer.choose`. Left to right: each draft's logits are those of the block and the bias of the
        token before it, and the sampler keeps exactly what it drew from."""
        markov = self._serial.markov
        if markov is None:
            return super().choose(rows, sampler, sampled)
        reduced = self._head.config.reduced
        previous, chosen = rows.anchors, []
        memory = None
        for index in range(self.num_speculative_tokens):
            embedded = markov.embed(previous)
            memory = markov.start(embedded) if memory is None else memory
            latent, memory = markov.step(embedded, rows.states[:, index], memory)
            logits = rows.logits[:, index] + markov.bias(latent)
            if reduced and sampled:
                logits = over_all_ids(logits, self._head.ids, self._vocab_size)
            previous = sampler.choose(index, logits)
            if reduced and not sampled:
                previous = self._head.ids[previous]
            chosen.append(previous)
        return torch.stack(chosen, 1)

    def chances(self, context: ProposeContext, rows: BlockRows, drafts: Tensor) -> Tensor:
        """The chance of each draft to be accepted if those before it are, [R, K] float32.

        That of draft j is made of the block's state and the token before it.
        """
        confidence, markov = self._serial.confidence, self._serial.markov
        assert confidence is not None
        embedded = None
        if confidence.with_markov:
            assert markov is not None
            embedded = markov.embed(torch.cat([rows.anchors.unsqueeze(1), drafts[:, :-1]], 1)).float()
        logits = confidence(rows.states.float(), embedded)
        line = self._calibration[(context.temperature == 0).long()]  # [R, 2, K]
        return torch.sigmoid(logits * line[:, 0] + line[:, 1])

    def count(self, context: ProposeContext, rows: BlockRows, drafts: Tensor, usable: Tensor) -> Tensor:
        """See `DFlashProposer.count`: the drafts that are worth verifying, by `prefix_selection`."""
        if self._selection == "all":
            return usable
        chances = self.chances(context, rows, drafts)
        if self._selection == "threshold":
            return torch.minimum(usable, confident(chances, self.options.threshold))
        count, length = drafts.shape
        allowed = torch.minimum(usable, context.max_drafts).unsqueeze(1)
        possible = torch.arange(length, device=drafts.device) < allowed
        survival = torch.where(possible, chances, 0.0).cumprod(1)
        one, further = self._round_cost
        return affordable(survival, self._costs[count : count * (length + 1) + 1] + (one + further * (count - 1)))

    def _drafting_seconds(self) -> tuple[float, float]:
        """Seconds of drafting for one request, and more for each further one."""
        many = min(_MANY, self._limits.max_num_seqs)
        one, all_of_them = self._timed(1), self._timed(many)
        return one, max(0.0, all_of_them - one) / max(1, many - 1)

    def _timed(self, count: int) -> float:
        """Median seconds of drafting for so many requests, all of them on the block that no request has."""
        limits, device = self._limits, self._limits.device
        ones = torch.ones(count, dtype=torch.int64, device=device)
        context = ProposeContext(
            slots=torch.full_like(ones, limits.pad_slot),
            num_tokens=ones,
            max_drafts=ones * self.num_speculative_tokens,
            token_table=torch.zeros(limits.pad_slot + 1, limits.table_width, dtype=torch.int64, device=device),
            block_table=torch.zeros(count, limits.max_blocks_per_seq, dtype=torch.int64, device=device),
            temperature=torch.zeros(count, device=device),
            seeds=ones,
            all_greedy=True,
            features=None,
            host=replace(HostView.bounds(count, limits), num_tokens=np.ones(count, dtype=np.int64)),
        )
        self._costs = torch.ones(count * (self.num_speculative_tokens + 1) + 1, device=device)
        self._round_cost = (0.0, 0.0)
        seconds = []
        for _ in range(_REPEATS):
            self._backend.synchronize()
            begun = time.perf_counter()
            self._draft_for_time(context)
            self._backend.synchronize()
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds[1:])

    @torch.inference_mode()
    def _draft_for_time(self, context: ProposeContext) -> None:
        self._draft(context)

    def describe(self) -> dict[str, str]:
        """See `DFlashProposer.describe`; and the further heads, the selection and the costs it goes by."""
        facts, serial = super().describe(), self._serial.description
        config = serial.config
        facts["markov head"] = f"{config.markov_kind}, rank {config.markov_rank}" if config.markov_rank else "none"
        facts["confidence head"] = "none" if not config.confidence else "calibrated" if serial.calibrated else "raw"
        facts["prefix selection"] = self._selection
        if self._selection == "threshold":
            facts["prefix selection"] += f", chance of {self.options.threshold:g} or more"
        if hasattr(self, "_points"):
            facts["verify_costs"] = str([[tokens, round(1000 * cost, 3)] for tokens, cost in self._points])
            facts["round_cost"] = str([round(1000 * cost, 3) for cost in self._round_cost])
        return facts
