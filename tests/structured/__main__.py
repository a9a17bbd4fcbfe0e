"""`python -m tests.structured`: texts under 40 JSON schemas, temperature 1, speculation on, through running services.

Every text that ended with a stop must be valid by `jsonschema`. Every other one must be the beginning of a valid one: a
matcher of the schema goes on from its tokens, closing what is open, and the whole is validated too. Of bounded schemas
at least 95 % must end with a stop. Half of the texts are drawn by REJECTION, half by COUPLED; every second one of these
is generated again without speculation, and must be the same.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from llguidance import LLMatcher, LLTokenizer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bars import Bar, add_check_flag, conclude
from specdec.v1 import coordinator_service_pb2 as pb
from tests.structured.schemas import SCHEMAS, Schema
from tests.support.harness import heldout_prompts
from tests.support.services import MODELS, Client, Outcome, running

CLOSERS = (
    '"',
    "@",
    "}",
    "]",
    ":",
    ",",
    "Z",
    "1",
    "0",
    "a",
)  # what a text is completed with if it may be, in this order
COMPLETION_TOKENS_MAX = 1000
BOUNDED_SHARE_MIN = 0.95
FORMATS = Draft202012Validator.FORMAT_CHECKER  # of date, uuid, email, ipv4; the two below are RFC 3339's
TIME = re.compile(r"([01]\d|2[0-3]):[0-5]\d:([0-5]\d|60)(\.\d+)?([zZ]|[+-]([01]\d|2[0-3]):[0-5]\d)", re.ASCII)
UTC = ("Z", "z", "+00:00", "-00:00")


@FORMATS.checks("time")
def is_time(value: object) -> bool:
    """Whether a value is a time, or no string."""
    if not isinstance(value, str):
        return True
    found = TIME.fullmatch(value)
    is_leap = found is not None and found[2] == "60"
    return found is not None and (not is_leap or (value.startswith("23:59") and found[4] in UTC))


@FORMATS.checks("date-time", raises=ValueError)
def is_date_time(value: object) -> bool:
    """Whether a value is a date and a time, or no string."""
    if not isinstance(value, str):
        return True
    date.fromisoformat(value[:10])
    return value[10:11] in ("t", "T", " ") and is_time(value[11:])


@dataclass
class Count:
    """What came of a schema's texts."""

    texts: int = 0
    stopped: int = 0
    invalid: list[str] = field(default_factory=list)
    differing: int = 0
    tokens: Counter[str] = field(default_factory=Counter)


class Judge:
    """Says what is wrong with a text."""

    def __init__(self, tokenizer: Path) -> None:
        self._tokenizer = LLTokenizer(str(tokenizer))
        self._closers = [self._tokenizer.tokenize_str(text)[0] for text in CLOSERS]

    def token_ids(self, text: str) -> list[int]:
        """Returns the tokens of a text."""
        return list(self._tokenizer.tokenize_str(text))

    def wrong(self, own: Schema, outcome: Outcome) -> str:
        """Returns the reason why a text is not valid, or no beginning of a valid one; empty if it is."""
        text = outcome.text
        if outcome.finished.reason != pb.FINISH_REASON_STOP:
            text = self._completed(own, outcome.token_ids)
        try:
            validator = Draft202012Validator(own.schema, format_checker=FORMATS)
            validator.validate(json.loads(text))
        except (ValueError, ValidationError) as error:
            return f"{outcome.text!r} ({text!r}): {str(error).splitlines()[0]}"
        return ""

    def _completed(self, own: Schema, token_ids: Sequence[int]) -> str:
        """Returns the text of these tokens and of legal ones after them, up to a valid end."""
        compact = own.schema | {"x-guidance": {"whitespace_flexible": False}}
        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_json_schema(json.dumps(compact)))
        path = list(token_ids)
        if not matcher.consume_tokens(path):
            return f"illegal: {matcher.get_error()}"
        for _ in range(COMPLETION_TOKENS_MAX):
            if matcher.is_accepting():
                return str(self._tokenizer.decode_str(path))
            bits = matcher.compute_bitmask()
            legal = [at for at in self._closers if bits[at // 8] >> at % 8 & 1] or list(legal_ids(bits))
            path.append(legal[0])
            matcher.consume_token(path[-1])
        return "no end found"


def legal_ids(bits: bytes) -> Iterator[int]:
    """The tokens whose bit is set."""
    for at, byte in enumerate(bits):
        for bit in range(8):
            if byte >> bit & 1:
                yield 8 * at + bit


def generated(client: Client, number: int, prompt: str, tokens_max: int) -> tuple[Outcome, Outcome | None]:
    """The `number`-th text, and for COUPLED the same without speculation, every second time."""
    own = SCHEMAS[number % len(SCHEMAS)]
    asked: dict[str, Any] = {
        "prompt": prompt,
        "grammar": {"json_schema": json.dumps(own.schema)},
        "temperature": 1.0,
        "max_tokens": tokens_max,
        "timeout_s": 600.0,
    }
    turn = number // len(SCHEMAS)
    if turn % 2:
        return client.generate(**asked, speculative={"rule": "RULE_REJECTION"}), None
    asked["seed"] = number
    plain = client.generate(**asked, speculative={"enabled": False}) if turn % 4 == 0 else None
    return client.generate(**asked), plain


def add(count: Count, wrong: str, outcome: Outcome, plain: Outcome | None) -> None:
    """Counts a text."""
    count.texts += 1
    count.stopped += outcome.finished.reason == pb.FINISH_REASON_STOP
    count.invalid += [wrong] if wrong else []
    count.differing += plain is not None and plain.comparable != outcome.comparable
    statistics = outcome.finished.statistics
    count.tokens["tokens"] += len(outcome.token_ids)
    count.tokens["rounds"] += statistics.rounds
    for proposer in outcome.proposers:
        count.tokens[f"proposer {proposer}"] += 1


def options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.structured", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--texts", type=int, default=9000, help="of all schemas together (%(default)s)")
    parser.add_argument("--streams", type=int, default=16, help="texts at a time (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=400, help="of a text (%(default)s)")
    parser.add_argument("--model", type=Path, default=MODELS / "target", help="folder of the target (%(default)s)")
    parser.add_argument("--draft-model", type=Path, default=MODELS / "draft", help="(%(default)s)")
    parser.add_argument("--dtype", default="auto", help="of both (%(default)s)")
    add_check_flag(parser)
    return parser.parse_args(arguments)


def table_of(counts: dict[str, Count]) -> Table:
    """A line per schema."""
    table = Table(title="texts under schemas", title_justify="left")
    for name in ("schema", "texts", "with a stop", "invalid", "differ from off", "tokens", "tokens/round"):
        table.add_column(name, justify="left" if name == "schema" else "right")
    for name, own in counts.items():
        rate = own.tokens["tokens"] / max(1, own.tokens["rounds"])
        values = own.texts, own.stopped, len(own.invalid), own.differing, own.tokens["tokens"], f"{rate:.2f}"
        table.add_row(name, *map(str, values))
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    asked = options(arguments)
    console = Console(width=130)
    judge = Judge(asked.model / "tokenizer.json")
    prompts = list(heldout_prompts().values())
    counts = {own.name: Count() for own in SCHEMAS}
    with (
        running(asked.model, asked.draft_model, dtype=asked.dtype, threads=1) as services,
        ThreadPoolExecutor(asked.streams) as pool,
    ):
        texts = pool.map(
            lambda number: generated(services.client, number, prompts[number % len(prompts)], asked.max_tokens),
            range(asked.texts),
        )
        for number, (outcome, plain) in enumerate(
            track(texts, total=asked.texts, console=Console(stderr=True), description="texts")
        ):
            own = SCHEMAS[number % len(SCHEMAS)]
            add(counts[own.name], judge.wrong(own, outcome), outcome, plain)
    console.print(table_of(counts))
    for count in counts.values():
        for wrong in count.invalid[:3]:
            console.print(wrong, markup=False, style="red")
    return conclude(bars_of(counts), console, asked.check)


def bars_of(counts: dict[str, Count]) -> list[Bar]:
    """Nothing invalid, nothing else without speculation, and texts of bounded schemas end."""
    bounded = [counts[own.name] for own in SCHEMAS if own.is_bounded and counts[own.name].texts]
    share = sum(one.stopped for one in bounded) / max(1, sum(one.texts for one in bounded))
    return [
        Bar("invalid texts", 0, float(sum(len(one.invalid) for one in counts.values())), is_limit=True),
        Bar(
            "texts that differ without speculation",
            0,
            float(sum(one.differing for one in counts.values())),
            is_limit=True,
        ),
        Bar("share of bounded schemas' texts with a stop", BOUNDED_SHARE_MIN, share),
    ]


if __name__ == "__main__":
    sys.exit(main())
