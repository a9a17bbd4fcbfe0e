"""`specdec generate`: one request, its text printed as it is committed.

Only text goes to standard output, so it can be piped; statistics and errors go to standard error. On a terminal the
kinds of tokens differ in colour.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import defaultdict
from contextlib import aclosing

from google.protobuf import json_format

from specdec.cli.options import UsageError
from specdec.cli.request import GenerateSettings, build_request, naming_address
from specdec.cli.rounds import table_of
from specdec.client.events import Event, Finished, Started, Statistics, event_of, pieces_of
from specdec.client.request import Request
from specdec.client.run import shares_of
from specdec.client.stream import Client
from specdec.protocol.report import Delta
from specdec.protocol.types import Proposer, TokenKind
from specdec.streams import say
from specdec.terminal import print_text, printable

RESET = "\x1b[0m"
COLORS = {TokenKind.ACCEPTED: "\x1b[32m", TokenKind.RECOVERED: "\x1b[33m"}
PROPOSER_COLORS = {
    Proposer.DRAFT: COLORS[TokenKind.ACCEPTED],
    Proposer.NGRAM: "\x1b[36m",
    Proposer.SUFFIX: "\x1b[34m",
    Proposer.PREDICTION: "\x1b[35m",
    Proposer.HEADS: "\x1b[92m",
    Proposer.GRAMMAR: "\x1b[96m",
}
NAMES = ("draft model", "n-gram", "earlier text", "prediction", "heads", "grammar")
_COLORED = ", ".join(f"{color}{name}{RESET}" for name, color in zip(NAMES, PROPOSER_COLORS.values()))
_RECOVERED = f"{COLORS[TokenKind.RECOVERED]}recovered tokens{RESET}"
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


async def _stream(settings: GenerateSettings, request: Request) -> None:
    is_colored = settings.color == "always" or (
        settings.color == "auto" and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    )
    printer = Printer(max(1, request.sampling.n), is_colored, settings.rounds)
    async with Client(settings.address, settings, settings.resume_s) as client:
        responses = client.messages(request, settings.timeout_s)
        try:
            with naming_address(settings):
                async with aclosing(responses):
                    async for response in responses:
                        if settings.as_json:
                            line = json_format.MessageToJson(response, preserving_proto_field_name=True, indent=None)
                            print_text(line)
                            continue
                        printer.take(response.choice, event_of(response))
        finally:
            printer.end()


class Printer:
    """Prints the choices of a request one after another, each below its number and seed; a single one has no heading.

    The first that has not ended is printed as it comes, the others wait for it.
    """

    def __init__(self, count: int, is_colored: bool, has_rounds: bool) -> None:
        self._waiting: defaultdict[int, list[Event]] = defaultdict(list)
        self._rounds: defaultdict[int, list[Delta]] = defaultdict(list)
        self._current, self._count = 0, count
        self._is_colored, self._has_rounds = is_colored, has_rounds

    def take(self, choice: int, event: Event) -> None:
        """Prints an event, or keeps it until the choices before its own have ended."""
        self._waiting[choice].append(event)
        while events := self._waiting.pop(self._current, None):
            for own in events:
                self._show(own)
            if not isinstance(events[-1], Finished):
                break
            self._current += 1

    def end(self) -> None:
        """Prints what waits for choices that did not end, and the rounds."""
        for choice, events in sorted(self._waiting.items()):
            self._current = choice
            for event in events:
                self._show(event)
        for choice, deltas in sorted(self._rounds.items()):
            if self._count > 1:
                say(f"choice {choice}", is_error=True)
            say(table_of(deltas), is_error=True)

    def _show(self, event: Event) -> None:
        if isinstance(event, Started) and self._count > 1:
            above = "\n" if self._current else ""
            print_text(f"{above}--- choice {self._current}, seed {event.seed} ---")
        show(event, self._is_colored)
        if self._has_rounds and isinstance(event, Delta):
            self._rounds[self._current].append(event)


def show(event: Event, is_colored: bool) -> None:
    """Prints an event as text: tokens to standard output, statistics to standard error on a terminal."""
    if isinstance(event, Delta):
        print(shown(event, is_colored), end="", flush=True)
    elif isinstance(event, Finished):
        print(flush=True)
        if sys.stderr.isatty():
            say(summary(event), is_error=True)


def shown(delta: Delta, is_colored: bool) -> str:
    """Returns the delta's text as it is printed: on a terminal and in colours without control characters, else as it
    is, for programs."""
    if is_colored:
        return colored(delta)
    return printable(delta.text) if sys.stdout.isatty() else delta.text


def colored(delta: Delta) -> str:
    """Returns the delta's text, each token's part in the token's colour."""
    parts = []
    for piece, kind, proposer in zip(pieces_of(delta), delta.kinds, delta.proposers, strict=True):
        color = PROPOSER_COLORS.get(proposer) or COLORS.get(kind)
        text = printable(piece)
        parts.append(f"{color}{text}{RESET}" if color and text else text)
    return "".join(parts)


def summary(finished: Finished) -> str:
    """Returns the statistics of the generation in one line."""
    statistics = finished.statistics
    count = sum(statistics.acceptance_histogram) and statistics.draft_acceptance_rate
    seconds = statistics.time.total_s
    speed = f", {finished.output_tokens / seconds:.1f} tokens/s" if seconds else ""
    return (
        f"{finished.output_tokens} tokens{speed}, acceptance {count:.2f}, "
        f"{statistics.mean_acceptance_length:.2f} tokens a speculating round{shares(statistics)}; "
        f"trace {finished.trace_id}"
    )


def shares(statistics: Statistics) -> str:
    """Returns accepted and verified tokens of each proposer; nothing if only the draft model proposed."""
    used = shares_of(statistics)
    if not used.keys() - {"draft"}:
        return ""
    return " (" + ", ".join(f"{name} {accepted}/{offered}" for name, (accepted, offered) in used.items()) + ")"
