"""Emulated networks of both kinds, and a machine that leaves the network alone while its delays are measured."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.network import namespaces
from tests.support.network.machines import Network, emulated

MACHINES = {"target": (0,), "coordinator": (), "draft": ()}


@pytest.fixture(params=["namespaces", "proxies"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    """Three machines without delays; of namespaces, where they can be made, and on loopback behind proxies."""
    is_namespaces = request.param == "namespaces"
    if is_namespaces and (reason := namespaces.why_unusable()):
        pytest.skip(f"network namespaces: {reason}")
    with emulated(MACHINES, namespaces_allowed=is_namespaces) as made:
        yield made


@pytest.fixture
def undisturbed() -> Iterator[None]:
    """A process of the lowest priority on every core, and this thread before all others where that is permitted.

    An idle virtual processor needs some tenths of a millisecond to wake, and a busy one some milliseconds to switch to
    a reader: delays of this machine, not of the network.
    """
    idling = [sys.executable, "-c", "import os\nos.nice(19)\nwhile True: pass"]
    spinners = []
    try:
        for core in os.sched_getaffinity(0):
            spinners.append(subprocess.Popen(idling))
            os.sched_setaffinity(spinners[-1].pid, [core])
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        for spinner in spinners:
            spinner.kill()
            spinner.wait()
