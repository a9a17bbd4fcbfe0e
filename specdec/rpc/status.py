"""Errors to gRPC statuses and back: the only place that knows gRPC codes.

A status contains google.rpc.ErrorInfo (reason, domain, the error's values), BadRequest for a bad field and RetryInfo if
waiting helps. In a long-lived stream a Failure item contains the same, since one bad item must not end the stream.
Reading is lenient: a status without details becomes the error of its code.
"""

from __future__ import annotations

from typing import NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec import errors
from specdec.errors import SpecdecError
from specdec.protocol.items import Failure

DOMAIN = "specdec.dev"
MESSAGE_LENGTH_MAX = 1000  # gRPC refuses metadata beyond 8 KiB

_CODES: dict[type[SpecdecError], grpc.StatusCode] = {
    SpecdecError: grpc.StatusCode.INTERNAL,
    errors.ConfigError: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ModelRefused: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InvalidRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.GrammarFailed: grpc.StatusCode.INVALID_ARGUMENT,
    errors.CacheExhausted: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.SessionUnknown: grpc.StatusCode.NOT_FOUND,
    errors.Mismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.ReplicaUnavailable: grpc.StatusCode.UNAVAILABLE,
    errors.PeerRefused: grpc.StatusCode.PERMISSION_DENIED,
    errors.DeliveryStalled: grpc.StatusCode.ABORTED,
    errors.NumericsError: grpc.StatusCode.INTERNAL,
}
_CLASSES_BY_REASON = {error_class.reason: error_class for error_class in _CODES}
REASONS = tuple(_CLASSES_BY_REASON)  # all reasons of errors
_CLASSES_BY_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.CacheExhausted,
    grpc.StatusCode.NOT_FOUND: errors.SessionUnknown,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Mismatch,
    grpc.StatusCode.UNAVAILABLE: errors.ReplicaUnavailable,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.ReplicaUnavailable,
    grpc.StatusCode.ABORTED: errors.DeliveryStalled,
    grpc.StatusCode.PERMISSION_DENIED: errors.PeerRefused,
}
_CODES_BY_NUMBER = {code.value[0]: code for code in grpc.StatusCode}
# The values of an error class beside its message, with the defaults for a status without them.
_FACTS: dict[type[SpecdecError], dict[str, object]] = {
    errors.InvalidRequest: {"field": "", "value": "", "limit": ""},
    errors.CacheExhausted: {"retry_after_s": 1.0},
    errors.ReplicaUnavailable: {"retry_after_s": 1.0},
}


def code_of(error: SpecdecError) -> grpc.StatusCode:
    """Returns the code of the nearest class in the error tree that has one."""
    return next(_CODES[base] for base in type(error).__mro__ if base in _CODES)


def sentence_of(error: SpecdecError) -> str:
    """Returns the error's message, cut to MESSAGE_LENGTH_MAX."""
    return str(error)[:MESSAGE_LENGTH_MAX]


def status_from_error(error: SpecdecError) -> status_pb2.Status:
    """Returns the status of an error, with details."""
    status = status_pb2.Status(code=code_of(error).value[0], message=sentence_of(error))
    facts = {name: str(getattr(error, name, "")) for name in ("field", "value", "limit") if hasattr(error, name)}
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=facts))
    if facts:
        violation = error_details_pb2.BadRequest.FieldViolation(field=facts["field"], description=sentence_of(error))
        status.details.add().Pack(error_details_pb2.BadRequest(field_violations=[violation]))
    if retry_after_s := getattr(error, "retry_after_s", 0.0):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(int(retry_after_s * 1000))
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status


async def abort(context: grpc.aio.ServicerContext, error: SpecdecError) -> NoReturn:
    """Ends the call with the error's status. Always raises, as `context.abort` does."""
    status = rpc_status.to_status(status_from_error(error))
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("context.abort returned")


def error_from_rpc(failed: grpc.aio.AioRpcError) -> SpecdecError:
    """Returns the error of a failed call, to be raised at the client in its place."""
    facts: dict[str, object] = {}
    error_class = _CLASSES_BY_CODE.get(failed.code(), SpecdecError)
    for detail in _details(failed):
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            error_class = _CLASSES_BY_REASON.get(info.reason, error_class)
            facts.update(info.metadata)
        elif detail.Unpack(retry):
            facts["retry_after_s"] = retry.retry_delay.ToMilliseconds() / 1000
    # For a failed connection gRPC adds a preamble; the cause follows "last error".
    sentence = (failed.details() or failed.code().name).rpartition("last error: ")[2]
    sentence = sentence.removeprefix("UNKNOWN: ").removeprefix("UNAVAILABLE: ")
    return _remake(error_class, sentence, facts)


def _details(failed: grpc.aio.AioRpcError) -> list[any_pb2.Any]:
    """Returns the status details of a failed call; none if the peer sent none or malformed ones."""
    for key, value in failed.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            try:
                return list(status_pb2.Status.FromString(value).details)
            except Exception:  # the peer's bytes: each protobuf backend has its own error class
                return []
    return []


def _remake(error_class: type[SpecdecError], message: str, facts: dict[str, object]) -> SpecdecError:
    """Returns the peer's error. Its message was made there, so the constructor must not make it again."""
    error = error_class.__new__(error_class, message)
    for name, absent in _FACTS.get(error_class, {}).items():
        setattr(error, name, facts.get(name, absent))
    return error


def failure_from_error(error: SpecdecError, session: int, incarnation: int) -> Failure:
    """Returns the item that reports an error of one session; zeros if the failed item named none."""
    return Failure(
        session,
        incarnation,
        code_of(error).value[0],
        error.reason,
        sentence_of(error),
        getattr(error, "field", ""),
        int(getattr(error, "retry_after_s", 0.0) * 1000),
    )


def error_from_failure(failure: Failure) -> SpecdecError:
    """Returns the error that a Failure item reports."""
    by_code = _CLASSES_BY_CODE.get(_CODES_BY_NUMBER.get(failure.code, grpc.StatusCode.UNKNOWN), SpecdecError)
    facts = {"field": failure.field, "retry_after_s": failure.retry_after_ms / 1000}
    return _remake(_CLASSES_BY_REASON.get(failure.reason, by_code), failure.message, facts)
