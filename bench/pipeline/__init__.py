"""The benchmark of the pipeline: `python -m bench.pipeline`. `__main__` describes the measurements."""
