"""The text of `--help`, made from the registry, so that it lists what is installed; nothing heavy is imported."""

from collections.abc import Iterator

from specflow.plugins.component import Kind
from specflow.plugins.registry import Registry

__all__ = ["help_text"]

_HEAD = """\
specflow composes speculative decoding from parts, proves that it is lossless, and measures it against plain decoding
by the same engine in the same run. A run is target x proposer x sampler x scheduler x workload on a backend; each part
is a configuration group, and plugins can add to every one.

usage: python -m specflow [FLAGS] [GROUP=NAME ...] [GROUP.KEY=VALUE ...]

  python -m specflow +proposer=draft_model     compare a draft model with plain decoding; nothing to download
  python -m specflow                           plain decoding alone
  python -m specflow +proposer=ngram target=hf target.path=FOLDER workload=jsonl workload.path=FILE
  python -m specflow task=generate +proposer=ngram 'task.prompts=["import "]'
  python -m specflow -m +proposer=ngram,draft_model proposer.num_speculative_tokens=3,5
  python -m specflow task=plugins              where every part comes from
"""

_FLAGS = """\
flags:
  --cfg job            print the composition and all its options instead of running it
  -m, --multirun       run every combination of comma-separated values
  --config-dir FOLDER  look for configuration files in FOLDER as well, before the built-in ones
  --info               what Hydra composed and from where
  --hydra-help         Hydra's own flags and groups
  --version            the version

Only `proposer` and `experiment` need a plus (+proposer=NAME): they are not part of every run."""


def help_text(registry: Registry) -> str:
    """What specflow is, how it is used, and every group with its options."""
    return "\n".join([_HEAD, *_groups(registry), _FLAGS])


def _groups(registry: Registry) -> Iterator[str]:
    for kind in Kind:
        components = registry.components(kind)
        width = max((len(name) for name in components), default=0)
        yield f"{kind}:" if kind is not Kind.PROPOSER else f"+{kind}:"
        for name, item in components.items():
            origin = "" if item.distribution == "specflow" else f"  [{item.distribution} {item.version}]"
            yield f"  {name:<{width}}  {item.component.summary}{origin}"
        yield ""
    yield "+experiment:"
    for name, summary in sorted(_experiments(registry).items()):
        yield f"  {name}  {summary}"
    yield ""


def _experiments(registry: Registry) -> dict[str, str]:
    """Experiment files by name; the summary is the first comment that is no Hydra directive."""
    found: dict[str, str] = {}
    for folder in registry.config_dirs():
        for file in folder.glob("experiment/*.yaml"):
            lines = file.read_text(encoding="utf-8").splitlines()
            comments = [line.lstrip("# ") for line in lines if line.startswith("#") and "@package" not in line]
            found.setdefault(file.stem, comments[0] if comments else "")
    return found
