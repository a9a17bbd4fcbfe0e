"""`python -m draft_service`: the same as `specdec draft`."""

from specdec.cli.main import main

if __name__ == "__main__":
    main("draft")
