"""The benchmark of the draft: `python -m bench.draft`. What is measured and how is said in `__main__`."""
