"""Benchmarks: every figure of the pages comes from one of these. Each is `python -m bench.NAME`; `python -m bench` runs
all of them. Run from a checkout."""

NAMES: tuple[str, ...] = ("poor_drafts", "overhead", "masks", "gateway", "tracing", "ray_restarts")
