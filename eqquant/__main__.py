"""The command line: see `python -m eqquant --help`."""

import sys

from .checkpoints import main


if __name__ == "__main__":
    sys.exit(main())
