"""specflow's conformance kit on every form of the method."""

from pathlib import Path

import pytest
from dspark_helpers import COSTS, random_head

from specflow.testing import ProposerConformance

LENGTHS = (1, 4)
INVALID = (
    {"prefix_selection": "some"},
    {"threshold": 1.5},
    {"verify_costs": [[0, 1.0]]},
    {"verify_costs": [[1, 0.0]]},
    {"verify_costs": []},
    {"round_cost": [-1.0, 0.0]},
    {"round_cost": [1.0]},
    {"draft_sample_method": "beam"},
)


class TestByCost(ProposerConformance):
    """As it comes, with costs that are given, so that two runs choose alike."""

    proposer = "dspark"
    invalid_options = INVALID
    lengths = LENGTHS
    drafts_follow_the_text = False  # how many are submitted depends on the other requests of the batch

    @pytest.fixture(autouse=True)
    def _options(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = random_head(tmp_path_factory.mktemp("head"))
        self.options = {"path": str(folder), "verify_costs": COSTS, "round_cost": [1.0, 0.1]}


class TestSampledByCost(TestByCost):
    """Drafts drawn from q, which rejection sampling must know exactly."""

    @pytest.fixture(autouse=True)
    def _options(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = random_head(tmp_path_factory.mktemp("head"), confidence_moves_block=True)
        self.options = {
            "path": str(folder),
            "verify_costs": COSTS,
            "round_cost": [1.0, 0.1],
            "draft_sample_method": "probabilistic",
        }


class TestByMeasuredCost(TestByCost):
    """Costs measured at the start: the length may differ from run to run, and the output may not."""

    deterministic = False

    @pytest.fixture(autouse=True)
    def _options(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.options = {"path": str(random_head(tmp_path_factory.mktemp("head")))}

    def test_it_describes_itself(self) -> None:
        pytest.skip("it says what it measured")


class TestByThreshold(ProposerConformance):
    """The fill-in layout and a gated Markov head."""

    proposer = "dspark"
    lengths = LENGTHS

    @pytest.fixture(autouse=True)
    def _options(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder = random_head(
            tmp_path_factory.mktemp("head"), sample_from_anchor=False, markov_head_type="gated", sliding_window=6
        )
        self.options = {
            "path": str(folder),
            "prefix_selection": "threshold",
            "threshold": 0.02,
            "draft_sample_method": "probabilistic",
        }


class TestAll(ProposerConformance):
    """A recurrent Markov head, and no confidence head."""

    proposer = "dspark"
    lengths = LENGTHS

    @pytest.fixture(autouse=True)
    def _options(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        folder: Path = random_head(tmp_path_factory.mktemp("head"), markov_head_type="rnn", confidence=0.0)
        self.options = {"path": str(folder), "draft_sample_method": "probabilistic"}
