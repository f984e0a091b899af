"""The conformance kit: what a plugin's own tests call. docs/plugins.md shows how.

`ProposerConformance` is a test class to derive from; its checks are functions in `output_checks`, `lifecycle_checks`,
`device_rules` and `registration_checks`, each of a `Subject`. `OracleProposer` and `NoiseProposer` reach full
acceptance and full rejection at will, for tests of samplers, schedulers and reports. `tiny_target` makes a target
without download. Only `ProposerConformance` needs pytest. Everything is imported on first use.
"""

from importlib import import_module
from typing import Any

_LAZY = {
    "CallbackProposer": "proposers",
    "NoiseProposer": "proposers",
    "OracleProposer": "proposers",
    "ProposerConformance": "suite",
    "Subject": "subject",
    "assert_lossless": "conformance",
    "assert_same": "conformance",
    "tiny_target": "tiny_models",
}
__all__ = list(_LAZY)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(f"specflow.testing.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'specflow.testing' has no attribute {name!r}")
