"""The command line: `python -m eqquant --help` describes it."""

import sys

from .checkpoints import main


if __name__ == "__main__":
    sys.exit(main())
