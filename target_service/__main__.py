"""`python -m target_service`: the same as `specdec target`."""

from specdec.cli.main import main

if __name__ == "__main__":
    main("target")
