"""Benchmarks: what the pages tell of speed was measured by one of these. Each is `python -m bench.NAME`; `python -m
bench` runs all of them. Run from a checkout."""

NAMES: tuple[str, ...] = (
    "peers",
    "step",
    "draft",
    "engine",
    "overhead",
    "pipeline",
    "poor_drafts",
    "policy_cells",
    "concurrency",
    "fleet",
    "pair",
    "trees",
    "no_draft",
    "coverage",
    "masks",
    "gateway",
    "tracing",
    "startup",
    "tensor_parallel",
    "ray_restarts",
)
