"""`python -m bench.peers`: see `bench.peers`. `--install` makes the peers' environments and measures nothing."""

import sys

from bench.peers import BENCHMARK
from bench.peers.environments import install
from bench.runner import main
from specdec.errors import SpecdecError

if __name__ == "__main__":
    if sys.argv[1:] == ["--install"]:
        try:
            install()
        except SpecdecError as error:
            sys.exit(f"peers: {error}")
        sys.exit(0)
    sys.exit(main(BENCHMARK))
