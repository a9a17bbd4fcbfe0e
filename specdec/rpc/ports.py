"""Ports to listen on: a check that one is free, and the second, plain port that answers health checks only.

A kubelet's probe speaks no TLS, so beside a port with mutual TLS it needs another, without any other method.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

import grpc

from specdec.config import split_address
from specdec.errors import ConfigError
from specdec.rpc.health import Health
from specdec.rpc.limits import CONNECTION_OPTIONS, METADATA_OPTIONS, PATIENT_KEEPALIVE_OPTIONS, PROBE_CONNECTION_OPTIONS

_HEALTH_OPTIONS = (
    *CONNECTION_OPTIONS,
    *PATIENT_KEEPALIVE_OPTIONS,
    *METADATA_OPTIONS,
    *PROBE_CONNECTION_OPTIONS,
    ("grpc.so_reuseport", 0),
    ("grpc.compression_enabled_algorithms_bitset", 1),
)


def bracketed(host: str) -> str:
    """Returns the host in the form for HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def check_port(host: str, port: int, flag: str = "--port", host_flag: str = "--host") -> None:
    """Raises ConfigError with the cause if `port` cannot be bound. Called first because gRPC reports no cause."""
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
    """The plain port: Check of `health`, and UNIMPLEMENTED for everything else, Watch included.

    Calls are bounded per connection and not together: otherwise one client could take the places of the probes.
    """

    def __init__(self, health: Health, interceptors: Sequence[grpc.aio.ServerInterceptor]) -> None:
        self._server = grpc.aio.server(options=_HEALTH_OPTIONS, interceptors=interceptors)
        self._server.add_generic_rpc_handlers((health.handlers(has_watch=False),))

    async def start(self, address: str) -> str:
        """Listens; returns HOST:PORT. Raises ConfigError, one line, if the port cannot be bound."""
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
        """Stops the port, and every call."""
        await self._server.stop(0.0)
