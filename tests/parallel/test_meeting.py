"""Where ranks meet: nothing that another user of the machine writes is taken for rank 0's."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.cli.processes import start
from specdec.config import TargetSettings
from specdec.engine.parallel.exchange import FOLDER, file_bytes
from specdec.engine.parallel.group import FILE_NAME, _find_shared_file, _make_shared_file
from specdec.engine.parallel.place import RankPlace
from specdec.errors import ConfigError
from tests.parallel.test_failures import processes_below
from tests.support.pages import free_address


@pytest.mark.lengthy
@pytest.mark.more
def test_ranks_of_one_machine_offer_no_port_to_meet_at(tiny_folder: Callable[..., Path]) -> None:
    """Claim: ranks of one machine meet in a file in memory that rank 0 hands to its children, not at a port.

    Source: a local user wrote keys into the ranks' store while they joined. Conclusive: connections to the port where
    they would meet are tried until the target serves, and refused; the child has rank 0's own file open, which has no
    name, so only these processes can write to it.
    """
    address, port = free_address().split(":")
    settings = TargetSettings(
        model=str(tiny_folder("llama")), tensor_parallel_size=2, port=0, threads=1, master_port=int(port)
    )
    with start("target", settings) as child:
        while not child.check_ready(0.005):
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((address, int(port)), timeout=1.0)
        (rank,) = processes_below(child.process.pid)
        files = [memory_files(pid) for pid in (child.process.pid, rank)]
        assert len(files[0] & files[1]) == 1


def memory_files(pid: int) -> set[int]:
    """The inodes of files in memory for ranks that a process has open."""
    found = Path(f"/proc/{pid}/fd").iterdir()
    return {file.stat().st_ino for file in found if os.readlink(file).startswith("/memfd:specdec ranks")}


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
