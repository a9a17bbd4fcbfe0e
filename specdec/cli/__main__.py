"""`python -m specdec.cli`: the same as `specdec`."""

from specdec.cli.main import main

if __name__ == "__main__":
    main()
