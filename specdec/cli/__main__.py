"""`python -m specdec.cli`: the same as `specdec`, which imports nothing more from the folder that it is started in."""

import sys

if __name__ == "__main__":
    if not sys.flags.safe_path:  # Python puts that folder first; `specdec` itself is found by now
        del sys.path[0]
    from specdec.cli.main import main

    main()
