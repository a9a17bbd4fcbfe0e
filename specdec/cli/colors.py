"""Text told apart by how its tokens came to be: accepted draft tokens green, corrections yellow, bonus tokens plain."""

from __future__ import annotations

from specdec.v1 import coordinator_service_pb2 as coordinator_pb

RESET = "\x1b[0m"
COLORS = {coordinator_pb.TOKEN_KIND_ACCEPTED: "\x1b[32m", coordinator_pb.TOKEN_KIND_CORRECTION: "\x1b[33m"}
LEGEND = f"{COLORS[coordinator_pb.TOKEN_KIND_ACCEPTED]}accepted draft tokens{RESET}, \
{COLORS[coordinator_pb.TOKEN_KIND_CORRECTION]}corrections{RESET}, bonus tokens"


def colored(delta: coordinator_pb.Delta) -> str:
    """The delta's text, each token's part in the token's colour."""
    pieces, start = [], 0
    for kind, length in zip(delta.kinds, delta.text_lengths):
        piece = delta.text[start : start + length]
        color = COLORS.get(kind, "")
        pieces.append(f"{color}{piece}{RESET}" if color and piece else piece)
        start += length
    return "".join(pieces)
