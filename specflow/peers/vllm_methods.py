"""What drafting methods become in vLLM's `speculative_config`, field by field.

Names and meanings are those of vLLM 0.32's `SpeculativeConfig`.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specflow.checkpoints.dflash_config import answers_from_anchor
from specflow.checkpoints.folder import read_json
from specflow.peers.fates import OptionFates
from specflow.zoo.bundle import PREFIX, resolve

__all__ = ["OLDER_RUNNER", "Writer", "dflash_config", "place_of", "speculative_config"]

OLDER_RUNNER = ("suffix", "pard")  # methods that vLLM runs with its older model runner on every device
_GROUP = "proposer"
_DRAFT_RESULT = "drafts of another precision differ a little, and the output does not"

Values = Mapping[str, Any]
# From a proposer's options by name, the target's dtype, and where every option's fate is written down: the fields of
# `speculative_config` besides the method.
Writer = Callable[[Values, str, OptionFates], dict[str, Any]]


def speculative_config(
    name: str, options: Values, target_dtype: str, fates: OptionFates, plugin: Writer | None = None
) -> dict[str, Any]:
    """The fields for a proposer; every option of it gets its fate. Empty when vLLM has no such method.

    target_dtype: `auto`, `float32`, `bfloat16` or `float16`. plugin: of a proposer that is not built in.
    """
    write = _METHODS.get(name, plugin)
    if write is None:
        text = _WITHOUT_COUNTERPART.get(name, "no counterpart of it in vLLM is known")
        fates.add("proposer", name, "impossible", text)
        for key, value in options.items():
            fates.add(f"{_GROUP}.{key}", value, "left out", "the method has no counterpart")
        return {}
    fates.add("proposer", name, "mapped", f"speculative_config.method={_VLLM_NAMES.get(name, name)}")
    config = {"method": _VLLM_NAMES.get(name, name)} | write(options, target_dtype, fates)
    return {key: value for key, value in config.items() if value is not None}


def place_of(path: str) -> str:
    """A model as the command names it: folders of this machine with their whole path, everything else as given."""
    folder = Path(resolve(path)).expanduser()
    return str(folder.resolve()) if folder.is_dir() else path


def _taken(options: Values, names: tuple[str, ...], fates: OptionFates) -> dict[str, Any]:
    """Fields of the same name and meaning."""
    for name in names:
        fates.add(f"{_GROUP}.{name}", options[name], "mapped", f"speculative_config.{name}")
    return {name: options[name] for name in names}


def _ngram(options: Values, _dtype: str, fates: OptionFates) -> dict[str, Any]:
    longest = options["prompt_lookup_max"] or options["prompt_lookup_min"]
    shortest = options["prompt_lookup_min"] or options["prompt_lookup_max"]
    bounds = {"prompt_lookup_max": longest or 5, "prompt_lookup_min": shortest or 5}
    for name, value in bounds.items():
        fates.add(f"{_GROUP}.{name}", options[name], "mapped", f"speculative_config.{name}={value}")
    if options["match_policy"] == "earliest":
        fates.add(f"{_GROUP}.match_policy", "earliest", "mapped", "what vLLM does")
    else:
        text = "vLLM takes the earliest match; drafts differ, the output does not"
        fates.add(f"{_GROUP}.match_policy", options["match_policy"], "differs", text)
    fates.leave_out(_GROUP, options, {"kernels": "vLLM chooses its own kernels"})
    return _taken(options, ("num_speculative_tokens",), fates) | bounds


_SUFFIX = (
    "suffix_decoding_max_tree_depth",
    "suffix_decoding_max_cached_requests",
    "suffix_decoding_max_spec_factor",
    "suffix_decoding_min_token_prob",
)


def _suffix(options: Values, _dtype: str, fates: OptionFates) -> dict[str, Any]:
    if options["cache_path"] is None:
        fates.add(f"{_GROUP}.cache_path", None, "mapped", "vLLM's cache lives as long as its server")
    else:
        text = "vLLM's cache lives as long as its server and starts empty; the output is the same"
        fates.add(f"{_GROUP}.cache_path", options["cache_path"], "differs", text)
    most = options["num_speculative_tokens"] or options["suffix_decoding_max_tree_depth"]
    text = f"speculative_config.num_speculative_tokens={most}"
    fates.add(f"{_GROUP}.num_speculative_tokens", options["num_speculative_tokens"], "mapped", text)
    return {"num_speculative_tokens": most} | _taken(options, _SUFFIX, fates)


def _model(options: Values, target_dtype: str, bundled: str, fates: OptionFates) -> dict[str, Any]:
    """Checkpoint, revision, precision and draft sampling: common to all methods with weights."""
    place = place_of(options["path"] or bundled)
    fates.add(f"{_GROUP}.path", options["path"], "mapped", "speculative_config.model")
    if options["dtype"] in ("auto", target_dtype):
        fates.add(f"{_GROUP}.dtype", options["dtype"], "mapped", "vLLM runs drafters in the target's precision")
    else:
        text = f"vLLM runs drafters in the target's precision ({target_dtype}); {_DRAFT_RESULT}"
        fates.add(f"{_GROUP}.dtype", options["dtype"], "differs", text)
    config = {"model": place} | _taken(options, ("revision", "draft_sample_method"), fates)
    if "load_format" in options:
        dummy = options["load_format"] == "dummy"
        fates.add(f"{_GROUP}.load_format", options["load_format"], "mapped", "speculative_config.draft_load_config")
        config["draft_load_config"] = {"load_format": "dummy"} if dummy else None
    return config


def _draft_model(options: Values, dtype: str, fates: OptionFates) -> dict[str, Any]:
    return _model(options, dtype, f"{PREFIX}draft", fates) | _taken(options, ("num_speculative_tokens",), fates)


def _pard(options: Values, dtype: str, fates: OptionFates) -> dict[str, Any]:
    if options["mask_token_id"] is None:
        fates.add(f"{_GROUP}.mask_token_id", None, "mapped", "vLLM reads the drafter's config.json as well")
    else:
        text = "vLLM takes the mask from the drafter's config.json alone: write it there as pard_token"
        fates.add(f"{_GROUP}.mask_token_id", options["mask_token_id"], "impossible", text)
    taken = _taken(options, ("num_speculative_tokens",), fates)
    return _model(options, dtype, f"{PREFIX}pard", fates) | taken | {"parallel_drafting": True}


def _eagle3(options: Values, dtype: str, fates: OptionFates) -> dict[str, Any]:
    for name, what in {"aux_layer_convention": "layer numbers", "rope_theta": "the rotary base"}.items():
        if options[name] in (None, "auto"):
            fates.add(f"{_GROUP}.{name}", options[name], "mapped", "vLLM reads the head's config.json as well")
        else:
            text = f"vLLM takes {what} from the head's config.json as it stands: with another meaning it drafts badly"
            fates.add(f"{_GROUP}.{name}", options[name], "differs", text)
    return _model(options, dtype, f"{PREFIX}eagle3", fates) | _taken(options, ("num_speculative_tokens",), fates)


def dflash_config(options: Values, dtype: str, fates: OptionFates) -> dict[str, Any]:
    """A DFlash head, or a method that adds to one and has its options."""
    config = _model(options, dtype, f"{PREFIX}dflash", fates)
    trained = _trained_drafts(config["model"])
    asked = options["num_speculative_tokens"]
    drafts = asked or trained
    if drafts is None:
        text = "vLLM has to be told, and the head is not here to be asked: set proposer.num_speculative_tokens"
        fates.add(f"{_GROUP}.num_speculative_tokens", None, "impossible", text)
    else:
        text = f"speculative_config.num_speculative_tokens={drafts}"
        fates.add(f"{_GROUP}.num_speculative_tokens", asked, "mapped", text)
    whole = options["whole_block"]
    if not whole or drafts == trained:
        fates.add(f"{_GROUP}.whole_block", whole, "mapped", "vLLM runs a block of K + 1 rows")
    else:
        text = "vLLM runs a block of K + 1 rows only, which head and training may not expect: fewer drafts are accepted"
        fates.add(f"{_GROUP}.whole_block", whole, "differs", text)
    return config | {"num_speculative_tokens": drafts}


def _trained_drafts(place: str) -> int | None:
    """Drafts per round that a DFlash head was trained for; None when its config.json is not on this machine."""
    folder = Path(place)
    if not (folder / "config.json").is_file():
        return None
    raw: Mapping[str, Any] = read_json(folder / "config.json")
    size = raw.get("block_size")
    return None if not isinstance(size, int) else size if answers_from_anchor(raw)[0] else size - 1


_METHODS: Mapping[str, Writer] = {
    "ngram": _ngram,
    "ngram_gpu": _ngram,
    "suffix": _suffix,
    "draft_model": _draft_model,
    "pard": _pard,
    "eagle3": _eagle3,
    "dflash": dflash_config,
}
_VLLM_NAMES = {"pard": "draft_model"}
_WITHOUT_COUNTERPART = {
    "custom_class": "vLLM's custom_class expects an interface of its own: the class has to be written for it",
}
