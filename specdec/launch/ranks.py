"""The ranks of one machine: this process is the first of them and starts the others as child processes.

A child is a `specdec target` with the same settings, told its number on this machine. It dies with its parent; at a
normal end rank 0 stops it and waits for it. Ranks of one machine meet in a file in memory, and talk over socket pairs,
that the children inherit: these have no names, so other users of the machine reach neither.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from specdec.config import TargetSettings
from specdec.engine.parallel.rank_config import KINDS, Connections, RankPlace, listen
from specdec.launch.children import Child, arguments_of

# Variables for a child beside its settings, whose variables begin with SPECDEC_.
PARENT_RANK_VARIABLE = "_SPECDEC_RANK_0_PID"
LOCAL_RANK_VARIABLE = "_SPECDEC_LOCAL_RANK"
INHERITED_VARIABLE = "_SPECDEC_RANKS_FDS"  # numbers of the meeting file and of a socket for each of KINDS
PARTING_S = 2.0


@contextmanager
def ranks_of_machine(settings: TargetSettings) -> Iterator[tuple[TargetSettings, RankPlace]]:
    """Starts this machine's other ranks; yields the settings and the place of this process, the first of them.

    All have ended when the context ends. Raises ConfigError when they cannot meet. Main thread only, as for `Child`.
    """
    local_rank = int(os.environ.get(LOCAL_RANK_VARIABLE, 0))
    count_here = settings.tensor_parallel_size // settings.nnodes
    first = settings.node_rank * count_here
    rank = first + local_rank
    threads = settings.threads or max(1, (os.cpu_count() or 1) // count_here)
    parent = os.environ.get(PARENT_RANK_VARIABLE)
    with ExitStack() as ending:
        store_file, listener, port = _meeting_place(settings, rank)
        own = settings.model_copy(update={"threads": threads, "master_port": port})
        children: list[Child] = []
        connections = _inherited_connections()
        if not local_rank:
            children, connections = _start_others(own, first, count_here, store_file, ending)

        def check_children() -> None:
            for child in children:
                child.check_ready(0.0)

        yield (
            own,
            RankPlace(
                rank=rank,
                rank_count=settings.tensor_parallel_size,
                host=settings.master_addr,
                port=port,
                store_file=store_file,
                listener=listener,
                check_coming=check_children,
                local_rank=local_rank,
                parent_pid=int(parent) if parent else None,
                connections=connections,
            ),
        )
        with suppress(subprocess.TimeoutExpired):  # rank 0 has stopped them
            for child in children:
                child.process.wait(PARTING_S)


def _meeting_place(settings: TargetSettings, rank: int) -> tuple[int | None, socket.socket | None, int]:
    """Returns where the ranks meet: a file that all inherit if they are on this machine; else rank 0's listener, on the
    port of the settings."""
    if inherited := _inherited():
        return inherited[0], None, settings.master_port
    if settings.nnodes == 1:
        return os.memfd_create("specdec ranks"), None, settings.master_port  # in use until the process ends
    listener = listen(settings.master_addr, settings.master_port) if rank == 0 else None
    return None, listener, listener.getsockname()[1] if listener else settings.master_port


def _inherited() -> list[int]:
    """The descriptors that rank 0 handed to this process; none if they meet at a port."""
    return [int(number) for number in os.environ.get(INHERITED_VARIABLE, "").split()]


def _inherited_connections() -> Connections | None:
    sockets = [[socket.socket(fileno=number)] for number in _inherited()[1:]]
    return dict(zip(KINDS, sockets)) if sockets else None


def _start_others(
    own: TargetSettings, first: int, count_here: int, store_file: int | None, ending: ExitStack
) -> tuple[list[Child], Connections | None]:
    """Starts this machine's ranks after `first`, each told its number here; they are stopped at the end. Returns them
    and the connections to them, if all ranks are here."""
    told = {} if first else {PARENT_RANK_VARIABLE: str(os.getpid())}
    children: list[Child] = []
    connections: dict[str, list[socket.socket]] = {kind: [] for kind in KINDS}
    for local_rank in range(1, count_here):
        named, files = told | {LOCAL_RANK_VARIABLE: str(local_rank)}, []
        with ExitStack() as handed:
            if store_file is not None:
                pairs = [socket.socketpair() for _ in KINDS]
                for kind, (ours, theirs) in zip(KINDS, pairs):
                    connections[kind].append(ours)
                    handed.enter_context(theirs)  # ours ends when the child does, so only the child may hold it
                files = [store_file, *(theirs.fileno() for _, theirs in pairs)]
                named[INHERITED_VARIABLE] = " ".join(map(str, files))
            children.append(Child("target", arguments_of(own), environment=named, files=files))
        ending.callback(children[-1].stop, 0.0)
    return children, connections if store_file is not None else None
