"""Contract of a sampler: turns target logits and drafts into accepted tokens plus one more."""

from abc import ABC, abstractmethod

import torch

from specflow.core.draft import Verdict, VerifyInputs


class Sampler(ABC):
    """A verification method. Lossless unless the class says otherwise; a lossy one is labelled in every report."""

    name: str = "sampler"
    lossless: bool = True

    @abstractmethod
    def verify(self, logits: torch.Tensor, inputs: VerifyInputs) -> Verdict:
        """Accept a prefix of each request's drafts and emit one more token.

        logits: [N, V] float, row `inputs.cu_rows[b] + i` judges draft i of request b; every option of the request is
        applied already (penalties, bias, masks; for sampling rows also temperature, top-k, top-p, min-p), so that
        softmax of a row is the law *p* its token must follow. Greedy rows take the lowest id among the highest logits.
        """

    def describe(self) -> dict[str, str]:
        """What really ran; shown in the report."""
        return {}
