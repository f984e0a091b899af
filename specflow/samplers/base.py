"""Contract of a sampler: turns target logits and drafts into accepted tokens plus one more."""

from abc import ABC, abstractmethod

import torch

from specflow.core.draft import Verdict, VerifyInputs
from specflow.core.limits import EngineLimits
from specflow.kernels.noise import DRAFT


class Sampler(ABC):
    """A verification method. Lossless unless the class says otherwise; a lossy one is labelled in every report.

    The attributes tell the engine how drafts have to be drawn for this method; they never change after `configure`.
    """

    name: str = "sampler"
    lossless: bool = True
    seed_exact: bool = False  # under a seed, sampled output equals plain decoding's token by token
    needs_draft_logits: bool = True  # reads `VerifyInputs.draft_logits`; False: nobody stores them
    reads_draft_slots: bool = False  # takes draft logits where they are stored, see `VerifyInputs.draft_slots`
    draft_domain: int = DRAFT  # domain of the noise that probabilistic drafts are drawn with
    fresh_draft_noise: bool = False  # a position drafted again in a later step must get new noise
    applies_temperature: bool = False  # divides raw logits by the temperature itself, see `VerifyInputs.scaled`

    def check_num_drafts(self, num_drafts: int) -> None:
        """Raise `ConfigError` when the options do not fit K = num_drafts; called before any weight is loaded."""

    def configure(self, limits: EngineLimits) -> None:
        """Learn the engine's sizes; called once, before the first step."""

    def warm_up(self, limits: EngineLimits, *, draft_laws: bool) -> None:
        """Compile what a step would otherwise wait for; called once, after `configure`.

        draft_laws: the engine stores the laws of drafts and hands them over.
        """

    @abstractmethod
    def verify(self, logits: torch.Tensor, inputs: VerifyInputs) -> Verdict:
        """Accept a prefix of each request's drafts and emit one more token.

        logits: [N, V] float, row `inputs.cu_rows[b] + i` judges draft i of request b; every option of the request is
        applied already (penalties, bias, masks; for sampling rows also temperature, top-k, top-p, min-p), so that
        softmax of a row is the law *p* its token must follow. Only where `inputs.scaled` is False, which a sampler gets
        if it `applies_temperature`, sampling rows still have to be divided by the temperature. Greedy rows take the
        lowest id among the highest logits.
        Without drafts it is plain decoding, so that both draw their tokens in one place.
        """

    def describe(self) -> dict[str, str]:
        """What really ran; shown in the report."""
        return {}
