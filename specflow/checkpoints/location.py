"""From what a user names a checkpoint by to a folder on this machine."""

from pathlib import Path

from specflow.checkpoints.folder import PICKLED
from specflow.errors import CheckpointError, ConfigError
from specflow.zoo.bundle import resolve

# What a checkpoint in Hugging Face format consists of: weights, configs, every kind of tokenizer file.
# Many repositories hold the same weights pickled as well.
_PATTERNS = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def find_folder(reference: str, revision: str | None, option: str) -> Path:
    """The folder of a checkpoint given as a folder, `zoo:NAME` or a hub id, which is downloaded once and cached.

    revision: branch, tag or commit of a hub id. option: the option's full name, for messages.
    Raises `CheckpointError` when there is no such folder or the hub does not deliver, `ConfigError` for a revision
    of a local folder.
    """
    reference = resolve(reference)
    path = Path(reference).expanduser()
    if path.is_dir():
        if revision is not None:
            raise ConfigError(
                f"a revision ({revision!r}) belongs to a hub id, but {option}={reference} is a local folder: "
                "leave the revision out."
            )
        return path
    if path.exists():
        raise CheckpointError(f"{option}={reference} is a file: give the folder that holds config.json.")
    if reference.startswith((".", "/", "~")) or reference.count("/") > 1:
        raise CheckpointError(f"there is no folder {path}: check {option} (a hub id looks like owner/name).")
    return _download(reference, revision, option)


def _download(hub_id: str, revision: str | None, option: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=_PATTERNS))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(hub_id, revision=revision, allow_patterns=[*_PATTERNS, PICKLED]))
        return folder
    except Exception as error:  # the hub's client raises many kinds: offline, unknown, gated, no such revision
        cause = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"{option}={hub_id} is no folder here and could not be fetched from the hub ({cause}). "
            "Give a local folder, check the name and revision, or make the hub reachable "
            "(it is off while HF_HUB_OFFLINE=1 is set; private models need `hf auth login`)."
        ) from error
