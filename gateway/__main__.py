"""`python -m gateway`: the same as `specdec gateway`."""

from specdec.cli.main import main

if __name__ == "__main__":
    main("gateway")
