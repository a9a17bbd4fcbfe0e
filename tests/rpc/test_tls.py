"""Mutual TLS with real handshakes: who gets in, who does not, and certificates renewed while serving."""

from __future__ import annotations

import grpc
import pytest

from specdec.config import ServiceSettings, TlsSettings
from specdec.errors import ConfigError, PeerRefused, ReplicaUnavailable
from specdec.rpc.client import HEALTH_CHECK_METHOD, call_unary, open_channel, wait_serving
from specdec.rpc.tls import ServerCertificates
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb
from tests.support.certificates import Authority
from tests.support.echo_service import DESCRIBE, SERVICE, VERIFY, Echo


def settings_of(tls: TlsSettings) -> ServiceSettings:
    return ServiceSettings(
        port=0, **{name: getattr(tls, name) for name in ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")}
    )


async def name_at(address: str, tls: TlsSettings, tls_name: str = "") -> str:
    """The model name that a client with these files receives. Each call is a connection of its own."""
    async with open_channel(address, tls, tls_name=tls_name) as channel:
        answer = await call_unary(channel, DESCRIBE, types_pb.DescribeRequest(), types_pb.DescribeResponse, 2.0)
        return answer.model_name


@pytest.fixture(scope="module")
def authority():
    return Authority("specdec test authority")


async def test_only_certificates_of_the_authority_get_in(tmp_path, authority):
    """Signed: served. Plain, no client certificate, or another authority's: refused at the handshake, every method."""
    server = Echo().server(settings_of(authority.issue(tmp_path / "server")))
    address = await server.start()
    assert await name_at(address, authority.issue(tmp_path / "client")) == "echo"

    stranger = Authority("another authority").issue(tmp_path / "stranger", trusted=authority.pem)
    for refused in (TlsSettings(), stranger):
        with pytest.raises(ReplicaUnavailable):
            await name_at(address, refused)

    nameless = grpc.ssl_channel_credentials(root_certificates=authority.pem)
    async with grpc.aio.secure_channel(address, nameless) as channel:
        for method in (DESCRIBE, HEALTH_CHECK_METHOD):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary(method)(b"", timeout=2.0)
            assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


async def test_only_allowed_peers_are_answered(tmp_path, authority):
    """Claim: with allowed peers, a certificate of the authority is answered if its common name or a DNS name is one of
    them, as a whole; any other is refused by name, calls and streams, and may ask for the health. Conclusive: real
    handshakes, which all of them pass; without allowed peers each is answered."""
    server_files = authority.issue(tmp_path / "server")
    peers = {
        "by common name": ("coordinator", "other.example.org", True),
        "by DNS name": ("other", "c.example.org", True),
        "neither": ("other", "other.example.org", False),
        "a part of one": ("coordinator-2", "example.org", False),
    }
    for allowed in ((), ("coordinator", "c.example.org")):
        server = Echo().server(settings_of(server_files), allowed)
        address = await server.start()
        await server.set_serving(True)
        for folder, (common_name, dns, is_allowed) in peers.items():
            tls = authority.issue(tmp_path / folder, common_name=common_name, dns=dns)
            async with open_channel(address, tls) as channel:
                await wait_serving(channel, SERVICE, 5.0)
                stream = channel.stream_stream(VERIFY)()
                await stream.write(target_pb.VerifyRequest().SerializeToString())
                if is_allowed or not allowed:
                    assert await name_at(address, tls) == "echo"
                    assert target_pb.VerifyResponse.FromString(await stream.read()).stamp.sequence == 1
                    continue
                with pytest.raises(PeerRefused, match=f"--allow-peer.*{dns}, {common_name}"):
                    await name_at(address, tls)
                with pytest.raises(grpc.aio.AioRpcError) as raised:
                    await stream.read()
                assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED
        await server.stop(0)


async def test_a_client_refuses_a_server_it_does_not_know(tmp_path, authority):
    """Mutual means both: a server signed by another authority is not talked to, though it would accept the client."""
    impostor = Authority("impostor").issue(tmp_path / "server", trusted=authority.pem)
    server = Echo().server(settings_of(impostor))
    with pytest.raises(ReplicaUnavailable):
        await name_at(await server.start(), authority.issue(tmp_path / "client"))
    await server.stop(0)


async def test_an_address_is_checked_by_the_name_it_was_found_by(tmp_path, authority):
    """Claim: a server at an IP address whose certificate has only a DNS name is served under that name, and refused
    under another name, under a part of it and under its address; whose authority is unknown is refused under the right
    name too.

    Conclusive: real handshakes with one server; the name asked for is all that differs.
    """
    client = authority.issue(tmp_path / "client")
    server = Echo().server(
        settings_of(authority.issue(tmp_path / "server", dns="targets.example.org", has_address=False))
    )
    address = await server.start()
    assert address.startswith("127.0.0.1:")
    assert await name_at(address, client, "targets.example.org") == "echo"
    for wrong in ("", "drafts.example.org", "example.org"):
        with pytest.raises(ReplicaUnavailable):
            await name_at(address, client, wrong)
    await server.stop(0)
    impostor = Authority("impostor").issue(
        tmp_path / "impostor", trusted=authority.pem, dns="targets.example.org", has_address=False
    )
    server = Echo().server(settings_of(impostor))
    with pytest.raises(ReplicaUnavailable):
        await name_at(await server.start(), client, "targets.example.org")
    await server.stop(0)


async def test_renewed_certificates_hold_for_the_next_connection(tmp_path, authority):
    """Both sides move to another authority by their files alone; the server is not restarted.

    Conclusive because the two authorities share nothing: afterwards the old client is refused, the renewed one served.
    """
    server = Echo().server(settings_of(authority.issue(tmp_path / "server")))
    address = await server.start()
    old = authority.issue(tmp_path / "old client")
    assert await name_at(address, old) == "echo"

    successor = Authority("successor")
    successor.issue(tmp_path / "server")
    assert await name_at(address, successor.issue(tmp_path / "client")) == "echo"
    with pytest.raises(ReplicaUnavailable):
        await name_at(address, old)
    await server.stop(0)


async def test_a_half_written_file_keeps_the_last_good_one(tmp_path, authority):
    """While a renewal is incomplete connections are served as before; when it is complete, the next is renewed."""
    server = Echo().server(settings_of(authority.issue(tmp_path / "server")))
    address = await server.start()
    client = authority.issue(tmp_path / "client")
    (tmp_path / "server" / "cert.pem").write_bytes(b"")
    assert await name_at(address, client) == "echo"
    (tmp_path / "server" / "key.pem").unlink()
    assert await name_at(address, client) == "echo"
    authority.issue(tmp_path / "server")
    assert await name_at(address, client) == "echo"
    await server.stop(0)


def test_files_are_read_only_when_they_changed(tmp_path, authority):
    """gRPC asks at every handshake; without a change the answer is "keep", so no handshake reads three files."""
    certificates = ServerCertificates(authority.issue(tmp_path))
    assert certificates.changed() is None
    authority.issue(tmp_path)
    assert certificates.changed() is not None
    assert certificates.changed() is None


async def test_a_file_that_is_no_certificate_is_named(tmp_path, authority):
    """Wrong files end the start with one line that names the file."""
    tls = authority.issue(tmp_path)
    (tmp_path / "cert.pem").write_bytes(b"hello")
    with pytest.raises(ConfigError, match="cert.pem is not PEM"):
        await Echo().server(settings_of(tls)).start()


@pytest.mark.parametrize("side", ["server", "client"])
async def test_a_key_of_another_certificate_is_named(tmp_path, authority, side):
    """Claim: a key and a certificate that do not belong together are named, with their flags, by a server and by a
    client; while they are renewed one after the other, the last good pair is kept.

    Source: "cannot listen on port 0". Conclusive: both files are sound by themselves; together again they are used.
    """
    tls = authority.issue(tmp_path / "own")
    certificates, key = ServerCertificates(tls), tls.ssl_keyfile.read_bytes()
    authority.issue(tmp_path / "other")
    tls.ssl_keyfile.write_bytes((tmp_path / "other" / "key.pem").read_bytes())
    with pytest.raises(ConfigError, match="--ssl-keyfile .*key.pem and --ssl-certfile .*cert.pem do not match"):
        if side == "server":
            await Echo().server(settings_of(tls)).start()
        else:
            open_channel("127.0.0.1:1", tls)
    assert certificates.changed() is None
    tls.ssl_keyfile.write_bytes(key)
    assert certificates.changed() is not None


@pytest.mark.parametrize("name", ["ssl_keyfile", "ssl_certfile", "ssl_ca_certs"])
async def test_a_file_that_only_looks_like_pem_is_named(tmp_path, authority, name):
    """Wrong content between the lines of a PEM file ends the start with one line that names the flag."""
    tls = authority.issue(tmp_path)
    getattr(tls, name).write_bytes(b"-----BEGIN CERTIFICATE-----\nbm90aGluZw==\n-----END CERTIFICATE-----\n")
    with pytest.raises(ConfigError, match="--" + name.replace("_", "-")):
        await Echo().server(settings_of(tls)).start()
