"""A composition as vLLM's arguments: every option has a fate, and what vLLM cannot do is said by name."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from specflow.errors import ConfigError
from specflow.peers.fates import OptionFates
from specflow.peers.vllm_command import serve_text, serve_words
from specflow.peers.vllm_options import VllmOptions
from specflow.peers.vllm_plan import VllmPlan, plan_vllm
from specflow.plugins.component import Kind
from specflow.plugins.registry import load_plugins
from specflow.zoo.bundle import model_folder
from tests.peers.compositions import compose

CUSTOM = ["proposer.path=module:Class", "proposer.num_speculative_tokens=2"]
SYNTHETIC = ["sampler=synthetic", "sampler.synthetic_acceptance_length=2.5"]


def plan(*words: str, **options: Any) -> VllmPlan:
    config, registry = compose(*words)
    return plan_vllm(config, registry, VllmOptions(**options) if options else None)


def fates(found: VllmPlan) -> dict[str, str]:
    return {one.option: one.fate for one in found.fates.every}


# -- every option ---------------------------------------------------------------------------------------------------
PARTS = [
    (kind, name)
    for kind in (Kind.TARGET, Kind.PROPOSER, Kind.SAMPLER, Kind.SCHEDULER, Kind.BACKEND)
    for name in load_plugins(only="").components(kind)
    if name != "extract_hidden_states"  # a name that is refused before anything else
]


@pytest.mark.parametrize(("kind", "name"), PARTS, ids=str)
def test_every_option_of_every_part_has_one_fate(kind: Kind, name: str) -> None:
    words = {
        "hf": ["target.path=owner/name"],
        "custom_class": CUSTOM,
        "synthetic": SYNTHETIC[1:],
    }.get(name, [])
    proposer = [] if kind is Kind.PROPOSER else ["+proposer=ngram"]
    config, registry = compose(*proposer, f"{'+' if kind is Kind.PROPOSER else ''}{kind}={name}", *words)
    found = plan_vllm(config, registry)
    given = [one.option for one in found.fates.every]
    assert len(given) == len(set(given))
    assert found.fates.undecided(kind, [key for key in config[kind] if key != "name"]) == []
    assert found.fates.undecided("sampling", config["sampling"]) == []


def test_undecided_names_what_is_missing() -> None:
    found = OptionFates()
    found.add("sampler.a", 1, "mapped", "there")
    assert found.undecided("sampler", ["a", "b"]) == ["sampler.b"]


# -- methods --------------------------------------------------------------------------------------------------------
STANDARD = {"rejection_sample_method": "standard"}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["+proposer=ngram", "proposer.prompt_lookup_max=4"],
            {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "prompt_lookup_min": 4},
        ),
        (
            ["+proposer=ngram_gpu"],
            {"method": "ngram_gpu", "num_speculative_tokens": 5, "prompt_lookup_max": 5, "prompt_lookup_min": 5},
        ),
        (
            ["+proposer=suffix", "proposer.suffix_decoding_max_tree_depth=10"],
            {
                "method": "suffix", "num_speculative_tokens": 10, "suffix_decoding_max_tree_depth": 10,
                "suffix_decoding_max_cached_requests": 10000, "suffix_decoding_max_spec_factor": 1.0,
                "suffix_decoding_min_token_prob": 0.1,
            },
        ),
        (
            ["+proposer=draft_model", "proposer.path=owner/draft", "proposer.revision=v2"],
            {
                "method": "draft_model", "model": "owner/draft", "revision": "v2", "num_speculative_tokens": 4,
                "draft_sample_method": "greedy",
            },
        ),
        (
            ["+proposer=pard"],
            {
                "method": "draft_model", "model": str(model_folder("pard")), "num_speculative_tokens": 4,
                "draft_sample_method": "greedy", "parallel_drafting": True,
            },
        ),
        (
            ["+proposer=eagle3", "proposer.draft_sample_method=probabilistic", "proposer.load_format=dummy"],
            {
                "method": "eagle3", "model": str(model_folder("eagle3")), "num_speculative_tokens": 4,
                "draft_sample_method": "probabilistic", "draft_load_config": {"load_format": "dummy"},
            },
        ),
        (
            ["+proposer=dflash"],
            {
                "method": "dflash", "model": str(model_folder("dflash")), "num_speculative_tokens": 7,
                "draft_sample_method": "greedy",
            },
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)  # fmt: skip
def test_each_method_field_by_field(words: list[str], expected: dict[str, Any]) -> None:
    found = plan(*words)
    assert found.speculative == expected | STANDARD
    assert found.impossible == []
    assert found.needs == (["arctic-inference"] if "suffix" in words[0] else [])


def test_plain_decoding_has_no_speculative_config() -> None:
    found = plan()
    assert found.speculative is None
    assert "--speculative-config" not in serve_words(found)


def test_verification_methods() -> None:
    assert plan("+proposer=eagle3", "sampler=block").speculative["rejection_sample_method"] == "block"
    synthetic = plan("+proposer=eagle3", *SYNTHETIC)
    assert synthetic.speculative["rejection_sample_method"] == "synthetic"
    assert synthetic.speculative["synthetic_acceptance_length"] == 2.5
    assert "synthetic_acceptance_rates" not in synthetic.speculative
    rates = plan("+proposer=ngram", "sampler=synthetic", "sampler.synthetic_acceptance_rates=[0.5,0.2,0.1,0,0]")
    assert rates.speculative["synthetic_acceptance_rates"] == [0.5, 0.2, 0.1, 0.0, 0.0]
    assert plan("sampler.use_fp64_gumbel=true").engine["use_fp64_gumbel"] is True


# -- what it cannot do, and what it does otherwise ------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["+proposer=ngram", "sampler=coupled"], "sampler"),
        (["+proposer=ngram", "sampler=typical"], "sampler"),
        (["+proposer=suffix", "sampler=block"], "sampler"),
        (["+proposer=pard", "sampler=block"], "sampler"),
        (["+proposer=pard", "proposer.mask_token_id=5"], "proposer.mask_token_id"),
        (["+proposer=custom_class", *CUSTOM], "proposer"),
        (["+proposer=dflash", "proposer.path=owner/head"], "proposer.num_speculative_tokens"),
        (["+proposer=ngram", "sampling.min_p=0.1"], "sampling.min_p"),
        (["+proposer=ngram", "sampling.logit_bias={5: 1.0}"], "sampling.logit_bias"),
        (["target=hf", "target.path=model.gguf"], "target.path"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_vllm_cannot_do(words: list[str], option: str) -> None:
    words = [f"++{word}" if "logit_bias" in word else word for word in words]
    found = plan(*words)
    assert [one.option for one in found.impossible] == [option]
    assert found.impossible[0].text in found.impossible[0].sentence()


def test_samplers_do_not_matter_to_plain_decoding() -> None:
    assert plan("sampler=coupled").impossible == []
    assert plan("sampling.min_p=0.1").impossible == []


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (["+proposer=ngram", "proposer.match_policy=latest"], "proposer.match_policy"),
        (["+proposer=suffix", "proposer.cache_path=x.npz"], "proposer.cache_path"),
        (["+proposer=draft_model", "proposer.dtype=bfloat16"], "proposer.dtype"),
        (["+proposer=eagle3", "proposer.rope_theta=5000"], "proposer.rope_theta"),
        (["+proposer=eagle3", "proposer.aux_layer_convention=output"], "proposer.aux_layer_convention"),
        (["+proposer=dflash", "proposer.num_speculative_tokens=3"], "proposer.whole_block"),
        (["target=hf", "target.path=owner/name"], "target.dtype"),
        (["backend=cuda", "backend.device_index=1"], "backend.device_index"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_what_means_something_else_there(words: list[str], option: str) -> None:
    found = plan(*words)
    assert [one.option for one in found.fates.of("differs")] == [option]
    assert found.impossible == []


def test_a_shorter_block_is_what_vllm_runs() -> None:
    found = plan("+proposer=dflash", "proposer.num_speculative_tokens=3", "proposer.whole_block=false")
    assert found.fates.of("differs") == []
    assert found.speculative["num_speculative_tokens"] == 3


def test_an_entry_that_only_vllm_reads_is_named(tmp_path: Path) -> None:
    words = ["+proposer=eagle3", f"proposer.path={tmp_path}"]
    (tmp_path / "config.json").write_text(json.dumps({"transformer_layer_config": {}, "max_position_embeddings": 9}))
    assert any("max_position_embeddings" in note for note in plan(*words).notes)
    (tmp_path / "config.json").write_text(json.dumps({"transformer_layer_config": {"max_position_embeddings": 9}}))
    assert not any("max_position_embeddings" in note for note in plan(*words).notes)


# -- the other parts ------------------------------------------------------------------------------------------------
def test_auto_is_the_checkpoints_own_precision(llama_folder: Path, tmp_path: Path) -> None:
    """vLLM's auto would run a float32 checkpoint in half precision."""
    stored = json.loads((llama_folder / "config.json").read_text())
    for key, value in {"dtype": "float32", "torch_dtype": "bfloat16"}.items():
        folder = tmp_path / key
        folder.mkdir()
        kept = {name: entry for name, entry in stored.items() if name not in ("dtype", "torch_dtype")}
        (folder / "config.json").write_text(json.dumps(kept | {key: value}))
        found = plan("target=hf", f"target.path={folder}")
        assert found.engine["dtype"] == value
        assert fates(found)["target.dtype"] == "mapped"
    assert plan("target=hf", "target.path=owner/name").engine["dtype"] == "auto"
    assert plan("target=hf", "target.path=owner/name", "target.dtype=float16").engine["dtype"] == "float16"


def test_target_and_limits(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama_folder.parent)
    found = plan(
        "target=hf", f"target.path={llama_folder.name}", "target.load_format=dummy", "target.trust_remote_code=true",
        "target.tokenizer=owner/tokens", "scheduler.max_num_seqs=4", "scheduler.max_model_len=64",
        "scheduler.enable_chunked_prefill=false", "scheduler.num_kv_blocks=50", "seed=7",
    )  # fmt: skip
    assert found.model == str(llama_folder), "the command works from any folder"
    expected = {
        "load_format": "dummy", "trust_remote_code": True, "tokenizer": "owner/tokens", "max_num_seqs": 4,
        "max_model_len": 64, "enable_chunked_prefill": False, "num_gpu_blocks_override": 50, "block_size": 16,
        "max_num_batched_tokens": 2048, "seed": 7, "generation_config": "vllm",
    }  # fmt: skip
    assert {key: found.engine.get(key) for key in expected} == expected
    assert "enforce_eager" not in found.engine
    assert plan("backend=cuda", "backend.cuda_graphs=false").engine["enforce_eager"] is True
    assert "block_size" not in plan().engine, "a block size without a number of blocks is vLLM's to choose"


def test_sampling_goes_to_the_server_or_with_the_request() -> None:
    found = plan("sampling.temperature=0.7", "sampling.top_k=20", "sampling.stop=[END]", "sampling.max_tokens=9")
    assert found.engine["override_generation_config"] == {"temperature": 0.7, "top_k": 20}
    assert found.request == {"max_tokens": 9, "temperature": 0.7, "top_k": 20, "stop": ["END"]}
    assert plan().request == {"max_tokens": 128, "temperature": 0.0}


def test_gpus_memory_and_other_arguments() -> None:
    found = plan(
        "+proposer=eagle3", tensor_parallel_size=4, pipeline_parallel_size=2, draft_tensor_parallel_size=1,
        gpu_memory_utilization=0.8, kv_cache_memory_gib=1.5, arguments={"quantization": "fp8", "seed": 1},
    )  # fmt: skip
    expected = {
        "tensor_parallel_size": 4, "pipeline_parallel_size": 2, "gpu_memory_utilization": 0.8,
        "kv_cache_memory_bytes": 3 * 2**29, "quantization": "fp8", "seed": 1,
    }  # fmt: skip
    assert {key: found.engine[key] for key in expected} == expected
    assert found.speculative["draft_tensor_parallel_size"] == 1
    assert any("engine.arguments.seed" in note for note in found.notes)
    without_model = plan("+proposer=ngram", tensor_parallel_size=2, draft_tensor_parallel_size=1)
    assert "draft_tensor_parallel_size" not in without_model.speculative
    assert fates(without_model)["engine.draft_tensor_parallel_size"] == "differs"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tensor_parallel_size": 0}, "engine.tensor_parallel_size=0"),
        ({"pipeline_parallel_size": -1}, "engine.pipeline_parallel_size=-1"),
        ({"tensor_parallel_size": 4, "draft_tensor_parallel_size": 2}, "engine.draft_tensor_parallel_size=2"),
        ({"gpu_memory_utilization": 1.5}, "engine.gpu_memory_utilization=1.5"),
        ({"kv_cache_memory_gib": 0}, "engine.kv_cache_memory_gib=0"),
        ({"start_timeout": 0}, "engine.start_timeout=0"),
        ({"arguments": {"dtype": "float16"}}, "target.dtype"),
        ({"arguments": {"max-num-seqs": 4}}, "no name of Python"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        VllmOptions(**options)


# -- the command ----------------------------------------------------------------------------------------------------
def test_the_text_is_the_words() -> None:
    found = plan(
        "+proposer=ngram", "target=hf", "target.path='owner/a name'", arguments={"additional_config": {"a": 1}}
    )
    words = serve_words(found)
    assert shlex.split(serve_text(found).replace("\\\n", " ")) == words
    assert words[:3] == ["vllm", "serve", "owner/a name"]
    assert json.loads(words[words.index("--speculative-config") + 1]) == found.speculative
    assert json.loads(words[words.index("--additional-config") + 1]) == {"a": 1}
    assert "--enable-chunked-prefill" in words
    off = serve_words(plan("scheduler.enable_chunked_prefill=false"))
    assert "--no-enable-chunked-prefill" in off
