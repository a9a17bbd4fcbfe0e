"""Limits of connections: the time to detect a dead peer or a stalled reader, the sizes and numbers of what it sends."""

from __future__ import annotations

# Only all of these together detect a cut network or a frozen peer within 3 s.
KEEPALIVE_OPTIONS = (
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1000),
    ("grpc.http2.ping_timeout_ms", 1000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
MESSAGE_BYTES_MIN = 4 << 20  # gRPC's own limit: bad input up to this size is refused by field, not by size
STREAM_REQUEST_BYTES_MAX = 320 << 10  # of a replica's stream: the largest verification has 271 kB
STREAM_RESPONSE_BYTES_MAX = 352 << 10  # to a coordinator: the largest item of nodes has 280 kB
REQUEST_FIELD_COUNT_MAX = 4096  # of a Generate: 1024 biases of three fields, 64 stop tokens, 16 strings, 40 others
PACKED_BYTES_MAX = 1 << 20  # of a request's lists of numbers together: 262,144 token ids of four bytes
# Items beyond this go into the next message: a larger message is a single item, whose fields are counted before it is
# parsed. The parser makes up to 43 bytes of one, 0.7 MB of a message of this size.
MESSAGE_BYTES_SOFT = 16 << 10
STAMP_BYTES_MAX = 64  # of the stamp that a message of items may have too
STREAM_COUNT_MAX = 64  # to one replica: a coordinator has one
READER_STALL_S_MAX = 30.0  # a client that takes no message for this time loses its generation, or its health watch
STREAMS_PER_CONNECTION_MAX = 1024  # a call held open costs some 20 kB; further ones wait in their client

WATCH_COUNT_MAX = 256  # health watches of one server: gRPC's client-side health checking has one per connection
HELPER_REQUEST_BYTES_MAX = 1024  # of health, reflection and Describe: a name at most, held as long as the call

# The port of the probes demands no certificate. A probe is one short call, mostly on a connection of its own; a call
# that a client holds open, or does not read, ends with its connection.
PROBE_CONNECTION_OPTIONS = (
    ("grpc.max_concurrent_streams", 16),
    ("grpc.max_connection_age_ms", 10_000),
    ("grpc.max_connection_age_grace_ms", 1000),
    ("grpc.max_receive_message_length", 4096),  # so much more than a valid one that its field is named in the refusal
)
