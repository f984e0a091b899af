"""Every built-in proposer through the conformance kit that strangers' plugins use."""

import re
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from specflow.backends.cpu import CpuBackend, CpuOptions
from specflow.plugins.component import Kind
from specflow.plugins.registry import load_plugins
from specflow.targets.hf import HfOptions, HfTarget
from specflow.testing import NoiseProposer, ProposerConformance
from specflow.testing.tiny_models import tiny_target
from specflow.training.dflash import DFlashTraining, DFlashTrainingOptions
from tests.heads.eagle3_helpers import make_head, save_head
from tests.models import add_to_config, tiny_llama

DOCUMENT = Path(__file__).parents[2] / "docs" / "custom_class.md"
LOOKUP = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer that knows nothing of the target."""
    return tiny_llama(tmp_path_factory.mktemp("drafter"), seed=1, layers=1)


@pytest.fixture(scope="module")
def parallel_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny_llama(tmp_path_factory.mktemp("parallel"), seed=1, layers=1)
    return add_to_config(folder, spd_type="pard", pard_token=2)


@pytest.fixture(scope="module")
def eagle3_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_head(tmp_path_factory.mktemp("eagle3"), make_head(draft_vocab_size=200))


@pytest.fixture(scope="module")
def dflash_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dflash")
    target = HfTarget(HfOptions(path=str(tiny_target()), dtype="float32", prove=False))
    target.load(CpuBackend(CpuOptions()))
    options = DFlashTrainingOptions(num_layers=2, block_size=6, mask_token_id=383, sliding_window=6)
    training = DFlashTraining(options)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        training.build(target.facts, target.token_tables(), None, torch.device("cpu"))
        for weight in training.module.parameters():
            weight.data += 0.2 * torch.randn(weight.shape)
    training.save(folder)
    return folder


@pytest.fixture(scope="module")
def bigrams(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of the documentation."""
    found = re.search(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert found
    file = tmp_path_factory.mktemp("custom") / "bigrams.py"
    file.write_text(found[1])
    return file


class TestNgram(ProposerConformance):
    proposer = "ngram"
    options = LOOKUP
    invalid_options = ({"prompt_lookup_max": 0}, {"prompt_lookup_min": 4})


class TestNgramGpu(ProposerConformance):
    proposer = "ngram_gpu"
    options = LOOKUP
    invalid_options = ({"prompt_lookup_max": 0}, {"kernels": "fast"})


class TestSuffix(ProposerConformance):
    proposer = "suffix"
    drafts_follow_the_text = False  # it learns from other requests, running ones included
    invalid_options = ({"suffix_decoding_min_token_prob": 1.5}, {"suffix_decoding_max_tree_depth": 1})


class TestSuffixOfItsOwnText(ProposerConformance):
    """Without a memory of other requests."""

    proposer = "suffix"
    options = MappingProxyType({"suffix_decoding_max_cached_requests": 0})


class TestDraftModel(ProposerConformance):
    proposer = "draft_model"
    invalid_options = ({"draft_sample_method": "best"},)

    @pytest.fixture(autouse=True)
    def _options(self, drafter: Path) -> None:
        self.options = {"path": str(drafter)}


class TestSampledDraftModel(TestDraftModel):
    @pytest.fixture(autouse=True)
    def _options(self, drafter: Path) -> None:
        self.options = {"path": str(drafter), "draft_sample_method": "probabilistic"}


class TestPard(ProposerConformance):
    proposer = "pard"

    @pytest.fixture(autouse=True)
    def _options(self, parallel_drafter: Path) -> None:
        self.options = {"path": str(parallel_drafter), "draft_sample_method": "probabilistic"}


class TestEagle3(ProposerConformance):
    proposer = "eagle3"

    @pytest.fixture(autouse=True)
    def _options(self, eagle3_head: Path) -> None:
        self.options = {"path": str(eagle3_head), "draft_sample_method": "probabilistic"}


class TestDFlash(ProposerConformance):
    proposer = "dflash"

    @pytest.fixture(autouse=True)
    def _options(self, dflash_head: Path) -> None:
        self.options = {"path": str(dflash_head), "draft_sample_method": "probabilistic"}


class TestCustomClass(ProposerConformance):
    proposer = "custom_class"

    @pytest.fixture(autouse=True)
    def _options(self, bigrams: Path) -> None:
        self.options = {"path": f"{bigrams}:Bigrams", "options": {"least": 1}}


class TestNoise(ProposerConformance):
    """Not registered: made by `make_proposer`."""

    deterministic = False

    def make_proposer(self, num_speculative_tokens: int) -> NoiseProposer:
        return NoiseProposer(num_speculative_tokens, vocab_size=384)


def test_every_built_in_method_is_here() -> None:
    """A method that is added is tested."""
    tested = {cls.proposer for cls in ProposerConformance.__subclasses__()}
    refused = {"extract_hidden_states"}  # vLLM's name for a task; it never drafts
    assert set(load_plugins(only="").components(Kind.PROPOSER)) - refused <= tested
