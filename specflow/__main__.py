"""`python -m specflow`."""

import sys

from specflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
