"""`python -m specdec.cli`: the same as `specdec`, which imports nothing more from the folder that it is started in."""

import os
import sys


def leave_start_folder() -> None:
    """Takes the folder that Python was started in out of the path, if `-m` put it there; specdec is found by now."""
    try:
        start = os.getcwd()
    except FileNotFoundError:  # it was deleted
        return
    if not sys.flags.safe_path and sys.path[0] == start:
        del sys.path[0]


if __name__ == "__main__":
    leave_start_folder()
    from specdec.cli.main import main

    main()
