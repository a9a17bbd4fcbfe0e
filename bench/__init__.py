"""Benchmarks: every figure of the pages comes from one of these. Each is `python -m bench.NAME`; `python -m bench` runs
all of them. Run from a checkout."""

NAMES: tuple[str, ...] = ("step", "plain", "draft", "engine", "startup", "tensor_parallel", "poor_drafts")
