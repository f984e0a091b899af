"""Tests of the plugin packages run from the root without installing them; one that is installed is used as it is."""

import os
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from specflow.testing.source_tree import is_installed, show_package

torch.set_num_threads(1)  # tiny matrices gain nothing from more

_SITES = []
for project in sorted(Path(__file__).parent.glob("*/pyproject.toml")):
    if not is_installed(project.parent):
        _SITES.append(tempfile.TemporaryDirectory(prefix="specflow-plugin-"))
        sys.path[:0] = show_package(project.parent, Path(_SITES[-1].name))
