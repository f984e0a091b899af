"""pytest plugin of the conformance kit, for tests beside `ProposerConformance`.

Name it in the root conftest of your tests: `pytest_plugins = ["specflow.testing.pytest_plugin"]`. It is no entry point
on purpose: that would import specflow in every pytest run of every project in the environment.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def specflow_target() -> Path:
    """Folder of the kit's target, a tiny random Llama with its tokenizer; read only."""
    from specflow.testing.tiny_models import tiny_target

    return tiny_target()


@pytest.fixture
def specflow_engine(specflow_target: Path) -> Callable[..., Any]:
    """`specflow_engine(proposer, **scheduler)`: an engine on that target, on the CPU, in float32."""

    def make(proposer: Any, **scheduler: Any) -> Any:
        from specflow.testing.subject import Subject

        return Subject(lambda _: proposer, specflow_target).engine(**scheduler)

    return make
