"""The ranks of one machine: this process is the first of them and starts the others as child processes.

A child is a `specdec target` with the settings of a machine with one rank. It dies with its parent; at a normal end
rank 0 stops it and waits for it.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from specdec.cli.processes import Child, arguments_of
from specdec.config import TargetSettings
from specdec.engine.parallel.place import RankPlace, listen

# Variables for a child beside its settings, whose variables begin with SPECDEC_.
PARENT_RANK_VARIABLE = "_SPECDEC_RANK_0_PID"
LOCAL_RANK_VARIABLE = "_SPECDEC_LOCAL_RANK"
PARTING_S = 2.0


@contextmanager
def ranks_of_machine(settings: TargetSettings) -> Iterator[tuple[TargetSettings, RankPlace]]:
    """Starts this machine's other ranks; yields the settings and the place of this process, the first of them.

    All have ended when the context ends. Raises ConfigError when they cannot meet. Main thread only, as for `Child`.
    """
    rank_count = settings.tensor_parallel_size
    count_here = rank_count // settings.nnodes
    first = settings.node_rank * count_here
    listener = listen(settings.master_addr, settings.master_port) if first == 0 else None
    port = listener.getsockname()[1] if listener else settings.master_port
    threads = settings.threads or max(1, (os.cpu_count() or 1) // count_here)
    own = settings.model_copy(update={"threads": threads, "master_port": port})
    parent = os.environ.get(PARENT_RANK_VARIABLE)
    children: list[Child] = []
    try:
        for local_rank in range(1, count_here):
            told = {LOCAL_RANK_VARIABLE: str(local_rank)}
            if first == 0:
                told[PARENT_RANK_VARIABLE] = str(os.getpid())
            alone = own.model_copy(update={"nnodes": rank_count, "node_rank": first + local_rank})
            children.append(Child("target", arguments_of(alone), environment=told))

        def check_children() -> None:
            for child in children:
                child.check_ready(0.0)

        yield (
            own,
            RankPlace(
                rank=first,
                rank_count=rank_count,
                host=settings.master_addr,
                port=port,
                listener=listener,
                check_coming=check_children,
                local_rank=int(os.environ.get(LOCAL_RANK_VARIABLE, 0)),
                parent_pid=int(parent) if parent else None,
            ),
        )
        with suppress(subprocess.TimeoutExpired):  # rank 0 has stopped them
            for child in children:
                child.process.wait(PARTING_S)
    finally:
        for child in children:
            child.stop(0.0)
