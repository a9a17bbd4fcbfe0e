"""Trees beside chains, and the proposers of the coordinator and of the target: what each brings.

Run by `python -m bench.proposers`.
"""
