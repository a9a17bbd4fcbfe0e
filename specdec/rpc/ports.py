"""Ports to listen on: whether one can be had, and the second, plain one that answers health checks only.

A kubelet's probe speaks no TLS, so beside a port with mutual TLS it needs another. Nothing else can be asked there.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from specdec.config import split_address
from specdec.errors import ConfigError
from specdec.rpc.limits import KEEPALIVE_OPTIONS

HEALTH_CALL_COUNT_MAX = 64  # whoever reaches the port may ask; watching is a call that stays
HEALTH_MESSAGE_BYTES_MAX = 4096

_HEALTH_OPTIONS = (
    *KEEPALIVE_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
    ("grpc.max_receive_message_length", HEALTH_MESSAGE_BYTES_MAX),
)


def bracketed(host: str) -> str:
    """The host as it stands before a colon and a port."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def check_port(host: str, port: int, flag: str = "--port", host_flag: str = "--host") -> None:
    """ConfigError saying what is wrong when `port` cannot be had. Asked first because gRPC reports no cause."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(f"port {port} on {host} is in use; choose another with {flag}") from error
        if error.errno == errno.EACCES:
            raise ConfigError(f"port {port} needs privileges; choose one above 1023 with {flag}") from error
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError(f"{host_flag} {host} is not an address of this machine ({reason})") from error


class HealthPort:
    """The plain port: the health of `servicer`, and UNIMPLEMENTED for everything else."""

    def __init__(self, servicer: health.aio.HealthServicer, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self._server = grpc.aio.server(
            options=_HEALTH_OPTIONS, interceptors=interceptors, maximum_concurrent_rpcs=HEALTH_CALL_COUNT_MAX
        )
        health_pb2_grpc.add_HealthServicer_to_server(servicer, self._server)

    async def start(self, address: str) -> str:
        """Listens; returns HOST:PORT. ConfigError, one line, when the port cannot be had."""
        flag = "--health-address"
        host, port = split_address(address, port_min=0)
        check_port(host, port, flag, flag)
        try:
            port = self._server.add_insecure_port(f"{bracketed(host)}:{port}")
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on port {port} of {host}; choose another with {flag}") from error
        await self._server.start()
        return f"{bracketed(host)}:{port}"

    async def stop(self) -> None:
        """Ends it, and every watch."""
        await self._server.stop(0.0)
