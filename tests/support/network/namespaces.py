"""Network namespaces of emulated machines: made, entered, removed, and told apart from those of a run that still lives.

A namespace is named after its owner process and its machine, so that those left by a killed run are recognised and no
others are touched. Root only. This module knows neither packets nor delays.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

PREFIX = "specdec-"
DEVICE = "eth0"
OWNER_MODULE = "tests.support.network.hub"  # the command line of a process that owns namespaces names it
NODE_NAME = re.compile(r"[a-z][a-z0-9_]{0,30}")

_NAMED = Path("/run/netns")
_TUN_DEVICE = Path("/dev/net/tun")
_TUNSETIFF = 0x400454CA
_IFF_TUN_WITHOUT_HEADER = 0x1001
_CLONE_NEWNET = 0x40000000
_OWN_NAME = re.compile(PREFIX + r"(\d+)-.+")


def namespace_of(owner_pid: int, node: str) -> str:
    """The namespace of a machine of the run that `owner_pid` owns."""
    return f"{PREFIX}{owner_pid}-{node}"


def run_prefix(namespace: str) -> list[str]:
    """Returns the prefix of a command that runs it inside."""
    return ["ip", "netns", "exec", namespace]


def why_unusable() -> str:
    """Why no namespace can be made here, in a few words; empty when one can (it was tried)."""
    if os.geteuid() != 0:
        return "not root"
    if shutil.which("ip") is None:
        return "no ip command"
    if not _TUN_DEVICE.exists():
        return f"no {_TUN_DEVICE}"
    probe = namespace_of(os.getpid(), "probe")
    try:
        create(probe)
        make_tun(probe, "10.231.255.1", 1500).close()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"namespaces cannot be made ({error})"
    finally:
        remove(probe)
    return ""


def create(namespace: str) -> None:
    """Makes it, with its loopback up. Raises CalledProcessError."""
    _ip("netns", "add", namespace)
    _ip("-n", namespace, "link", "set", "lo", "up")


def remove(namespace: str) -> None:
    """Removes its name; the kernel frees it with the last process inside. Nothing when there is none."""
    if (_NAMED / namespace).exists():
        subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def remove_abandoned() -> list[str]:
    """Removes namespaces of our own prefix whose owner is gone; returns their names."""
    names = sorted(path.name for path in _NAMED.iterdir()) if _NAMED.is_dir() else []
    owners = {name: match for name in names if (match := _OWN_NAME.fullmatch(name))}
    abandoned = [name for name, match in owners.items() if not _is_owner(int(match[1]))]
    for name in abandoned:
        remove(name)
    return abandoned


def make_tun(namespace: str, address: str, mtu: int) -> Tun:
    """The network device of a namespace, up, with `address`/24; its packets are read and written here.

    It goes away when it is closed. Raises OSError and CalledProcessError.
    """
    with inside(namespace):
        descriptor = os.open(_TUN_DEVICE, os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", DEVICE.encode(), _IFF_TUN_WITHOUT_HEADER))
    tun = Tun(descriptor)
    try:
        _ip("-n", namespace, "addr", "add", f"{address}/24", "dev", DEVICE)
        _ip("-n", namespace, "link", "set", DEVICE, "mtu", str(mtu), "txqueuelen", "10000", "up")
    except BaseException:
        tun.close()
        raise
    return tun


class Tun:
    """The outer end of a network device: whole IP packets."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> bytes | None:
        """One packet that a program inside sent; None when there is none now."""
        try:
            return os.read(self._descriptor, 65536)
        except BlockingIOError:
            return None

    def write(self, packet: bytes) -> None:
        """Delivers a packet to the programs inside; with a full buffer it is lost, as on any network."""
        with contextlib.suppress(OSError):
            os.write(self._descriptor, packet)

    def close(self) -> None:
        os.close(self._descriptor)


@contextlib.contextmanager
def inside(namespace: str) -> Iterator[None]:
    """The calling thread's network is that of `namespace`; so are sockets, threads and processes begun meanwhile."""
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    try:
        there = os.open(_NAMED / namespace, os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(home)
            os.close(there)
    finally:
        os.close(home)


def _enter(descriptor: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _is_owner(pid: int) -> bool:
    """Whether the process lives and is one that owns namespaces (or this one, which probes)."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return pid == os.getpid() or OWNER_MODULE.encode() in words


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
