"""Requests from bytes: malformed ones are the sender's fault, on every method, and are refused by name."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from specdec.errors import InvalidRequest
from specdec.rpc.limits import HELPER_REQUEST_BYTES_MAX

AnyMessage = TypeVar("AnyMessage", bound=Message)


def parse(message_class: type[AnyMessage], data: bytes) -> AnyMessage:
    """Returns the message in `data`. Raises InvalidRequest naming the message if the bytes are malformed."""
    try:
        message: AnyMessage = message_class.FromString(data)
    except DecodeError:
        name = message_class.DESCRIPTOR.full_name
        raise InvalidRequest(name, f"{len(data)} malformed bytes", f"a valid {name} with UTF-8 strings") from None
    return message


def parse_small(message_class: type[AnyMessage], data: bytes) -> AnyMessage:
    """Returns the message in `data`. Raises InvalidRequest if it is malformed or larger than a name needs."""
    if len(data) > HELPER_REQUEST_BYTES_MAX:
        name, limit = message_class.DESCRIPTOR.full_name, f"at most {HELPER_REQUEST_BYTES_MAX} bytes"
        raise InvalidRequest(name, f"{len(data)} bytes", limit)
    return parse(message_class, data)
