"""Reading a checkpoint through transformers, with every way it can fail turned into one clear error."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedModel

from specflow.checkpoints.dummy import draw_weights
from specflow.checkpoints.folder import check_folder, has_tokenizer
from specflow.errors import CheckpointError, ConfigError, UnsupportedModelError
from specflow.targets import transformers_facts as facts
from specflow.targets.stand_in_tokenizer import stand_in_tokenizer

if TYPE_CHECKING:
    from specflow.targets.hf import HfOptions

_OFFLINE_REMEDY = (
    "Give target.path a local folder, check the name and revision, or make the hub reachable "
    "(it is off while HF_HUB_OFFLINE=1 is set; private models need `hf auth login`)."
)


def load_checkpoint(options: "HfOptions", device: torch.device) -> tuple[PreTrainedModel, Any]:
    """The model in eval mode on `device`, using eager attention, and its tokenizer.

    Raises `CheckpointError`, `UnsupportedModelError`, or `ConfigError` for an option that does not fit the model.
    """
    source, extra = _source(options)
    _check_local(options)
    with _quiet():
        config = _translate(lambda: transformers.AutoConfig.from_pretrained(source, **extra), options, "config")
        tokenizer = _stand_in(options, config) or load_tokenizer(options)
        model = _translate(lambda: _read_model(options, config, device), options, "weights")
    _choose_experts(model, options.experts)
    return model.to(device).eval(), tokenizer


def load_tokenizer(options: "HfOptions") -> Any:
    """The tokenizer beside the weights, or the one `tokenizer` names. Raises `CheckpointError`."""
    source, extra = _source(options)
    if options.tokenizer:
        source, extra = options.tokenizer, extra | {"gguf_file": None}
    return _translate(lambda: transformers.AutoTokenizer.from_pretrained(source, **extra), options, "tokenizer")


def _stand_in(options: "HfOptions", config: Any) -> Any:
    """For random weights beside which there is no tokenizer, else None."""
    path = Path(options.path).expanduser()
    if options.load_format != "dummy" or options.tokenizer or not path.is_dir() or has_tokenizer(path):
        return None
    return stand_in_tokenizer(config.get_text_config(decoder=True).vocab_size)


def _source(options: "HfOptions") -> tuple[str, dict[str, Any]]:
    """What to hand to `from_pretrained`: a folder or hub id, and keywords that all its classes take."""
    extra: dict[str, Any] = {"revision": options.revision or "main", "trust_remote_code": options.trust_remote_code}
    path = Path(options.path).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return str(path.parent), extra | {"gguf_file": path.name}
    return (str(path) if path.exists() else options.path), extra


def _check_local(options: "HfOptions") -> None:
    path = Path(options.path).expanduser()
    if path.is_dir():
        real = options.load_format != "dummy"
        check_folder(path, weights=real, tokenizer=real and not options.tokenizer)
    elif path.exists() and path.suffix != ".gguf":
        raise CheckpointError(
            f"{path} is a file: target.path takes the folder that holds config.json, or a .gguf file."
        )
    elif not path.exists() and (options.path.startswith((".", "/", "~")) or options.path.count("/") > 1):
        raise CheckpointError(f"there is no folder {path}: check target.path (a hub id looks like owner/name).")


def _read_model(options: "HfOptions", config: Any, device: torch.device) -> PreTrainedModel:
    dtype = options.dtype if options.dtype == "auto" else getattr(torch, options.dtype)
    source, extra = _source(options)
    auto = transformers.AutoModelForCausalLM
    if options.load_format == "dummy":
        chosen = (getattr(config, "dtype", None) or torch.float32) if dtype == "auto" else dtype
        trust = options.trust_remote_code
        # Where it will run: drawing 8 billion numbers takes a GPU a second and a processor minutes.
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]), device:
            model = auto.from_config(config, dtype=chosen, attn_implementation="eager", trust_remote_code=trust)
        draw_weights(model.parameters(), device)
        return model
    if device.type != "cpu" and importlib.util.find_spec("accelerate"):
        extra["device_map"] = str(device)  # straight to the device, which some quantised formats need
    model, info = auto.from_pretrained(
        source, config=config, dtype=dtype, attn_implementation="eager", output_loading_info=True, **extra
    )
    if info["missing_keys"]:
        missing = sorted(info["missing_keys"])
        raise CheckpointError(
            f"{options.path} lacks {len(missing)} tensors of {type(model).__name__}, such as {missing[0]}: the "
            "checkpoint is incomplete or of another architecture. Copy or download it again."
        )
    return model


def _choose_experts(model: PreTrainedModel, name: str) -> None:
    if not (facts.has_experts(model) and facts.can_choose_experts(model)):
        return
    try:
        model.set_experts_implementation(name)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"target.experts={name!r} does not work for {type(model).__name__}: {error}") from error


def _translate(read: Any, options: "HfOptions", what: str) -> Any:
    try:
        return read()
    except (CheckpointError, UnsupportedModelError):
        raise
    except Exception as error:  # transformers raises almost every class there is
        raise _as_ours(error, options, what) from error


def _as_ours(error: Exception, options: "HfOptions", what: str) -> CheckpointError | UnsupportedModelError:
    text = str(error).strip()
    first = text.splitlines()[0] if text else type(error).__name__
    if "trust_remote_code" in text:
        return UnsupportedModelError(
            f"{options.path} needs code of its own: read that code and, if you trust it, add "
            "target.trust_remote_code=true."
        )
    if "does not recognize this architecture" in text or "Unrecognized model" in text:
        return UnsupportedModelError(
            f"{options.path} is of an architecture that transformers {transformers.__version__} does not know: "
            f"{first}\nA newer transformers may know it."
        )
    if "Unrecognized configuration class" in text:
        return UnsupportedModelError(f"{options.path} is not a causal language model: {first}")
    if not Path(options.path).expanduser().exists() and isinstance(error, OSError):
        return CheckpointError(f"cannot get the {what} of {options.path}: {first}\n{_OFFLINE_REMEDY}")
    return CheckpointError(f"cannot read the {what} of {options.path}: {type(error).__name__}: {first}")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without a terminal, no progress bars and no chatter; what matters is raised."""
    verbosity = transformers.logging.get_verbosity()
    silence_bars = transformers.logging.is_progress_bar_enabled() and not sys.stderr.isatty()
    transformers.logging.set_verbosity_error()
    if silence_bars:
        transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(verbosity)
        if silence_bars:
            transformers.logging.enable_progress_bar()
