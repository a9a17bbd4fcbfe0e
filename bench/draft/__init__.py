"""The benchmark of the draft: `python -m bench.draft`. `__main__` describes the measurements."""
