"""The server every service runs, over real sockets: its answers to bad input, to failures, and while stopping."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
from typing import NoReturn

import grpc
import pytest
from google.protobuf.descriptor_database import DescriptorDatabase
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from specdec.config import ServiceSettings, TlsSettings
from specdec.errors import ConfigError, InvalidRequest, ReplicaUnavailable
from specdec.rpc import reflection
from specdec.rpc.client import HEALTH_CHECK_METHOD, call_stream, call_unary, open_channel, wait_serving
from specdec.rpc.limits import HELPER_REQUEST_BYTES_MAX
from specdec.rpc.server import MESSAGE_BYTES_MIN, Server, message_bytes_max, unary, unary_stream
from specdec.settings import listening_host
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import types_pb2 as types_pb
from tests.support.echo_service import DESCRIBE, SERVICE, VERIFY, Echo

INSECURE = TlsSettings()
GENERATE = "/specdec.v1.CoordinatorService/Generate"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
MALFORMED = b"\x0a\xff"  # a field that claims more bytes than there are


class Ticking:
    """A CoordinatorService whose Generate sends a delta every 10 ms; `text` selects its other behaviour."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()
        self.tick_count = 0

    async def generate(self, request, context):
        if request.text == "bug":
            raise RuntimeError("a secret of the implementation")
        try:
            for index in range(int(request.text)):
                self.tick_count += 1
                yield coordinator_pb.GenerateResponse(delta=coordinator_pb.Delta(first_output_index=index))
                await asyncio.sleep(0.01)
        finally:
            self.closed.set()

    def server(self) -> Server:
        methods = {"Generate": unary_stream(coordinator_pb.GenerateRequest, self.generate)}
        return Server(ServiceSettings(port=0), {"specdec.v1.CoordinatorService": methods})


async def code_of(call) -> grpc.StatusCode:
    """The status a call ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def first_of_stream(channel, method, data):
    call = channel.stream_stream(method)()
    await call.write(data)
    return await call.read()


def generate(channel, text):
    return call_stream(channel, GENERATE, coordinator_pb.GenerateRequest(text=text), coordinator_pb.GenerateResponse)


async def test_malformed_bytes_are_invalid_argument_on_every_method():
    """Bytes that are no message are the sender's fault and are answered so, on library services and streams too.

    gRPC's default is UNKNOWN with the name of a Python class, so INVALID_ARGUMENT can only come from our parsing.
    """
    server = Echo().server()
    async with open_channel(await server.start(), INSECURE) as channel:
        for method in (DESCRIBE, HEALTH_CHECK_METHOD):
            assert await code_of(channel.unary_unary(method)(MALFORMED)) is grpc.StatusCode.INVALID_ARGUMENT
        for method in (VERIFY, REFLECTION):
            assert await code_of(first_of_stream(channel, method, MALFORMED)) is grpc.StatusCode.INVALID_ARGUMENT
        watch = channel.unary_stream("/grpc.health.v1.Health/Watch")(MALFORMED)
        assert await code_of(watch.read()) is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(0)


async def test_random_bytes_are_invalid_argument_or_a_message():
    """Mutations of a valid message and noise, from a fixed seed: every answer is one of the two, none a crash.

    Noise often is a valid message of unknown fields, so both outcomes must occur for the test to mean anything.
    """
    source = random.Random(7)
    valid = coordinator_pb.GenerateRequest(text="one", label="two", resume={"output_token_ids": [1, 300]})

    async def accept(_request, _context):
        return types_pb.DescribeResponse()

    server = Server(ServiceSettings(port=0), {SERVICE: {"Describe": unary(coordinator_pb.GenerateRequest, accept)}})
    async with open_channel(await server.start(), INSECURE) as channel:
        call = channel.unary_unary(DESCRIBE)
        codes = []
        for _ in range(400):
            data = bytearray(valid.SerializeToString())
            for _ in range(source.randint(1, 4)):
                data[source.randrange(len(data))] = source.randrange(256)
            codes.append(await code_of(call(bytes(data[: source.randint(1, len(data))]))))
    await server.stop(0)
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}


async def test_invalid_utf8_is_named():
    """A string field that is not UTF-8 is refused with the message's name (proto3 strings are UTF-8)."""
    server = Ticking().server()
    async with open_channel(await server.start(), INSECURE) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match="specdec.v1.GenerateRequest") as raised:
            await channel.unary_stream(GENERATE)(b"\x0a\x02\xff\xfe").read()  # field 1, text, two bytes
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop(0)


async def test_a_bug_costs_one_call_and_leaks_nothing():
    """An unexpected exception is INTERNAL without its text; a call running beside it does not notice."""
    server = Ticking().server()
    async with open_channel(await server.start(), INSECURE) as channel:

        async def count() -> int:
            return len([response async for response in generate(channel, "20")])

        neighbour = asyncio.create_task(count())
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await channel.unary_stream(GENERATE)(coordinator_pb.GenerateRequest(text="bug").SerializeToString()).read()
        assert raised.value.code() is grpc.StatusCode.INTERNAL
        assert "secret" not in raised.value.details() and "RuntimeError" not in raised.value.details()
        assert await neighbour == 20
    await server.stop(0)


async def test_the_handler_is_closed_when_the_client_is_gone():
    """A reader that leaves ends the work: the generator's `finally` runs within 100 ms (design section 8).

    Counted in the generator's own ticks of 10 ms, so that a busy machine slows both. It would go on for 10,000.
    """
    service = Ticking()
    server = service.server()
    async with open_channel(await server.start(), INSECURE) as channel:
        responses = generate(channel, "10000")
        await anext(responses)
        await responses.aclose()
        left_at = service.tick_count
        await asyncio.wait_for(service.closed.wait(), 10.0)
        assert service.tick_count - left_at <= 10
    await server.stop(0)


async def test_health_follows_the_service():
    """NOT_SERVING from the first answer of the port, SERVING after `set_serving`, for the service and as a whole."""
    server = Echo().server()
    async with open_channel(await server.start(), INSECURE) as channel:
        for name in ("", SERVICE):
            with pytest.raises(ReplicaUnavailable, match="NOT_SERVING"):
                await wait_serving(channel, name, 0.1)
        await server.set_serving(True)
        for name in ("", SERVICE):
            await wait_serving(channel, name, 1.0)
    await server.stop(0)


@pytest.mark.parametrize("version", reflection.VERSIONS)
async def test_reflection_knows_methods(version: str):
    """Claim: in both versions a method's name finds the file of its service, with all it imports; a name that is none
    is NOT_FOUND. Source: ghz asks for the method (`--call specdec.v1.CoordinatorService/Generate`), and the library's
    servicer knows none. Conclusive: the method's request can be looked up in a pool of the files sent alone."""
    server = Echo().server()
    service = coordinator_pb.DESCRIPTOR.services_by_name["CoordinatorService"].full_name
    async with open_channel(await server.start(), INSECURE) as channel:
        call = channel.stream_stream(f"/{version}/ServerReflectionInfo")()
        for name in (f"{service}.Generate", f"{service}.Nothing", "Nothing.Generate"):
            request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
            await call.write(request.SerializeToString())
            answer = reflection_pb2.ServerReflectionResponse.FromString(await call.read())
            if not name.startswith(service) or name.endswith("Nothing"):
                assert answer.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
                continue
            files = DescriptorDatabase()  # which finds what a file imports, in whatever order they came
            for data in answer.file_descriptor_response.file_descriptor_proto:
                files.Add(FileDescriptorProto.FromString(data))
            method = DescriptorPool(files).FindServiceByName(service).methods_by_name["Generate"]
            assert "sampling" in method.input_type.fields_by_name
        call.cancel()
    await server.stop(0)


async def test_reflection_lists_what_is_served():
    """Tools such as grpcurl find the service without its proto files."""
    server = Echo().server()
    async with open_channel(await server.start(), INSECURE) as channel:
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        data = await first_of_stream(channel, REFLECTION, request.SerializeToString())
        answer = reflection_pb2.ServerReflectionResponse.FromString(data)
        names = {service.name for service in answer.list_services_response.service}
        assert {SERVICE, "grpc.health.v1.Health"} <= names
    await server.stop(0)


async def test_stopping_lets_running_calls_finish():
    """At SIGTERM health flips at once, a new call is UNAVAILABLE, a running one gets every message. Conclusive: it runs
    for two seconds more."""
    server = Ticking().server()
    async with open_channel(await server.start(), INSECURE) as channel:
        await server.set_serving(True)
        responses = generate(channel, "200")
        await anext(responses)
        stopping = asyncio.create_task(server.stop(grace_s=10.0))
        request, answer = health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse
        while (await call_unary(channel, HEALTH_CHECK_METHOD, request, answer, 1.0)).status == answer.SERVING:
            pass
        with pytest.raises(ReplicaUnavailable, match="stopping"):
            await anext(generate(channel, "1"))
        assert len([response async for response in responses]) == 199
        await asyncio.wait_for(stopping, 2.0)


async def test_after_the_grace_calls_end_unavailable():
    """A call longer than the grace is ended with a status that names the remedy, not cut off."""
    service = Ticking()
    server = service.server()
    async with open_channel(await server.start(), INSECURE) as channel:
        responses = generate(channel, "10000")
        await anext(responses)
        stopping = asyncio.create_task(server.stop(grace_s=0.1))
        with pytest.raises(ReplicaUnavailable, match="resume"):
            async for _ in responses:
                pass
        await stopping
        assert service.closed.is_set()


async def test_a_busy_port_is_reported_in_one_line():
    """A second server on a port is refused by name and never shares it, which SO_REUSEPORT would allow silently."""
    server = Echo().server()
    port = int((await server.start()).rpartition(":")[2])
    second = Echo().server(ServiceSettings(port=port))
    with pytest.raises(ConfigError, match=f"^port {port} on 127.0.0.1 is in use; choose another with --port$"):
        await second.start()
    await server.stop(0)


async def test_a_host_of_another_machine_is_refused():
    """192.0.2.1 is reserved for documentation (RFC 5737), so no machine has it."""
    server = Echo().server(ServiceSettings(host="192.0.2.1", port=0, insecure=True))
    with pytest.raises(ConfigError, match="not an address of this machine"):
        await server.start()


async def test_ipv6_loopback():
    """The address returned can be connected to, brackets included."""
    if not socket.has_ipv6:
        return
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:  # the machine has IPv6 switched off: then the documented answer is a refusal
        with pytest.raises(ConfigError):
            await Echo().server(ServiceSettings(host="::1", port=0)).start()
        return
    server = Echo().server(ServiceSettings(host="::1", port=0))
    async with open_channel(await server.start(), INSECURE) as channel:
        answer = await call_unary(channel, DESCRIBE, types_pb.DescribeRequest(), types_pb.DescribeResponse, 2.0)
        assert answer.model_name == "echo"
    await server.stop(0)


async def test_all_addresses_are_those_of_both_protocols(monkeypatch: pytest.MonkeyPatch):
    """Claim: a server on `::` answers over IPv4 and IPv6; on a machine without IPv6 `::` is all addresses of IPv4.

    Source: manifests name one address for every cluster. Conclusive: calls over both loopback addresses are answered;
    the other machine is planted, a system that refuses sockets of IPv6.
    """
    if listening_host("::") == "::":
        server = Echo().server(ServiceSettings(host="::", port=0, insecure=True))
        port = (await server.start()).rpartition(":")[2]
        for host in ("127.0.0.1", "[::1]"):
            async with open_channel(f"{host}:{port}", INSECURE) as channel:
                answer = await call_unary(channel, DESCRIBE, types_pb.DescribeRequest(), types_pb.DescribeResponse, 2.0)
                assert answer.model_name == "echo"
        await server.stop(0)

    def refuse(*_arguments: object, **_options: object) -> NoReturn:
        raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))

    monkeypatch.setattr(socket, "create_server", refuse)
    settings = ServiceSettings(host="::", metrics_address="[::]:9464", health_address="127.0.0.1:1", insecure=True)
    assert (settings.host, settings.metrics_address) == ("0.0.0.0", "0.0.0.0:9464")
    assert settings.health_address == "127.0.0.1:1"


async def test_a_large_message_is_refused_and_the_connection_lives():
    """A message above the cap never reaches a handler, nor one to a unary method above what a name needs; other calls
    of the connection go on."""
    reached = []

    async def handler(request, _context):
        reached.append(request.ByteSize())
        return types_pb.DescribeResponse()

    server = Server(ServiceSettings(port=0), {SERVICE: {"Describe": unary(coordinator_pb.GenerateRequest, handler)}})
    async with open_channel(await server.start(), INSECURE) as channel:
        for size, code in (
            (MESSAGE_BYTES_MIN, grpc.StatusCode.RESOURCE_EXHAUSTED),
            (HELPER_REQUEST_BYTES_MAX, grpc.StatusCode.INVALID_ARGUMENT),
        ):
            big = coordinator_pb.GenerateRequest(text="x" * size).SerializeToString()
            assert await code_of(channel.unary_unary(DESCRIBE)(big)) is code
        assert await code_of(channel.unary_unary(DESCRIBE)(b"")) is grpc.StatusCode.OK
    await server.stop(0)
    assert reached == [0]


async def test_a_compressed_message_is_refused():
    """A small gzip message can unpack to a huge one; the server takes none, so there is nothing to bound."""
    server = Echo().server()
    async with open_channel(await server.start(), INSECURE) as channel:
        call = channel.unary_unary(DESCRIBE)(b"\x0a\x01x" * 100000, compression=grpc.Compression.Gzip)
        assert await code_of(call) is grpc.StatusCode.UNIMPLEMENTED
    await server.stop(0)


async def test_refusals_name_the_field():
    """A handler's InvalidRequest arrives as the same error: field, value and limit."""

    async def refuse(_request, _context):
        raise InvalidRequest("sampling.top_p", 2.0, "at most 1")

    server = Server(ServiceSettings(port=0), {SERVICE: {"Describe": unary(types_pb.DescribeRequest, refuse)}})
    async with open_channel(await server.start(), INSECURE) as channel:
        with pytest.raises(InvalidRequest, match=r"^sampling.top_p is 2.0; it must be at most 1$") as raised:
            await call_unary(channel, DESCRIBE, types_pb.DescribeRequest(), types_pb.DescribeResponse, 2.0)
    assert (raised.value.field, raised.value.value, raised.value.limit) == ("sampling.top_p", "2.0", "at most 1")
    await server.stop(0)


def test_the_message_cap_grows_with_the_model():
    """A prompt of a million positions fits; a small model's cap still lets a megabyte field be refused by name."""
    assert message_bytes_max(1_000_000) >= 5 * 1_000_000
    assert message_bytes_max(1) == MESSAGE_BYTES_MIN
