"""The benchmark of the pipeline: `python -m bench.pipeline`. What is measured and how is said in `__main__`."""
