"""``python -m tensorformer.bench SUITE …`` is ``tensorformer bench SUITE …``."""

import sys

from tensorformer.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
