"""A bare grpc.aio server in a process of its own: the baseline of the coordinator's round and CPU.

`Echo` sends every message of a stream back. `Replay` streams messages of the sizes and at the times in its request.
Nothing else is done: its cost is that of gRPC on this machine, on the event loop of the services.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass

import grpc

from bench.event_loop import new_event_loop
from tests.support.processes import module_command

SERVICE = "bench.Bare"
ECHO_BYTES, ECHO_COUNT = 200, 300
Schedule = Sequence[tuple[float, int]]  # seconds from the beginning, and bytes, of every message of a stream


@dataclass(frozen=True, slots=True)
class BareServer:
    """Where it listens, and whose CPU time it uses."""

    address: str
    pid: int


async def echo(requests: AsyncIterator[bytes], _context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    """Every message back."""
    async for request in requests:
        yield request


async def replay(request: bytes, _context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    """Messages of these sizes, each at its time."""
    began_s = time.perf_counter()
    for moment_s, byte_count in json.loads(request):
        if (wait_s := began_s + moment_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        yield bytes(byte_count)


async def serve(host: str) -> None:
    """Until SIGTERM; the address is printed."""
    server = grpc.aio.server()
    handlers = {
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
        "Replay": grpc.unary_stream_rpc_method_handler(replay),
    }
    server.add_registered_method_handlers(SERVICE, handlers)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port(f"{host}:0")
    await server.start()
    print(f"{host}:{port}", flush=True)
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    await stopped.wait()
    await server.stop(0)


@contextlib.contextmanager
def bare_server(host: str = "127.0.0.1") -> Iterator[BareServer]:
    """The process, where the calling thread is; ended at the end."""
    command = module_command("bench.bare_server", "serve", host)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield BareServer(process.stdout.readline().strip(), process.pid)
        finally:
            process.terminate()


def echo_ms(server: BareServer) -> float:
    """Median round trip of one message on an open stream, by a client process on the same kind of event loop.

    Not by this process: gRPC's threads stay in the network namespace in which they were begun.
    """
    command = module_command("bench.bare_server", "echo", server.address)
    return float(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)


async def _echo_ms(address: str) -> float:
    times_ms = []
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.stream_stream(f"/{SERVICE}/Echo")()
        for _ in range(ECHO_COUNT):
            began_s = time.perf_counter()
            await call.write(bytes(ECHO_BYTES))
            await call.read()
            times_ms.append((time.perf_counter() - began_s) * 1e3)
        call.cancel()
    return statistics.median(times_ms)


async def read_replayed(address: str, schedules: Sequence[Schedule]) -> None:
    """One reader per schedule, all at once, until all have ended."""

    async def read(channel: grpc.aio.Channel, schedule: Schedule) -> None:
        async for _ in channel.unary_stream(f"/{SERVICE}/Replay")(json.dumps(schedule).encode()):
            pass

    async with grpc.aio.insecure_channel(address) as channel:
        await asyncio.gather(*(read(channel, schedule) for schedule in schedules))


def main() -> int:
    """`serve HOST`, or `echo ADDRESS`, which prints milliseconds."""
    what, where = sys.argv[1:]
    loop = new_event_loop()
    if what == "serve":
        loop.run_until_complete(serve(where))
    else:
        print(loop.run_until_complete(_echo_ms(where)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
