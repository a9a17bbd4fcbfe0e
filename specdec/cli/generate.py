"""`specdec generate`: one request, its text printed as it is committed.

Only text goes to standard output, so it can be piped; statistics and errors go to standard error. On a terminal the
kinds of tokens differ in colour.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from contextlib import aclosing

from google.protobuf import json_format

from specdec.cli.options import UsageError
from specdec.cli.request import GenerateSettings, build_request
from specdec.errors import ReplicaUnavailable
from specdec.rpc.client import call_stream, open_channel
from specdec.streams import say
from specdec.terminal import print_text, printable
from specdec.v1 import coordinator_service_pb2 as coordinator_pb

METHOD = "/specdec.v1.CoordinatorService/Generate"
RESET = "\x1b[0m"
COLORS = {coordinator_pb.TOKEN_KIND_ACCEPTED: "\x1b[32m", coordinator_pb.TOKEN_KIND_RECOVERED: "\x1b[33m"}
PROPOSER_COLORS = {
    coordinator_pb.PROPOSER_DRAFT: COLORS[coordinator_pb.TOKEN_KIND_ACCEPTED],
    coordinator_pb.PROPOSER_NGRAM: "\x1b[36m",
    coordinator_pb.PROPOSER_SUFFIX: "\x1b[34m",
    coordinator_pb.PROPOSER_PREDICTION: "\x1b[35m",
    coordinator_pb.PROPOSER_HEADS: "\x1b[92m",
}
NAMES = ("draft model", "n-gram", "earlier text", "prediction", "heads")
_COLORED = ", ".join(f"{color}{name}{RESET}" for name, color in zip(NAMES, PROPOSER_COLORS.values()))
_RECOVERED = f"{COLORS[coordinator_pb.TOKEN_KIND_RECOVERED]}recovered tokens{RESET}"
LEGEND = f"accepted tokens of {_COLORED}; {_RECOVERED}, bonus tokens"


def generate(settings: GenerateSettings) -> int:
    """Runs the command; returns the exit code. Raises SpecdecError for a refused request."""
    request = build_request(settings, read_prompt(settings))
    asyncio.run(_stream(settings, request))
    return 0


def read_prompt(settings: GenerateSettings) -> str | None:
    """Returns the prompt's text, from standard input for "-"; None with --prompt-ids."""
    if (settings.prompt is None) == (not settings.prompt_ids):
        raise UsageError("give a prompt or --prompt-ids, one of the two; see specdec generate --help")
    if settings.prompt != "-":
        return settings.prompt
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = error.object[error.start]
        raise UsageError(f"standard input is not UTF-8: byte {error.start} is {wrong:#04x}") from None


async def _stream(settings: GenerateSettings, request: coordinator_pb.GenerateRequest) -> None:
    is_colored = settings.color == "always" or (
        settings.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    channel = open_channel(settings.address, settings)
    responses = call_stream(channel, METHOD, request, coordinator_pb.GenerateResponse, settings.timeout_s)
    try:
        async with aclosing(responses):
            async for response in responses:
                if settings.as_json:
                    line = json_format.MessageToJson(response, preserving_proto_field_name=True, indent=None)
                    print_text(line)
                else:
                    show(response, is_colored)
    except ReplicaUnavailable as error:
        if not str(error).startswith(("ipv4:", "ipv6:")):
            raise
        hint = "" if settings.has_tls else ", and whether it requires TLS (--ssl-certfile …)"
        raise ReplicaUnavailable(f"no connection to {error}; check --address{hint}") from error
    finally:
        await channel.close()


def show(response: coordinator_pb.GenerateResponse, is_colored: bool) -> None:
    """Prints one message as text: tokens to standard output, statistics to standard error on a terminal."""
    if response.HasField("delta"):
        print(shown(response.delta, is_colored), end="", flush=True)
    elif response.HasField("finished"):
        print(flush=True)
        if sys.stderr.isatty():
            say(summary(response.finished), is_error=True)


def shown(delta: coordinator_pb.Delta, is_colored: bool) -> str:
    """Returns the delta's text as it is printed: on a terminal and in colours without control characters, else as it
    is, for programs."""
    if is_colored:
        return colored(delta)
    return printable(delta.text) if sys.stdout.isatty() else delta.text


def colored(delta: coordinator_pb.Delta) -> str:
    """Returns the delta's text, each token's part in the token's colour."""
    proposers = list(delta.proposers) or [coordinator_pb.PROPOSER_UNSPECIFIED] * len(delta.kinds)
    parts = []
    for (piece, kind), proposer in zip(pieces_of(delta), proposers, strict=True):
        color = PROPOSER_COLORS.get(proposer) or COLORS.get(kind)
        text = printable(piece)
        parts.append(f"{color}{text}{RESET}" if color and text else text)
    return "".join(parts)


def pieces_of(delta: coordinator_pb.Delta) -> list[tuple[str, coordinator_pb.TokenKind]]:
    """Returns each token's part of the delta's text, and its kind."""
    ends = list(itertools.accumulate(delta.text_lengths, initial=0))
    return [(delta.text[start:end], kind) for kind, start, end in zip(delta.kinds, ends, ends[1:])]


def summary(finished: coordinator_pb.Finished) -> str:
    """Returns the statistics of the generation in one line."""
    statistics = finished.statistics
    count = sum(statistics.acceptance_histogram) and statistics.draft_acceptance_rate
    seconds = statistics.time.total_s
    speed = f", {finished.usage.output_tokens / seconds:.1f} tokens/s" if seconds else ""
    return (
        f"{finished.usage.output_tokens} tokens{speed}, acceptance {count:.2f}, "
        f"{statistics.mean_acceptance_length:.2f} tokens a speculating round{shares(statistics)}; "
        f"trace {finished.trace_id}"
    )


def shares(statistics: coordinator_pb.Statistics) -> str:
    """Returns accepted and verified tokens of each proposer; nothing if only the draft model proposed."""
    counts = {
        name: (getattr(statistics, f"num_{field}_accepted_tokens"), getattr(statistics, f"num_{field}_draft_tokens"))
        for name, field in (("draft", "model"), *((own, own) for own in ("ngram", "suffix", "prediction", "heads")))
    }
    used = {name: pair for name, pair in counts.items() if pair[1]}
    if not used.keys() - {"draft"}:
        return ""
    return " (" + ", ".join(f"{name} {accepted}/{offered}" for name, (accepted, offered) in used.items()) + ")"
