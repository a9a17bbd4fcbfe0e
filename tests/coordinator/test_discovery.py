"""The members of a pool: names by a real DNS server, files, and the limit of their number."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import structlog

from specdec.config import ServiceSettings
from specdec.coordinator.discovery import Discovery, Member
from specdec.coordinator.ejection import PoolHealth
from specdec.coordinator.replicas import Target
from specdec.protocol.limits import REPLICA_COUNT_MAX
from tests.coordinator.names_apart import ENDING, FILE_S, NAME, OTHER
from tests.support.certificates import Authority
from tests.support.dns_server import RESOLVER_S, apart, why_not_apart
from tests.support.echo_service import listening

END_S = RESOLVER_S - 1.5  # of a process whose resolver hangs
SILENCE_S = 6.0


@asynccontextmanager
async def found(*values: str) -> AsyncIterator[list[tuple[Member, ...]]]:
    """All that a discovery of these values says while it runs."""
    said: list[tuple[Member, ...]] = []
    running = asyncio.create_task(Discovery(values, said.append).run())
    try:
        yield said
        assert not running.done()
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(condition: Callable[[], bool], timeout_s: float = FILE_S) -> None:
    """Returns when the condition holds. Fails after `timeout_s`."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.01)


@pytest.mark.slow
def test_names_are_followed(tmp_path: Path) -> None:
    """Claim: records of a name that appear and go are members and are none within 6 s, 300 of them too; NXDOMAIN,
    SERVFAIL and silence change nothing and hold up no other value, the default executor nor the end of the process; a
    look at once comes at most once a second.

    Conclusive: the resolver of this machine's C library, a DNS server on 127.0.0.1:53 over UDP and TCP, in namespaces
    of their own; each step of `names_apart` compares the whole set, and the process ends while a look-up hangs.
    """
    if why := why_not_apart(tmp_path):
        pytest.skip(f"namespaces are not allowed here: {why}")
    steps = [sys.executable, "-m", "tests.coordinator.names_apart", str(tmp_path), str(SILENCE_S)]
    done = subprocess.run(apart(tmp_path, steps), capture_output=True, text=True, timeout=120, check=False)
    ended_s = time.monotonic()
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    (ending,) = (line for line in done.stdout.splitlines() if line.startswith(ENDING))
    assert ended_s - float(ending.split()[-1]) < END_S, done.stdout


async def test_addresses_are_members_as_they_are() -> None:
    """Claim: an IP address and a loopback name are one member each, at once, without a name for TLS, once for each
    address, in the order of the flags."""
    values = "localhost:1", "10.0.0.2:1", "[::1]:2", "10.0.0.1:1", "10.0.0.2:1"
    async with found(*values) as said:
        await until(lambda: bool(said))
    assert said == [tuple(Member(value, "") for value in values[:4])]


async def test_a_file_is_read_again(tmp_path: Path) -> None:
    """Claim: what a file says is taken within 2 s, whether it is replaced or written; one that is missing, malformed or
    empty changes nothing, and is logged once until the file is good again.

    Conclusive: each content is there for more than two looks at the file; the same number of bytes in the next one.
    """
    file, beside = tmp_path / "targets", tmp_path / "beside"
    file.write_text("10.0.0.1:1\n10.0.0.2:1\n")
    with structlog.testing.capture_logs() as logs:
        async with found(f"@{file}") as said:
            await until(lambda: bool(said))
            file.unlink()
            await asyncio.sleep(2.2)
            for content in ("", "# none\n", "10.0.0.3:1\nhere\n"):
                file.write_text(content)
                await asyncio.sleep(1.2)
            assert said == [(Member("10.0.0.1:1"), Member("10.0.0.2:1"))]
            for content in ("10.0.0.1:1\n10.0.0.3:1\n", "10.0.0.3:1\n10.0.0.4:1\n"):
                beside.write_text(content)
                os.replace(beside, file)
                wanted = tuple(map(Member, content.split()))
                await until(lambda wanted=wanted: said[-1] == wanted)
            file.write_text("10.0.0.5:1\n")
            await until(lambda: said[-1] == (Member("10.0.0.5:1"),))
    assert len(said) == 4
    assert [entry["event"] for entry in logs] == ["replicas not found"], logs
    assert "No such file" in logs[0]["reason"] and logs[0]["value"] == f"@{file}"


async def test_the_first_members_are_taken_beyond_the_limit(tmp_path: Path) -> None:
    """Claim: of more addresses than a pool has members the first ones are taken, and that is logged once."""
    files = [tmp_path / name for name in ("first", "second")]
    hosts = [f"10.0.{number // 250}.{number % 250}:1" for number in range(REPLICA_COUNT_MAX + 2)]
    for file, own in zip(files, (hosts[:600], hosts[600:])):
        file.write_text("\n".join(own))
    with structlog.testing.capture_logs() as logs:
        async with found(*(f"@{file}" for file in files)) as said:
            await until(lambda: bool(said))
            files[0].write_text("\n".join(hosts[1:600]))
            await until(lambda: len(said) == 2)
    assert said[0] == tuple(map(Member, hosts[:REPLICA_COUNT_MAX]))
    assert said[1] == tuple(map(Member, hosts[1 : REPLICA_COUNT_MAX + 1]))
    assert [(entry["event"], entry["count"]) for entry in logs] == [("too many replicas", REPLICA_COUNT_MAX + 2)]


async def test_a_link_demands_the_name_that_a_member_was_found_by(tmp_path: Path) -> None:
    """Claim: the link of a coordinator to a member that a name led to is up where the certificate has this name alone,
    and is not where it has another one.

    Conclusive: two links of one kind to one address over mutual TLS; only the names of the members differ.
    """
    authority = Authority("an authority")
    server_tls = authority.issue(tmp_path / "server", dns=NAME, has_address=False)
    link_tls = authority.issue(tmp_path / "link")
    files = {name: getattr(server_tls, name) for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")}
    async with listening(ServiceSettings(port=0, **files)) as address:
        arguments = link_tls, "", lambda peer: None
        right, wrong = (Target(Member(address, name), *arguments, PoolHealth().add()) for name in (NAME, OTHER))
        running = [asyncio.create_task(peer.link.run()) for peer in (wrong, right)]
        await until(lambda: right.link.is_up, 10.0)
        await until(lambda: "not reached yet" not in wrong.link.down_reason, 10.0)
        assert not wrong.link.is_up
        for link in running:
            link.cancel()
        await asyncio.gather(*running, return_exceptions=True)
