"""Errors across the wire: each arrives unchanged, and malformed ones arrive as a defined error."""

from __future__ import annotations

import grpc
import pytest
from google.rpc import code_pb2

from specdec import errors
from specdec.config import ServiceSettings, TlsSettings
from specdec.protocol.items import Failure
from specdec.rpc.client import call_unary, open_channel
from specdec.rpc.server import Server, unary
from specdec.rpc.status import error_from_failure, error_from_rpc, failure_from_error, status_from_error
from specdec.v1 import types_pb2 as types_pb
from tests.support.echo_service import DESCRIBE, SERVICE

ERRORS = [
    errors.SpecdecError("it broke"),
    errors.ConfigError("no such folder"),
    errors.ModelRefused("x: no tokenizer.json"),
    errors.InvalidRequest("sampling.temperature", float("nan"), "a number from 0 to 100"),
    errors.CacheExhausted("12 blocks needed, 3 free", retry_after_s=2.5),
    errors.SessionUnknown("session 7 is not open"),
    errors.Mismatch("tokenizers differ"),
    errors.ReplicaUnavailable("the target is gone", retry_after_s=0.5),
    errors.PeerRefused("no name of this certificate"),
    errors.DeliveryStalled("nothing was read for 30 s"),
    errors.NumericsError("logits are not numbers"),
    errors.GrammarFailed("the grammar cannot be followed any further"),
]
CODES = {
    "INVALID_FIELD": code_pb2.INVALID_ARGUMENT,
    "CACHE_EXHAUSTED": code_pb2.RESOURCE_EXHAUSTED,
    "REPLICA_UNAVAILABLE": code_pb2.UNAVAILABLE,
    "NUMERICS": code_pb2.INTERNAL,
    "MISMATCH": code_pb2.FAILED_PRECONDITION,
}


def facts(error: errors.SpecdecError) -> tuple:
    """Returns the values that make two errors equal for their handlers."""
    return type(error), str(error), error.reason, vars(error)


def test_every_error_is_covered():
    """ERRORS holds one of each class, so a class without a code is found here and not by a user."""
    classes = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert classes == {type(error) for error in ERRORS}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_an_error_crosses_a_socket_unchanged(error):
    """Raised in a handler, it is raised at the client: class, sentence, field, limit and time to wait."""

    async def fail(_request, _context):
        raise error

    server = Server(ServiceSettings(port=0), {SERVICE: {"Describe": unary(types_pb.DescribeRequest, fail)}})
    async with open_channel(await server.start(), TlsSettings()) as channel:
        with pytest.raises(errors.SpecdecError) as raised:
            await call_unary(channel, DESCRIBE, types_pb.DescribeRequest(), types_pb.DescribeResponse, 2.0)
    await server.stop(0)
    assert facts(raised.value) == facts(error)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_crosses_a_stream_as_an_item(error):
    """Inside a stream the same facts travel in a Failure, less value and limit, which its sentence holds."""
    returned = error_from_failure(failure_from_error(error, 7, 3))
    assert (type(returned), str(returned)) == (type(error), str(error))
    assert getattr(returned, "field", "") == getattr(error, "field", "")
    assert getattr(returned, "retry_after_s", 0) == getattr(error, "retry_after_s", 0)


@pytest.mark.parametrize("reason, code", CODES.items())
def test_codes_are_those_of_google_rpc(reason, code):
    """The numbers on the wire are google.rpc.Code, which clients of every language have a table of."""
    error = next(error for error in ERRORS if error.reason == reason)
    assert status_from_error(error).code == failure_from_error(error, 1, 1).code == code


def test_an_unknown_failure_is_still_an_error():
    """A peer of another version may report an error without a class here."""
    assert type(error_from_failure(Failure(1, 1, 999, "NEWER", "sentence"))) is errors.SpecdecError
    assert type(error_from_failure(Failure(1, 1, 14, "NEWER", "sentence"))) is errors.ReplicaUnavailable


def test_malformed_details_are_ignored():
    """When a peer's details do not parse, the code alone counts."""
    metadata = grpc.aio.Metadata(("grpc-status-details-bin", b"\xff\xff"))
    failed = grpc.aio.AioRpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.aio.Metadata(), metadata, details="full")
    error = error_from_rpc(failed)
    assert isinstance(error, errors.CacheExhausted) and str(error) == "full" and error.retry_after_s == 1.0


def test_a_long_sentence_is_cut():
    """Trailing metadata is limited to 8 KiB, so a long error must not be lost."""
    status = status_from_error(errors.ConfigError("x" * 100_000))
    assert len(status.SerializeToString()) < 4096
