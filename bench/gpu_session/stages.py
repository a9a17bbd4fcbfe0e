"""The stages of a session on a GPU, by value: what is lost when the time is up is what matters least."""

from __future__ import annotations

from dataclasses import dataclass

MINUTES = 8.0  # the session for which limits are given; those of another are in proportion


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: `run(session)` of the module of its name in this package.

    `limit_s`: seconds it may take in a session of MINUTES. A stage that `is_alone` begins in a process of its own, so
    that what earlier ones hold of the device is free.
    """

    name: str
    limit_s: float
    claim: str
    is_alone: bool = False


STAGES = (
    Stage("bandwidth", 40, "the memory's speed, to which all times are compared"),
    Stage("bits", 100, "bits of a row in every step, and of the products of every configuration in use"),
    Stage("kernels", 50, "time of each kernel of a step, and bytes over it, weights cold"),
    Stage("steps", 90, "whole steps: chains, trees, long contexts, dependent launch"),
    Stage("host", 40, "the host's part of a step, and sampled rules"),
    Stage("cuda_tests", 80, "tests/cuda", is_alone=True),
    Stage("sameness", 60, "texts with and without speculation through the services", is_alone=True),
    Stage("peer", 80, "transformers with a static cache, compiled", is_alone=True),
    Stage("ranks", 40, "two ranks on one device", is_alone=True),
    Stage("startup", 40, "loading with compiled kernels in the cache", is_alone=True),
    Stage("configurations", 90, "bits and times of products cut into other tiles"),
)


def stages_of(names: list[str] | None) -> list[Stage]:
    """Returns the stages of these names, all of them for None, in their order. Raises ValueError for another name."""
    known = [stage.name for stage in STAGES]
    if strangers := [name for name in names or () if name not in known]:
        raise ValueError(f"stage is {strangers[0]!r}; it must be one of {', '.join(known)}")
    return [stage for stage in STAGES if names is None or stage.name in names]
