"""Limits of connections, calls and streams: the time to detect a dead peer or a stalled reader, the sizes and numbers
of what it sends, by method. Limits of fields stand in the proto files (`wire_fields`).

The fields of `CALLS` are `Service/Method.what`, with `what` among `request_bytes`, `response_bytes` (of a message),
`calls` (at a time), `silence_s` (without a message of the client, or one taken by it), `request_fields`,
`request_parts`, `request_packed_bytes`, `items_bytes` (of several items in a message), `unhandled_bytes`,
`untaken_items`, `messages_per_s` (of one stream or link); those of connections are `Server.what` of every port:
`connections`, `handshake_s`, `idle_s` and `pings_per_s` of one, `calls_per_s`, `waiting_calls` and `wasted_calls_per_s`
of all, `metadata_bytes` of a call; and `Probes.what` of the port of the probes: `calls`, `connection_s`,
`request_bytes`.
"""

from __future__ import annotations

from specdec.protocol.limits import Limit


def _keepalive(timeout_ms: int) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.ping_timeout_ms", timeout_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )


# Only all of these together detect a cut network or a frozen peer within 3 s: of a client without a watch of its own.
KEEPALIVE_OPTIONS = _keepalive(1000)
# Of servers and links, which find silent peers themselves (`rpc.silence`, `rpc.link`): gRPC's limit counts the time in
# which this process does not get the processor, so it is only for what they miss.
PATIENT_KEEPALIVE_OPTIONS = _keepalive(20_000)
MESSAGE_BYTES_MIN = 4 << 20
HELPER_REQUEST_BYTES_MAX = 1024
STREAM_REQUEST_BYTES_MAX = 320 << 10
STREAM_RESPONSE_BYTES_MAX = 352 << 10
REQUEST_FIELD_COUNT_MAX = 4096
PACKED_BYTES_MAX = 1 << 20
MESSAGE_BYTES_SOFT = 16 << 10
PART_COUNT_FREE, BYTES_PER_PART_MIN = 512, 5
STAMP_BYTES_MAX = 64  # of the stamp that a message of items may have too
UNHANDLED_BYTES_MAX, UNHANDLED_BYTES_MIN = 2 << 20, 4 << 10  # of a replica; of one message, however short
UNTAKEN_ITEM_COUNT_MAX = 1 << 16
STREAM_COUNT_MAX = 64
WATCH_COUNT_MAX = 256
STREAMS_PER_CONNECTION_MAX = 1024
READER_STALL_S_MAX = 30.0
SILENCE_S_MAX = 10.0
PINGS_PER_S_MAX = 2
CONNECTION_COUNT_MAX, HANDSHAKE_S_MAX, CONNECTION_IDLE_S_MAX = 512, 10, 300
CALLS_PER_S_MAX, MESSAGES_PER_S_MAX = 1000, 5000
CALL_BURST_S = 0.1  # the calls of this time may come at once: more would stop the event loop for longer
WASTED_CALLS_PER_S_MAX, WASTED_CALLS_PER_S_FREE = 100, 1
WAITING_CALL_COUNT_MAX = 4096
METADATA_BYTES_MAX = 8 << 10
PROBE_COUNT_MAX, PROBE_CONNECTION_S_MAX, PROBE_REQUEST_BYTES_MAX = 16, 10, 4096

# The port of the probes demands no certificate. A probe is one short call, mostly on a connection of its own; a call
# that a client holds open, or does not read, ends with its connection.
PROBE_CONNECTION_OPTIONS = (
    ("grpc.max_concurrent_streams", PROBE_COUNT_MAX),
    ("grpc.max_connection_age_ms", 1000 * PROBE_CONNECTION_S_MAX),
    ("grpc.max_connection_age_grace_ms", 1000),
    ("grpc.max_receive_message_length", PROBE_REQUEST_BYTES_MAX),
)
CONNECTION_OPTIONS = (
    ("grpc.max_allowed_incoming_connections", CONNECTION_COUNT_MAX),
    ("grpc.server_handshake_timeout_ms", 1000 * HANDSHAKE_S_MAX),
    ("grpc.max_connection_idle_ms", 1000 * CONNECTION_IDLE_S_MAX),
    # Calls that no handler has been given yet. Beyond, gRPC cancels the newest, and by default some beyond 1000, of
    # whatever client; a connection has its own limit of calls, so these are never more.
    ("grpc.server.max_pending_requests", CONNECTION_COUNT_MAX * STREAMS_PER_CONNECTION_MAX),
    ("grpc.server.max_pending_requests_hard_limit", CONNECTION_COUNT_MAX * STREAMS_PER_CONNECTION_MAX),
)
PING_OPTIONS = (
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1000 // PINGS_PER_S_MAX),
    ("grpc.http2.max_ping_strikes", 10),  # a peer that lacks the processor sends several of its pings at once
)
METADATA_OPTIONS = (
    ("grpc.max_metadata_size", METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", METADATA_BYTES_MAX),  # between the two it would refuse some calls by chance
)

STREAMS = "TargetService/Verify,DraftService/Draft"
HELPERS = "CoordinatorService/Describe,TargetService/Describe,DraftService/Describe,Health/Check"
HELPERS += ",ServerReflection/ServerReflectionInfo"

CALLS = (
    Limit(
        "MESSAGE_BYTES_MIN",
        MESSAGE_BYTES_MIN,
        "gRPC's own: bad input up to this size is refused by field, not by size; more for a model of many positions",
        "CoordinatorService/Generate.request_bytes,response_bytes",
        is_bytes=True,
    ),
    Limit(
        "HELPER_REQUEST_BYTES_MAX",
        HELPER_REQUEST_BYTES_MAX,
        "a name at most, held as long as the call",
        f"{HELPERS},Health/Watch.request_bytes",
        is_bytes=True,
    ),
    Limit(
        "STREAM_REQUEST_BYTES_MAX",
        STREAM_REQUEST_BYTES_MAX,
        "the largest verification has 271 kB",
        f"{STREAMS}.request_bytes",
        is_bytes=True,
    ),
    Limit(
        "STREAM_RESPONSE_BYTES_MAX",
        STREAM_RESPONSE_BYTES_MAX,
        "the largest item of nodes has 280 kB; the description comes over the same connection",
        f"{STREAMS},TargetService/Describe,DraftService/Describe.response_bytes",
        is_bytes=True,
    ),
    Limit(
        "REQUEST_FIELD_COUNT_MAX",
        REQUEST_FIELD_COUNT_MAX,
        "1024 biases of three fields, 512 choices, 64 stop tokens, 16 strings, 40 others; of a stream, the largest "
        "single item",
        f"CoordinatorService/Generate,{STREAMS}.request_fields",
    ),
    Limit(
        "PART_COUNT_FREE",
        PART_COUNT_FREE,
        "of a small message, and one for each BYTES_PER_PART_MIN bytes: 1024 items that close a session pass, of 8 "
        "bytes and two parts each; the parser makes up to 90 bytes of a part, so of a message at most 20 times its "
        "size, or 50 kB",
        f"CoordinatorService/Generate,{STREAMS}.request_parts",
    ),
    Limit(
        "PACKED_BYTES_MAX",
        PACKED_BYTES_MAX,
        "262,144 token ids of four bytes, in all lists of numbers together",
        "CoordinatorService/Generate.request_packed_bytes",
        is_bytes=True,
    ),
    Limit(
        "MESSAGE_BYTES_SOFT",
        MESSAGE_BYTES_SOFT,
        "a larger message is a single item, whose fields are counted before it is parsed",
        f"{STREAMS}.items_bytes",
        is_bytes=True,
    ),
    Limit(
        "UNHANDLED_BYTES_MAX",
        UNHANDLED_BYTES_MAX,
        "of all streams, in equal shares: 128 large messages, as many as the engine takes between two steps; a stream "
        "beyond its share is not read. As values up to 18 times as much. A message counts as 4 KiB at least, so 512",
        f"{STREAMS}.unhandled_bytes",
        is_bytes=True,
    ),
    Limit(
        "UNTAKEN_ITEM_COUNT_MAX",
        UNTAKEN_ITEM_COUNT_MAX,
        "one for each session of the largest --max-num-seqs; with more that it has not taken a peer is not reading. Of "
        "answers, all streams of a replica together: one beyond its share ends",
        f"{STREAMS}.untaken_items",
    ),
    Limit(
        "--max-num-seqs",
        1 << 16,
        "each generation has a session on the target and the draft; the setting's largest value",
        "CoordinatorService/Generate.calls",
    ),
    Limit("STREAM_COUNT_MAX", STREAM_COUNT_MAX, "to one replica: a coordinator has one", f"{STREAMS}.calls"),
    Limit(
        "WATCH_COUNT_MAX",
        WATCH_COUNT_MAX,
        "of one server: gRPC's client-side health checking has one per connection",
        "Health/Watch.calls",
    ),
    Limit(
        "STREAMS_PER_CONNECTION_MAX",
        STREAMS_PER_CONNECTION_MAX,
        "of one connection: a call held open costs some 20 kB; further ones wait in their client",
        f"{HELPERS}.calls",
    ),
    Limit(
        "READER_STALL_S_MAX",
        READER_STALL_S_MAX,
        "a client that sends no request for this time after its call, or takes no message, loses the call or its "
        "health watch; reflection ends then",
        "CoordinatorService/Generate,Health/Watch,ServerReflection/ServerReflectionInfo.silence_s",
    ),
    Limit(
        "SILENCE_S_MAX",
        SILENCE_S_MAX,
        "ten pings of an idle link: a frozen coordinator is noticed earlier, by its connection; this is for one whose "
        "event loop stands still while gRPC's own threads keep the connection. A shorter stall costs its users no text",
        f"{STREAMS}.silence_s",
    ),
    Limit(
        "MESSAGES_PER_S_MAX",
        MESSAGES_PER_S_MAX,
        "a step of 0.2 ms, each with a message; one costs the event loop some 0.1 ms, so half of its time. A peer that "
        "sends more is read later",
        f"{STREAMS}.messages_per_s",
    ),
    Limit(
        "CONNECTION_COUNT_MAX",
        CONNECTION_COUNT_MAX,
        "of one port: half of the 1024 files that a process may have open by default. Further ones are closed at once",
        "Server.connections",
    ),
    Limit(
        "HANDSHAKE_S_MAX",
        HANDSHAKE_S_MAX,
        "a slow link needs 1 s; a connection that says nothing keeps no place",
        "Server.handshake_s",
    ),
    Limit(
        "CONNECTION_IDLE_S_MAX",
        CONNECTION_IDLE_S_MAX,
        "without a call; a gRPC client connects again at its next one",
        "Server.idle_s",
    ),
    Limit(
        "CALLS_PER_S_MAX",
        CALLS_PER_S_MAX,
        "of all connections, in equal shares of those that want more: a call costs the event loop some 0.3 ms, so a "
        "third of its time; more are answered later",
        "Server.calls_per_s",
    ),
    Limit(
        "WAITING_CALL_COUNT_MAX",
        WAITING_CALL_COUNT_MAX,
        "for their turn or their request: 80 MB of calls. Beyond, one of a connection that has its share is refused",
        "Server.waiting_calls",
    ),
    Limit(
        "WASTED_CALLS_PER_S_MAX",
        WASTED_CALLS_PER_S_MAX,
        "of one host: unknown methods, and calls refused, reset, expired or without a request before their turn; some "
        "3 % of the event loop. The connection of a further one is closed, unless it had none in this second",
        "Server.wasted_calls_per_s",
    ),
    Limit(
        "PINGS_PER_S_MAX",
        PINGS_PER_S_MAX,
        "twice the rate of our own keepalive; a connection that pings oftener is closed",
        "Server.pings_per_s",
    ),
    Limit(
        "METADATA_BYTES_MAX",
        METADATA_BYTES_MAX,
        "gRPC's own: a trace context has 55 bytes, an authorization header of a gateway some 2 kB",
        "Server.metadata_bytes",
        is_bytes=True,
    ),
    Limit("PROBE_COUNT_MAX", PROBE_COUNT_MAX, "of one connection: probes are one call each", "Probes.calls"),
    Limit(
        "PROBE_CONNECTION_S_MAX",
        PROBE_CONNECTION_S_MAX,
        "a call that is held open, or not read, ends with its connection",
        "Probes.connection_s",
    ),
    Limit(
        "PROBE_REQUEST_BYTES_MAX",
        PROBE_REQUEST_BYTES_MAX,
        "so much more than a valid one has that the field is named in a refusal",
        "Probes.request_bytes",
        is_bytes=True,
    ),
)
