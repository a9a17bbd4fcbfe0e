"""Bounds that both sides of a connection share: how soon a dead peer is noticed, how large a message may be."""

from __future__ import annotations

# A cut network or a frozen peer is noticed within 3 s only with all of these together.
KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
MESSAGE_BYTES_MIN = 4 << 20  # gRPC's own limit: bad input up to this size is refused by field, not by size
MESSAGE_BYTES_SOFT = 64 << 10  # items beyond this go into the next message, so that no burst meets the message cap
