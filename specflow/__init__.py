"""specflow: speculative decoding, composed, proven lossless, measured and tuned.

The two names a script needs are `Engine` and `SamplingParams`; both are loaded on first use, so that
`python -m specflow --help` does not pay for importing torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = ["Engine", "SamplingParams", "__version__"]

_LAZY = {"Engine": "specflow.engine.engine", "SamplingParams": "specflow.core.sampling_params"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'specflow' has no attribute {name!r}")
