"""Who may ask: keys, hosts, origins, forms; and bounds before anything is made."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.errors import ConfigError
from specdec.gateway.door import HEAD_BYTES_MAX
from specdec.gateway.keys import hash_of, new_key, read_keys
from specdec.gateway.parameters import salt_of
from specdec.launch.children import start
from specdec.settings import split_address
from tests.support.certificates import Authority
from tests.support.gateways import ask, gateway
from tests.support.services import Services
from tests.support.waiting import until

LEAST = {"prompt": "hi", "max_tokens": 1}
PATH = "/v1/completions"
ORIGIN = "https://app.example"


@pytest.fixture(scope="module")
def keyed(services: Services, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path, str]]:
    """A gateway with one key and one origin: its address, the file of keys, the key."""
    file = tmp_path_factory.mktemp("keys") / "keys"
    key, line = new_key("alice")
    file.write_text(f"# keys\n{line}\n", encoding="utf-8")
    own = {"api_keys_file": file, "allowed_origins": (ORIGIN,)}
    with gateway(services.coordinator.address, **own) as child:
        yield child.address, file, key


def bearer(key: str) -> dict[str, str]:
    """The header of a key."""
    return {"Authorization": f"Bearer {key}"}


def test_every_path_but_health_needs_a_key(keyed: tuple[str, Path, str]) -> None:
    """Claim: without a key, or with a wrong one, every path but health, an unknown one too, is 401 in OpenAI's form;
    with it, it is served; a preflight and OPTIONS need none."""
    address, _, key = keyed
    for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/tokenizer_info", "/nothing"):
        for headers in ({}, bearer("sk-wrong"), {"Authorization": f"Basic {key}"}):
            refused = ask(address, path, headers=headers)
            assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
        assert ask(address, path, headers=bearer(key)).status in (200, 404)
    assert ask(address, PATH, LEAST).status == 401
    assert ask(address, PATH, LEAST, headers=bearer(key)).status == 200
    assert ask(address, "/health").status == ask(address, "/ping").status == 200
    assert ask(address, PATH, method="OPTIONS").status != 401


def test_keys_are_read_again(keyed: tuple[str, Path, str]) -> None:
    """Claim: a key that is added to the file is soon good, one that is taken out soon is not, without a restart; a file
    that is not of the form changes nothing."""
    address, file, key = keyed
    before = file.read_text(encoding="utf-8")
    other, line = new_key("bob")
    assert ask(address, "/version", headers=bearer(other)).status == 401
    file.write_text(f"{before}{line}\n", encoding="utf-8")
    until(lambda: ask(address, "/version", headers=bearer(other)).status == 200)
    file.write_text("not a file of keys\n", encoding="utf-8")
    time.sleep(1.2)
    assert ask(address, "/version", headers=bearer(other)).status == 200
    file.write_text(before, encoding="utf-8")
    until(lambda: ask(address, "/version", headers=bearer(other)).status == 401)
    assert ask(address, "/version", headers=bearer(key)).status == 200


def test_a_key_is_printed_once_and_its_hash_kept(tmp_path: Path) -> None:
    """Claim: `specdec gateway --new-key NAME` prints a key and its line for the file; the file has its hash only, and a
    file of another form is refused by its line."""
    command = [sys.executable, "-m", "specdec.cli", "gateway", "--new-key", "carol"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    key = next(word for word in printed if word.startswith("sk-specdec-"))
    assert hash_of(key) in printed and len(key) > 43 + len("sk-specdec-") - 1
    file = tmp_path / "keys"
    file.write_text(f"carol {hash_of(key)}\n\nbroken\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 3"):
        read_keys(file)
    with pytest.raises(ConfigError, match="--new-key"):
        new_key("a b")


def test_a_key_separates_cached_prefixes() -> None:
    """Claim: requests of different keys, or of different salts, never share a salt; without both there is none."""
    salts = [salt_of(name, salt) for name in (None, "a", "b") for salt in (None, "a", "b")]
    assert salts[0] == "" and len(set(salts)) == len(salts) and all(len(salt) <= 128 for salt in salts)


def test_origins_are_allowed_by_name(keyed: tuple[str, Path, str], address: str) -> None:
    """Claim: pages of a named origin may use the server, their preflight needs no key, and errors carry the header by
    which a browser shows them; other origins, and all where none is named, get no such header."""
    keyed_address, _, key = keyed
    ask_first = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    wanted = {**ask_first, "Access-Control-Request-Headers": "authorization,content-type"}
    preflight = ask(keyed_address, PATH, method="OPTIONS", headers=wanted)
    assert preflight.status == 200 and preflight.headers["access-control-allow-origin"] == ORIGIN
    allowed = "access-control-allow-origin"
    assert ask(keyed_address, PATH, LEAST, headers={"Origin": ORIGIN}).headers[allowed] == ORIGIN  # 401
    assert ask(keyed_address, PATH, {}, headers={"Origin": ORIGIN, **bearer(key)}).headers[allowed] == ORIGIN  # 400
    assert allowed not in ask(keyed_address, "/health", headers={"Origin": "https://evil.example"}).headers
    assert allowed not in ask(address, "/health", headers={"Origin": ORIGIN}).headers
    assert allowed not in ask(address, PATH, method="OPTIONS", headers=wanted).headers


def test_without_keys_only_loopback_hosts_and_json(address: str, keyed: tuple[str, Path, str]) -> None:
    """Claim: on loopback without keys a request by another host's name, as a page of that name sends it, is 403; POST
    takes application/json only, so that no page sends one without asking first."""
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::2]"):
        assert ask(address, "/v1/models", headers={"Host": host}).status == 403, host
    for host in ("localhost", "localhost:1", "127.0.0.1", "[::1]:80", "127.1.2.3"):
        assert ask(address, "/v1/models", headers={"Host": host}).status == 200, host
    assert ask(keyed[0], "/v1/models", headers={"Host": "evil.example", **bearer(keyed[2])}).status == 200
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        refused = ask(address, PATH, LEAST, headers={"Content-Type": kind})
        assert (refused.status, refused.error["code"]) == (415, "unsupported_media_type")
    assert ask(address, PATH, LEAST, headers={"Content-Type": "application/json; charset=utf-8"}).status == 200


def answer_to(address: str, *parts: bytes, timeout_s: float = 20.0) -> bytes:
    """What the server answers to some bytes, until it closes the connection."""
    with socket.create_connection(split_address(address), timeout_s) as connection:
        try:
            for part in parts:
                connection.sendall(part)
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = b""
        try:
            while data := connection.recv(65536):
                answer += data
        except ConnectionResetError:
            pass
        return answer


def test_heads_and_bodies_have_bounds(address: str) -> None:
    """Claim: a head above 32 KiB is refused while it comes, whatever its form; a body above 4 MiB by its length or as
    it comes; what is no HTTP at once. Conclusive: the connection is closed, and the server answers others after it."""
    start = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    assert HEAD_BYTES_MAX == 32 << 10
    for long in (start + b"A: " + b"a" * 40_000, start + b"A: b\r\n" * 8_000, b"GET /" + b"a" * 40_000):
        answer = answer_to(address, long)
        assert answer.startswith((b"HTTP/1.1 431", b"HTTP/1.1 400")) or not answer, answer[:100]
    assert answer_to(address, b"\x16\x03\x01 no http\r\n\r\n").startswith(b"HTTP/1.1 400")
    post = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    )
    assert answer_to(address, post + b"Content-Length: 5000000\r\n\r\n").startswith(b"HTTP/1.1 413")
    chunks = [b"Transfer-Encoding: chunked\r\n\r\n", *[b"10000\r\n" + b" " * 65536 + b"\r\n"] * 80]
    assert answer_to(address, post, *chunks).startswith(b"HTTP/1.1 413")
    assert ask(address, "/health").status == 200


@pytest.mark.more
def test_half_a_head_is_refused_in_time(address: str) -> None:
    """Claim: a connection that sends half a head, or nothing, is answered 408 and closed after 10 s."""
    halves = [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "]
    connections = [socket.create_connection(split_address(address), 30.0) for _ in halves]
    start_s = time.monotonic()
    for connection, half in zip(connections, halves):
        connection.sendall(half)
    for connection in connections:
        with connection:
            answer = connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 408") and 8 < time.monotonic() - start_s < 25, answer
            while connection.recv(65536):
                pass


def test_tls_in_front_and_mutual_tls_behind(services: Services, tmp_path: Path) -> None:
    """Claim: with --http-ssl-certfile the port speaks TLS only, and with the three files of --ssl-certfile the gateway
    uses a coordinator that demands certificates. Conclusive: the client trusts the one authority; plain HTTP fails."""
    authority = Authority("gateway test")
    files = authority.issue(tmp_path / "own")
    three = {name: getattr(files, name) for name in ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")}
    settings = services.settings.model_copy(update={**three, "insecure_links": True})
    with start("coordinator", settings) as coordinator:
        own = {"http_ssl_certfile": files.ssl_certfile, "http_ssl_keyfile": files.ssl_keyfile, **three}
        with gateway(coordinator.wait_ready(), **own) as child:
            trust = ssl.create_default_context(cadata=authority.pem.decode())
            connection = http.client.HTTPSConnection(child.address, timeout=30, context=trust)
            connection.request("POST", PATH, json.dumps(LEAST), {"Content-Type": "application/json"})
            assert connection.getresponse().status == 200
            connection.close()
            with pytest.raises((OSError, http.client.HTTPException)):
                ask(child.address, "/health")
