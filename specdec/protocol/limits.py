"""The limits that several fields of the wire have, or the code needs by their names, and the checks of values.

A field names its limit in its proto file, where a limit of that field alone stands too (field.proto;
`specdec.rpc.limits` reads both). A repeated field has two limits: of its entries (`limit`), and of each entry (`each`);
so have numbers packed in bytes. Strings are counted in characters, or in bytes (`is_bytes`). Sizes of what a peer sends
are checked before it is read.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sized
from dataclasses import dataclass

from specdec.errors import InvalidRequest
from specdec.protocol.heads import HEAD_CANDIDATES, HEAD_PASSES_MAX, HEADS_MAX

UINT32_MAX = (1 << 32) - 1
UINT64_MAX = SEED_MAX = (1 << 64) - 1
TOKENS_MAX = 1 << 24
EXTEND_TOKEN_COUNT_MAX = 2048
DELTA_TOKEN_COUNT_MAX = PROMPT_LOGPROBS_COUNT_MAX = 1024
STOP_STRING_BYTES_MAX = 256
PARAMS_STOP_TOKEN_COUNT_MAX = 128
BAD_WORD_BYTES_MAX = 256
BAD_WORD_TOKEN_COUNT_MAX = 32
PARAMS_BAD_WORD_COUNT_MAX = 128
PARAMS_BAD_WORD_TOKEN_COUNT_MAX = BAD_WORD_TOKEN_COUNT_MAX * PARAMS_BAD_WORD_COUNT_MAX
LOGPROBS_MAX = 20
GRAMMAR_BYTES_MAX, CHOICE_COUNT_MAX = 64 << 10, 512
REPLICA_COUNT_MAX = 1024
LABEL_LENGTH_MAX = PROMPT_CACHE_KEY_LENGTH_MAX = CACHE_SALT_LENGTH_MAX = 128
INSTANCE_LENGTH_MAX = 64
DIGEST_LENGTH_MAX = 128
NAME_LENGTH_MAX = FAILURE_TEXT_LENGTH_MAX = 4096
FAILURE_WORD_LENGTH_MAX = 256
DRAFT_LENGTH_LIMIT = 64
DRAFT_PROBS_TOKEN_COUNT_MAX = 1024
NODES_PER_STEP_LIMIT = 64
SIBLINGS_MAX = 3
NODES_PER_ITEM_MAX = (2 + SIBLINGS_MAX) * NODES_PER_STEP_LIMIT
CONFIDENCE_MAX = 17
STEP_TIME_COUNT_MAX = 16
ITEM_COUNT_MAX = 1024
ROUND_POSITIONS_MAX = DRAFT_LENGTH_LIMIT + 1
CANDIDATES_MAX = HEADS_MAX * HEAD_CANDIDATES
REPORTED = "reported or compared; no memory depends on it"


@dataclass(frozen=True, slots=True)
class Limit:
    """The range [low, high] of numbers or sizes, its name, and the reason for it. `fields`: of methods, what of them
    has it, in groups: `A,B.x,y` are x and y of A and B."""

    name: str
    high: float
    reason: str
    fields: str = ""
    low: float = 0
    is_bytes: bool = False

    def field_names(self) -> Iterator[str]:
        """Yields `Service/Method.what` for each of `fields`."""
        for group in self.fields.split():
            messages, _, names = group.partition(".")
            yield from (f"{message}.{name}" for message in messages.split(",") for name in names.split(","))


_NAMED = (
    Limit(
        "TOKENS_MAX",
        TOKENS_MAX,
        "no model has more positions or token ids; those of the served model are checked once it is known",
    ),
    Limit(
        "EXTEND_TOKEN_COUNT_MAX",
        EXTEND_TOKEN_COUNT_MAX,
        "a longer item would keep those of other sessions waiting",
        low=1,
    ),
    Limit(
        "DELTA_TOKEN_COUNT_MAX",
        DELTA_TOKEN_COUNT_MAX,
        "with log-probabilities, text and rounds a message stays below a client's own limit of 4 MiB",
        low=1,
    ),
    Limit(
        "PROMPT_LOGPROBS_COUNT_MAX",
        PROMPT_LOGPROBS_COUNT_MAX,
        "with the likeliest tokens 230 kB: a message stays below the limits of a stream and of a client",
        low=1,
    ),
    Limit(
        "likeliest tokens of a prompt's part",
        LOGPROBS_MAX * PROMPT_LOGPROBS_COUNT_MAX,
        "LOGPROBS_MAX for each position",
    ),
    Limit("probability", 1, "a probability"),
    Limit("SEED_MAX", SEED_MAX, "64 bits"),
    Limit("STOP_STRING_BYTES_MAX", STOP_STRING_BYTES_MAX, "as much text is held back", low=1, is_bytes=True),
    Limit(
        "PARAMS_STOP_TOKEN_COUNT_MAX",
        PARAMS_STOP_TOKEN_COUNT_MAX,
        "the stop tokens of a request and the end tokens of its model together",
    ),
    Limit("BAD_WORD_BYTES_MAX", BAD_WORD_BYTES_MAX, "a phrase", low=1, is_bytes=True),
    Limit(
        "BAD_WORD_TOKEN_COUNT_MAX",
        BAD_WORD_TOKEN_COUNT_MAX,
        "as many tokens before a position are compared",
        low=1,
    ),
    Limit("PARAMS_BAD_WORD_TOKEN_COUNT_MAX", PARAMS_BAD_WORD_TOKEN_COUNT_MAX, "as many words of as many tokens"),
    Limit("PARAMS_BAD_WORD_COUNT_MAX", PARAMS_BAD_WORD_COUNT_MAX, "each word with and without a space before"),
    Limit("LOGPROBS_MAX", LOGPROBS_MAX, "as many are sorted out and sent for every position"),
    Limit(
        "GRAMMAR_BYTES_MAX",
        GRAMMAR_BYTES_MAX,
        "it is compiled in a second at most, and travels in one item",
        low=1,
        is_bytes=True,
    ),
    Limit(
        "CHOICE_COUNT_MAX",
        CHOICE_COUNT_MAX,
        "beside 1024 biases a request may have as many fields; more texts are a regular expression",
        low=1,
    ),
    Limit("log-probability", 0, "a logarithm of a probability", low=-math.inf),
    Limit("REPLICA_COUNT_MAX", REPLICA_COUNT_MAX, "of a pool: each has a connection with pings"),
    Limit("LABEL_LENGTH_MAX", LABEL_LENGTH_MAX, "every log line contains it"),
    Limit("PROMPT_CACHE_KEY_LENGTH_MAX", PROMPT_CACHE_KEY_LENGTH_MAX, "enough for a random name; it is digested"),
    Limit("INSTANCE_LENGTH_MAX", INSTANCE_LENGTH_MAX, "a random number in hexadecimal"),
    Limit("CACHE_SALT_LENGTH_MAX", CACHE_SALT_LENGTH_MAX, "enough for a random salt; it is digested with the blocks"),
    Limit(
        "UINT32_MAX",
        UINT32_MAX,
        "sessions, incarnations, rounds, epochs, nodes and stamps are numbered from 0 or 1, for the life of a stream",
    ),
    Limit("trace id", 16, "W3C trace context", is_bytes=True),
    Limit("span id", 8, "W3C trace context", is_bytes=True),
    Limit("hexadecimal id", 32, "16 bytes in hexadecimal digits"),
    Limit("DIGEST_LENGTH_MAX", DIGEST_LENGTH_MAX, "twice the hexadecimal digits of SHA-256"),
    Limit("NAME_LENGTH_MAX", NAME_LENGTH_MAX, "the name of a model may be the path of its folder"),
    Limit(
        "FAILURE_WORD_LENGTH_MAX",
        FAILURE_WORD_LENGTH_MAX,
        "a word for programs, or the path of a field; a longer one is cut",
    ),
    Limit(
        "FAILURE_TEXT_LENGTH_MAX", FAILURE_TEXT_LENGTH_MAX, "a sentence for people; a longer one of a replica is cut"
    ),
    Limit(
        "DRAFT_LENGTH_LIMIT",
        DRAFT_LENGTH_LIMIT,
        "draft tokens of a round, and positions of a draft tree: deeper ones are hardly ever committed",
    ),
    Limit("positions of a round", ROUND_POSITIONS_MAX, "its draft tokens, and the recovered or bonus token"),
    Limit("target probabilities", 8 * DRAFT_LENGTH_LIMIT, "a float64 for each draft token", is_bytes=True),
    Limit("target probability", 1, "packed float64s, which hold any number"),
    Limit("candidates of heads", CANDIDATES_MAX, "HEAD_CANDIDATES of each head"),
    Limit("their confidences", CANDIDATES_MAX, "a byte for each candidate", is_bytes=True),
    Limit("log-probabilities of a round", 4 * ROUND_POSITIONS_MAX, "a float32 for each position", is_bytes=True),
    Limit("likeliest tokens of a round", LOGPROBS_MAX * ROUND_POSITIONS_MAX, "LOGPROBS_MAX for each position"),
    Limit(
        "their log-probabilities",
        4 * LOGPROBS_MAX * ROUND_POSITIONS_MAX,
        "a float32 for each of the likeliest tokens",
        is_bytes=True,
    ),
    Limit(
        "DRAFT_PROBS_TOKEN_COUNT_MAX",
        DRAFT_PROBS_TOKEN_COUNT_MAX,
        "the draft draws from its likeliest tokens only; the codes are bytes",
        low=1,
        is_bytes=True,
    ),
    Limit("NODES_PER_STEP_LIMIT", NODES_PER_STEP_LIMIT, "the likeliest 8 contain nearly all committed ones"),
    Limit(
        "NODES_PER_ITEM_MAX",
        NODES_PER_ITEM_MAX,
        "each evaluated node sends its children and, once, itself; further nodes count as malformed",
    ),
    Limit("SIBLINGS_MAX", SIBLINGS_MAX, "a further one would be right once in thirty misses"),
    Limit("CONFIDENCE_MAX", CONFIDENCE_MAX, "the bins of a confidence"),
    Limit("HEADS_MAX", HEADS_MAX, "later positions are hardly ever right"),
    Limit("HEAD_PASSES_MAX", HEAD_PASSES_MAX, "of a feature head: each keeps all sessions of the step waiting"),
    Limit("STEP_TIME_COUNT_MAX", STEP_TIME_COUNT_MAX, "rows grow by factors"),
    Limit("32 bits", UINT32_MAX, REPORTED),
    Limit("64 bits", UINT64_MAX, REPORTED),
    Limit("a share", 1.0, "of all"),
    Limit("float64", math.inf, "reported to the client only"),
    Limit("ITEM_COUNT_MAX", ITEM_COUNT_MAX, "10 ms of reading, and several items for each of the usual 64 sessions"),
    Limit(
        "message size",
        UINT32_MAX,
        "the size of a message is limited by the connection, before it is parsed (specdec.rpc.limits)",
    ),
)
LIMITS = {limit.name: limit for limit in _NAMED}


def check_integer(field: str, value: object, low: int, high: int) -> None:
    """Raises InvalidRequest unless `value` is an integer in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequest(field, value, f"an integer from {low} to {high}")


def check_number(
    field: str, value: object, low: float, high: float, *, is_above_low: bool = False, is_zero_allowed: bool = False
) -> None:
    """Raises InvalidRequest unless `value` is a finite number in [low, high]; `is_above_low`: and not `low`;
    `is_zero_allowed`: or 0."""
    if is_zero_allowed and value == 0:
        return
    is_number = not isinstance(value, bool)
    if not (is_number and isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(field, value, f"{'0 or ' * is_zero_allowed}a number from {low:g} to {high:g}")
    if is_above_low and value == low:
        raise InvalidRequest(field, value, f"above {low:g} and at most {high:g}")


def check_count(field: str, entries: Sized, high: int, unit: str) -> None:
    """Raises InvalidRequest for more than `high` entries; `unit` is what they are, in the plural."""
    if len(entries) > high:
        raise InvalidRequest(field, len(entries), f"at most {high} {unit}")


def check_texts(field: str, texts: tuple[str, ...], bytes_max: int) -> None:
    """Raises InvalidRequest naming the first text that is empty or has more bytes of UTF-8."""
    for index, text in enumerate(texts):
        size = len(text.encode("utf-8", "surrogatepass"))
        if not 1 <= size <= bytes_max:
            raise InvalidRequest(f"{field}[{index}]", f"{size} bytes", f"1 to {bytes_max} bytes")


def check_salt(salt: str) -> None:
    """Raises InvalidRequest for a cache salt that is too long; the message does not contain it."""
    if len(salt) > CACHE_SALT_LENGTH_MAX:
        raise InvalidRequest("cache_salt", f"{len(salt)} characters", f"at most {CACHE_SALT_LENGTH_MAX} characters")


def check_token_ids(field: str, token_ids: tuple[int, ...], vocabulary_size: int) -> None:
    """Raises InvalidRequest naming the first id outside [0, vocabulary_size)."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocabulary_size:
        index, bad = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocabulary_size)
        raise InvalidRequest(f"{field}[{index}]", bad, f"a token id from 0 to {vocabulary_size - 1}")


def check_ascending(field: str, token_ids: tuple[int, ...]) -> None:
    """Raises InvalidRequest unless ids are strictly ascending."""
    later = token_ids[1:]
    if any(map(operator.ge, token_ids, later)):
        before, after = next((a, b) for a, b in zip(token_ids, later) if a >= b)
        raise InvalidRequest(field, after, f"above the id before it, {before} (ascending, none twice)")
