"""`python -m coordinator`: the same as `specdec coordinator`."""

from specdec.cli.main import main

if __name__ == "__main__":
    main("coordinator")
