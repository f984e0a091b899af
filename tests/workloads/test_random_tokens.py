"""`workload=random`: ids of given lengths, the same for a seed, and answers of given length."""

import pytest

from specflow.core.sampling_params import SamplingParams
from specflow.errors import ConfigError
from specflow.workloads.random_tokens import RandomOptions, RandomWorkload
from specflow.workloads.turns import answer_sampling, render_turn


def workload(**options: int) -> RandomWorkload:
    return RandomWorkload(RandomOptions(**options))


def test_ids_have_the_asked_lengths_and_range() -> None:
    prompts = workload(num_prompts=5, input_len=40, vocab_size=30).load()
    assert len({prompt.id for prompt in prompts}) == len({prompt.token_ids for prompt in prompts}) == 5
    for prompt in prompts:
        assert len(prompt.token_ids) == 40
        assert set(prompt.token_ids) <= set(range(30))
        assert render_turn(prompt, 0, []) == list(prompt.token_ids)
    assert max(max(prompt.token_ids) for prompt in prompts) == 29


def test_the_seed_decides() -> None:
    one, same, other = (workload(seed=seed) for seed in (1, 1, 2))
    assert one.describe()["sha256"] == same.describe()["sha256"] != other.describe()["sha256"]
    assert one.load()[:4] == workload(seed=1, num_prompts=4).load()


def test_the_prompt_says_how_long_its_answer_is() -> None:
    sampling = SamplingParams(max_tokens=7, min_tokens=5)
    (prompt,) = workload(num_prompts=1, output_len=3).load()
    found = answer_sampling(prompt, sampling)
    assert (found.max_tokens, found.min_tokens, found.ignore_eos) == (3, 3, True)
    (prompt,) = RandomWorkload(RandomOptions(num_prompts=1, output_len=9, ignore_eos=False)).load()
    assert not answer_sampling(prompt, sampling).ignore_eos


@pytest.mark.parametrize("name", ["num_prompts", "input_len", "output_len", "vocab_size"])
def test_sizes_are_checked(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"workload\.{name}=0"):
        RandomOptions(**{name: 0})
