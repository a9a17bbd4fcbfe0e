"""A grammar of a request as the Lark text that the library compiles.

All kinds become one: then one option holds for all, that every tokenisation of a legal text is legal. Without it the
library allows one token where only one text may follow, the one that its tokenizer would choose.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from specdec.errors import InvalidRequest
from specdec.grammar.schemas import check_schema, name_days
from specdec.protocol.grammar import Grammar

DEPTH_MAX = 64  # of a JSON schema: the library's own recursion ends at twice that
EVERY_TOKENISATION = '\n%llguidance {"no_forcing": true}\n'  # the last of its kind counts
OPTIONS_KEY = "x-guidance"
# What stands in Lark: text in quotes, expressions, comments, and what begins a schema.
LARK_PARTS = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|#[^\n]*|%json\b\s*')


def lark_text(grammar: Grammar) -> str:
    """Returns the text. Raises InvalidRequest for a JSON schema, also one in Lark, that is too deep, has a word that is
    not followed exactly, or no solution of finite length; outside Lark for one that is no JSON object."""
    if grammar.json_schema:
        return _json(_checked(grammar.json_schema), grammar.allow_whitespace)
    if grammar.json_object:
        return _json('{"type":"object"}', grammar.allow_whitespace)
    if grammar.regex:
        from llguidance import regex_to_lark

        return f"start: /{regex_to_lark(grammar.regex, use_ascii='')}/{EVERY_TOKENISATION}"
    if grammar.choice:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in grammar.choice)
        return f"start: CHOICE\nCHOICE: {texts}{EVERY_TOKENISATION}"
    return _lark(grammar.lark) + EVERY_TOKENISATION


def options(allow_whitespace: bool = False) -> dict[str, Any]:
    """Returns the entry of a JSON schema with the library's options: every word is followed, or refused."""
    own = {
        "whitespace_flexible": allow_whitespace,
        "item_separator": ",",
        "key_separator": ":",
        "lenient": False,
        "coerce_one_of": False,
    }
    return {OPTIONS_KEY: own}


def schemas_in(lark: str) -> Iterator[tuple[int, int, dict[str, Any]]]:
    """Yields the JSON schemas that stand in a Lark text, with where they begin and end. Raises InvalidRequest for one
    that is too deep."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    at = 0
    while (part := LARK_PARTS.search(lark, at)) is not None:
        at = part.end()
        if not part[0].startswith("%json"):
            continue
        try:
            schema, end = decoder.raw_decode(lark, at)
        except RecursionError:
            raise too_deep("grammar.lark", "very deep") from None
        except ValueError:  # the library says what is wrong with it
            continue
        _check_depth("grammar.lark", lark[at:end])
        if isinstance(schema, dict):
            yield at, end, schema
        at = end


def _lark(text: str) -> str:
    """A Lark text as it is, but for dates and times in the JSON schemas in it. Raises InvalidRequest."""
    parts, at = [], 0
    for start, end, schema in schemas_in(text):
        check_schema(schema, "grammar.lark")
        if name_days(schema):
            parts += [text[at:start], json.dumps(schema)]
            at = end
    return "".join((*parts, text[at:]))


def _json(schema: str, allow_whitespace: bool) -> str:
    """The text of a JSON schema, which is an object as text, with the library's options as its first entry."""
    rest = schema.strip()[1:].lstrip()
    comma = "" if rest.startswith("}") else ","
    return f"start: %json {json.dumps(options(allow_whitespace))[:-1]}{comma}{rest}{EVERY_TOKENISATION}"


def _checked(text: str) -> str:
    """A JSON schema as it is, but for dates and times; raises InvalidRequest."""
    _check_depth("grammar.json_schema", text)
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except ValueError as error:
        raise InvalidRequest("grammar.json_schema", text, f"JSON: {error}") from None
    if not isinstance(schema, dict):
        raise InvalidRequest("grammar.json_schema", text, "a JSON object")
    if OPTIONS_KEY in schema:
        raise InvalidRequest("grammar.json_schema", OPTIONS_KEY, "a schema without this word, the library's own")
    check_schema(schema, "grammar.json_schema")
    return json.dumps(schema) if name_days(schema) else text


def _check_depth(field: str, text: str) -> None:
    if (depth := depth_of(text)) > DEPTH_MAX:
        raise too_deep(field, f"{depth} levels deep")


def too_deep(field: str, found: str) -> InvalidRequest:
    """The error of a schema with too many levels."""
    return InvalidRequest(field, found, f"at most {DEPTH_MAX} levels deep")


def _no_constant(word: str) -> Any:
    raise ValueError(f"{word} is not JSON")


def depth_of(text: str) -> int:
    """Returns the most brackets that are open at once in a text of JSON; those in strings do not count."""
    depth = most = 0
    is_string = is_escaped = False
    for letter in text:
        if is_string:
            is_string = is_escaped or letter != '"'
            is_escaped = letter == "\\" and not is_escaped
        elif letter == '"':
            is_string = True
        elif letter in "{[":
            depth += 1
            most = max(most, depth)
        elif letter in "}]":
            depth -= 1
    return most
