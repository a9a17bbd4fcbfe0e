"""Benchmarks: what the pages tell of speed was measured by one of these. Each is `python -m bench.NAME`; `python -m
bench` runs all of them. Run from a checkout."""

NAMES: tuple[str, ...] = ("poor_drafts", "pair", "trees", "no_draft", "coverage")
