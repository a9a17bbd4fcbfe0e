"""In which order the workers of pytest-xdist take the files of tests, and which files stay together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from xdist.scheduler import LoadFileScheduling

# Of two workers one has all files of such a folder, which share what is started once: services, ranks, parsed sources.
SHARING = ("tests/services", "tests/gateway", "tests/metrics", "tests/parallel", "tests/hygiene")
# Files of few and long tests: they come before all others, so that no worker has one left when the others are done.
LONG = (
    *SHARING,
    "tests/package",
    "tests/fleet",
    "tests/models",
    "tests/distill",
    "tests/simulation",
    "tests/structured",
    "tests/policy",
    "tests/native",
    "tests/cli",
    "tests/traces",
)
SHARING_WORKERS_MAX = 2  # more workers are done sooner with what they share started several times


def folder_of(name: str) -> str:
    """The folder below `tests` of a test's or a file's name."""
    return "/".join(name.split("/")[:2])


def unit_of(name: str, worker_count: int) -> str:
    """What is given to one worker as a whole: the file of a test, or its folder."""
    folder = folder_of(name)
    return folder if worker_count <= SHARING_WORKERS_MAX and folder in SHARING else name.partition("::")[0]


def place_of(unit: str) -> int:
    """The place of a unit among the others; units of equal places keep their order."""
    folder = folder_of(unit)
    return LONG.index(folder) if folder in LONG else len(LONG)


class LongestFirst(LoadFileScheduling):
    """Whole files, or folders, long ones first; those with more tests first among the others."""

    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid, self.numnodes)

    def _assign_work_unit(self, node: Any) -> None:
        self.workqueue.move_to_end(min(self.workqueue, key=place_of), last=False)
        super()._assign_work_unit(node)


def scheduler_of(config: Any, log: Callable[..., None]) -> LongestFirst | None:
    """The scheduler of `--dist loadfile`; None for every other."""
    return LongestFirst(config, log) if config.getvalue("dist") == "loadfile" else None
