"""``python -m tensorformer``."""

import sys

from tensorformer.cli.main import main

if __name__ == "__main__":  # not in the processes that training spawns
    sys.exit(main())
