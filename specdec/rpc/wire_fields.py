"""What the proto files say of each field beside its type (field.proto): the limit that readers hold it to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from google.protobuf.descriptor import Descriptor, FieldDescriptor

from specdec.protocol.limits import LIMITS, Limit
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import field_pb2 as field_pb
from specdec.v1 import open_item_pb2 as open_item_pb
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb


def _limits_of(message: Descriptor) -> Iterator[tuple[str, Limit]]:
    for field in message.fields:
        key, option = f"{message.name}.{field.name}", field.GetOptions().Extensions[field_pb.wire]
        if option.HasField("high"):
            is_bytes = field.type == FieldDescriptor.TYPE_BYTES
            high = int(option.high) if option.high.is_integer() else option.high
            yield key, Limit(field.name, high, option.reason, low=option.low, is_bytes=is_bytes)
        elif option.limit:
            limit = LIMITS[option.limit]
            yield key, replace(limit, low=option.low) if option.HasField("low") else limit
        if option.each:
            yield f"{key}[]", LIMITS[option.each]


FIELD_LIMITS = {
    key: limit
    for file in (types_pb, coordinator_pb, open_item_pb, draft_pb, target_pb)
    for message in file.DESCRIPTOR.message_types_by_name.values()
    for key, limit in _limits_of(message)
}
