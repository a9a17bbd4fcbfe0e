"""Where ranks meet: nothing that another user of the machine writes is taken for rank 0's, and nothing that he leaves
unsaid keeps them from meeting."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed

from specdec.config import TargetSettings
from specdec.engine.parallel.connections import CALLERS_MAX, GREETING_BYTES, GREETING_S, connect
from specdec.engine.parallel.exchange import FOLDER, file_bytes
from specdec.engine.parallel.group import FILE_NAME, _find_shared_file, _make_shared_file
from specdec.engine.parallel.rank_config import KINDS, RankPlace
from specdec.errors import ConfigError
from specdec.launch.children import start
from tests.parallel.test_failures import processes_below
from tests.support.pages import free_address
from tests.support.ranks import HOST


@pytest.mark.lengthy
@pytest.mark.more
def test_ranks_of_one_machine_offer_no_port_to_meet_at(tiny_folder: Callable[..., Path]) -> None:
    """Claim: ranks of one machine meet in a file in memory and over socket pairs that rank 0 hands to its children, not
    at ports.

    Source: a local user wrote keys into the ranks' store while they joined, and another's silent connections to the
    port of rank 0 kept the ranks from joining. Conclusive: until the target serves, neither process listens, at the
    port where ranks of several machines would meet or at any other; the child has rank 0's own file open, which has no
    name, so only these processes can write to it.
    """
    address, port = free_address().split(":")
    settings = TargetSettings(
        model=str(tiny_folder("llama")), tensor_parallel_size=2, port=0, threads=1, master_port=int(port)
    )
    looks_count, seen = 0, set[int]()
    with start("target", settings) as child:
        while not child.check_ready(0.005):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, int(port)), timeout=1.0)
            pids = [child.process.pid, *processes_below(child.process.pid)]
            seen |= {port for pid in pids for port in listening_ports(pid)}
            looks_count += len(pids) == 2
        (rank,) = processes_below(child.process.pid)
        files = [memory_files(pid) for pid in (child.process.pid, rank)]
        assert len(files[0] & files[1]) == 1
        assert looks_count > 100 and seen <= {int(child.address.rpartition(":")[2])}


def listening_ports(pid: int) -> set[int]:
    """The TCP ports at which a process listens."""
    try:
        sockets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    except OSError:  # it ended, or closed one
        return set()
    lines = [line.split() for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]]
    return {int(line[1].split(":")[1], 16) for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in sockets}


def memory_files(pid: int) -> set[int]:
    """The inodes of files in memory for ranks that a process has open."""
    found = Path(f"/proc/{pid}/fd").iterdir()
    numbers = set()
    for file in found:
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            if os.readlink(file).startswith("/memfd:specdec ranks"):
                numbers.add(file.stat().st_ino)
    return numbers


def test_only_rank_0s_own_file_is_opened(tmp_path: Path) -> None:
    """Claim: a rank opens a shared file only by a name as rank 0 makes them, and only if it is a plain file of its own
    user with one name and the right size; a symbolic link is refused, and its target stays as it was.

    Source: a rank opened any file of its user that a name in the store pointed to, for reading and writing. Conclusive:
    the file that rank 0 makes passes, and each planted one differs from it in one respect.
    """
    path, made = _make_shared_file(RankPlace(0, 2, "127.0.0.1", 1))
    if made is None:
        pytest.skip("no shared memory here")
    private = tmp_path / "private"
    private.write_bytes(bytes(file_bytes(2)))
    planted = [FOLDER / f"{FILE_NAME}{os.urandom(16).hex()}" for _ in range(4)]
    link, pipe, small, absent = planted
    try:
        opened = _find_shared_file(str(path), 2)
        assert opened is not None
        os.close(opened)
        link.symlink_to(private)
        os.mkfifo(pipe)
        small.write_bytes(b"small")
        for name in (private, f"{FOLDER}/../{private}", f"{path}x", f"{path}\n", link, pipe, small):
            with pytest.raises(ConfigError, match="rank 0's shared file"):
                _find_shared_file(str(name), 2)
        os.link(small, absent)
        small.write_bytes(private.read_bytes())
        with pytest.raises(ConfigError, match="a file of this user"):  # of two names
            _find_shared_file(str(small), 2)
        assert private.read_bytes() == bytes(file_bytes(2))
        absent.unlink()
        small.unlink()
        assert _find_shared_file(str(small), 2) is None and _find_shared_file("", 2) is None
    finally:
        os.close(made)
        for name in (path, *planted):
            name.unlink(missing_ok=True)


class Neighbour:
    """Another user of the machine: as many connections to a port as he keeps open, each made anew when it is closed.

    Three of four say nothing, the others part of a greeting or what is none.
    """

    def __init__(self, port: int, count: int) -> None:
        self._port = port
        self._is_over = threading.Event()
        self._held = [self._call(index) for index in range(count)]
        self._thread = threading.Thread(target=self._refill, daemon=True)
        self._thread.start()

    def _call(self, index: int) -> socket.socket:
        connection = socket.create_connection((HOST, self._port), timeout=5.0)
        with contextlib.suppress(OSError):
            connection.sendall(b"" if index % 4 else bytes(index % (2 * GREETING_BYTES)))
        connection.setblocking(False)
        return connection

    def _refill(self) -> None:
        while not self._is_over.wait(0.01):
            for index, connection in enumerate(self._held):
                try:
                    if connection.recv(1):
                        continue
                except BlockingIOError:
                    continue
                except OSError:
                    pass
                with contextlib.suppress(OSError):  # rank 0 listens no more
                    self._held[index] = self._call(index)
                connection.close()

    def leave(self) -> None:
        self._is_over.set()
        self._thread.join()
        for connection in self._held:
            connection.close()


@pytest.mark.parametrize("count", [64, 2 * CALLERS_MAX])
def test_a_neighbours_silent_connections_do_not_delay_ranks(count: int) -> None:
    """Claim: ranks of several machines join while another user holds silent connections to rank 0's port and replaces
    each that is closed: sooner than rank 0 gives up a single one of them.

    Source: rank 0 waited 0.2 s for each caller in turn, so 64 of them kept the ranks from joining for as long as they
    came again. Conclusive: the connections are there before the first rank calls, more than rank 0 keeps in one case;
    all ranks join within the time of one silent caller, and each has its own two connections, through which one byte
    passes.
    """
    store, ranks = torch.distributed.HashStore(), range(1, 4)
    with ThreadPoolExecutor(4) as pool:
        first = pool.submit(connect, RankPlace(0, 4, HOST, 0), store)
        neighbour = Neighbour(int(store.get("star").decode().split()[1]), count)
        try:
            began_s = time.monotonic()
            others = [pool.submit(connect, RankPlace(rank, 4, HOST, 0), store) for rank in ranks]
            found = [each.result(120) for each in (first, *others)]
            joined_s = time.monotonic() - began_s
        finally:
            neighbour.leave()
    for kind in KINDS:
        for rank in ranks:
            found[rank][kind][0].sendall(bytes([rank]))
            assert found[0][kind][rank - 1].recv(2) == bytes([rank])
    for own in found:
        for connection in (*own["commands"], *own["pulses"]):
            connection.close()
    assert joined_s < GREETING_S
