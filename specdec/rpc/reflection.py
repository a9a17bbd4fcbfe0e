"""Server reflection, v1 and v1alpha, for clients without proto files: grpcurl, ghz, Postman.

The library's servicer knows services and messages, but no methods, which ghz asks for; a method is answered with the
file of the service that holds it. The two versions have equal messages (grpc/reflection/v1/reflection.proto).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from grpc_reflection.v1alpha import reflection_pb2 as reflection_pb
from grpc_reflection.v1alpha.reflection import SERVICE_NAME, aio

from specdec.rpc.parsing import parse_small

VERSIONS = (SERVICE_NAME, "grpc.reflection.v1.ServerReflection")


class MethodPool:
    """The default descriptor pool, which also finds the file of a method."""

    def __init__(self) -> None:
        self._pool = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, name: str) -> FileDescriptor:  # noqa: N802  # the library calls it by this name
        """Returns the file that holds a service, a method or a message. Raises KeyError."""
        try:
            return self._pool.FindFileContainingSymbol(name)
        except KeyError:
            service, _, method = name.rpartition(".")
            found = self._pool.FindServiceByName(service)
            return found.methods_by_name[method].containing_service.file


def handlers(service_names: Iterable[str]) -> list[grpc.GenericRpcHandler]:
    """Returns the handlers of reflection about these services and itself."""
    servicer = aio.ReflectionServicer((*service_names, SERVICE_NAME), MethodPool())
    info = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        partial(parse_small, reflection_pb.ServerReflectionRequest),
        reflection_pb.ServerReflectionResponse.SerializeToString,
    )
    return [grpc.method_handlers_generic_handler(version, {"ServerReflectionInfo": info}) for version in VERSIONS]
