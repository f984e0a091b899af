"""`python -m tests.training.run_train CONFIG_FOLDER WORD…`: the command line with the plugin of the fake head."""

import sys
from pathlib import Path

from specflow import cli
from specflow.plugins.registry import Source, load_plugins
from tests.training.fake_head import FakePlugin

if __name__ == "__main__":
    registry = load_plugins(only="")
    registry.add(FakePlugin(Path(sys.argv[1])), Source("fake", "fake-pack", "1"))
    sys.exit(cli.main(sys.argv[2:], registry))
