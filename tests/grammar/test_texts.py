"""Grammars that are refused before or while they are compiled, and that what is compiled is what was asked for."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import pytest
from llguidance import LLTokenizer

from specdec.errors import InvalidRequest
from specdec.folders import EMBEDDED_MODELS
from specdec.grammar.compiler import Compiler
from specdec.grammar.matcher import PathMatcher, is_legal
from specdec.grammar.texts import DEPTH_MAX, depth_of
from specdec.protocol.grammar import Grammar
from specdec.protocol.limits import CHOICE_COUNT_MAX, GRAMMAR_BYTES_MAX
from specdec.protocol.request import GenerationRequest, SamplingParams
from specdec.protocol.types import Description

FILE = EMBEDDED_MODELS / "target" / "tokenizer.json"
SIZE, ENDS = 4096, (0,)
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "required": ["next"]}


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler(lambda: FILE)


@pytest.fixture(scope="module")
def accepts(compiler: Compiler) -> Callable[[Grammar, str], bool]:
    """Whether a text is whole by a grammar: each of its bytes alone is a legal token, and an end after the last."""
    tokenizer = LLTokenizer(str(FILE), eos_token=list(ENDS))
    token_of = {tokenizer.decode_bytes([token_id]): token_id for token_id in range(1, SIZE)}

    def accept(grammar: Grammar, text: str) -> bool:
        matcher = PathMatcher(compiler.compile(grammar, ENDS).result(), ENDS, SIZE)
        token_ids = [token_of[bytes([byte])] for byte in text.encode()]
        if matcher.legal_count([], token_ids) < len(token_ids):
            return False
        return is_legal(matcher.rows(token_ids).bits, 0, ENDS[0])

    return accept


def schema_of(value: Any) -> Grammar:
    return Grammar(json_schema=json.dumps(value))


YEARS = (0, 1, 4, 99, 100, 400, 999, 1000, 1600, 1900, 1996, 2000, 2023, 2024, 2100, 9999)
MOMENTS = {
    "00:00:00Z": True,
    "23:59:59.25+23:59": True,
    "24:00:00Z": False,
    "12:00:60Z": False,
    "23:59:60z": True,
    "23:59:60-00:00": True,
    "23:59:60+01:00": False,
    "12:00:00+24:00": False,
    "12:00:00": False,
    "١٢:00:00Z": False,
}


def is_date(text: str) -> bool:
    """Whether the standard library reads a date."""
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_dates_are_those_of_the_calendar(accepts: Callable[[Grammar, str], bool]) -> None:
    """Claim: a date is a day that there is, also beside a pattern of the schema's own, and in a date and time (RFC
    3339, section 5.7). Conclusive: every month from 0 to 13 and the days about their ends, of years with and without a
    leap day, beside the standard library's calendar."""
    plain = schema_of({"type": "string", "format": "date"})
    for year in YEARS:
        for month in range(14):
            for day in (0, 1, 28, 29, 30, 31, 32):
                text = f"{year:04}-{month:02}-{day:02}"
                assert accepts(plain, json.dumps(text)) == is_date(text), text
    within = Grammar(lark=f'start: "on " %json {json.dumps({"format": "date", "type": "string"})} " or later"')
    assert [accepts(within, f'on "{day}" or later') for day in ("2024-02-29", "2023-02-29")] == [True, False]
    own = schema_of({"type": ["string", "null"], "format": "date", "pattern": "^2"})
    found = [accepts(own, text) for text in ('"2024-02-29"', '"2023-02-29"', '"1996-02-29"', "null")]
    assert found == [True, False, False, True]
    stamp = schema_of({"type": "string", "format": "date-time"})
    stamps = ("2024-02-29T00:00:00Z", "2023-02-29T00:00:00Z", "2023-02-28t23:59:60Z", "2023-02-28T12:00:60Z")
    assert [accepts(stamp, json.dumps(one)) for one in stamps] == [True, False, True, False]


@pytest.mark.parametrize(("text", "is_moment"), MOMENTS.items())
def test_times_are_those_of_a_day(text: str, is_moment: bool, accepts: Callable[[Grammar, str], bool]) -> None:
    """Claim: a leap second ends a day of UTC and comes at no other time, an offset is below a day. Conclusive: each
    rule of RFC 3339, section 5.7, beside its nearest violation."""
    moment = schema_of({"type": "string", "format": "time"})
    assert accepts(moment, json.dumps(text, ensure_ascii=False)) == is_moment


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Grammar(), "grammar"),
        (lambda: Grammar(regex="a", lark='start: "a"'), "grammar"),
        (lambda: Grammar(json_object=False, regex=""), "grammar"),
        (lambda: Grammar(regex="a" * (GRAMMAR_BYTES_MAX + 1)), "grammar.regex"),
        (lambda: Grammar(json_schema="é" * (GRAMMAR_BYTES_MAX // 2 + 1)), "grammar.json_schema"),
        (lambda: Grammar(choice=("a",) * (CHOICE_COUNT_MAX + 1)), "grammar.choice"),
        (lambda: Grammar(choice=("a", "")), "grammar.choice[1]"),
        (lambda: Grammar(choice=("a" * GRAMMAR_BYTES_MAX, "b")), "grammar.choice"),
        (lambda: Grammar(regex="a", allow_whitespace=True), "grammar.allow_whitespace"),
    ],
)
def test_a_grammar_of_wrong_form_is_refused_by_field(make: Callable[[], Grammar], field: str) -> None:
    """Claim: none, several, empty ones and sizes beyond the limits are InvalidRequest naming the field, before anything
    is compiled. Conclusive: the value itself raises; one byte more than the limit is refused."""
    with pytest.raises(InvalidRequest) as caught:
        make()
    assert caught.value.field == field
    assert Grammar(regex="a" * GRAMMAR_BYTES_MAX).kind == "regex"


@pytest.mark.parametrize(
    ("grammar", "said"),
    [
        (Grammar(json_schema="{"), "JSON"),
        (Grammar(json_schema="[]"), "a JSON object"),
        (Grammar(json_schema="true"), "a JSON object"),
        (Grammar(json_schema='{"minimum": NaN}'), "NaN"),
        (Grammar(json_schema='{"a":' * DEPTH_MAX + "{}" + "}" * DEPTH_MAX), "64 levels"),
        (schema_of({"x-guidance": {"lenient": True}}), "x-guidance"),
        (schema_of({"not": {"type": "string"}}), '"not"'),
        (schema_of({"if": {}, "then": {}}), '"if"'),
        (schema_of({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema_of({"type": "array", "contains": {}}), "contains"),
        (schema_of({"properties": {"a": {"propertyNames": {"maxLength": 2}}}}), "propertyNames"),
        (schema_of({"dependentRequired": {"a": ["b"]}}), "dependentRequired"),
        (schema_of({"unevaluatedProperties": False}), "unevaluatedProperties"),
        (schema_of({"type": "string", "format": "regex"}), "regex"),
        (schema_of({"type": "string", "pattern": "(?=a)b"}), "look-ahead"),
        (schema_of({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 5}]}), "oneOf"),
        (schema_of({"type": "thing"}), "thing"),
        (schema_of({"$ref": "#/$defs/a"}), "/$defs/a"),
        (schema_of({"$ref": "http://localhost/a"}), "http://localhost/a"),
        (schema_of({"type": "integer", "minimum": 5, "maximum": 4}), "minimum"),
        (schema_of({"allOf": [{"type": "string"}, {"type": "integer"}]}), "Unsatisfiable"),
        (schema_of({"enum": []}), "Unsatisfiable"),
        (schema_of({"type": "string", "minLength": 5, "maxLength": 2}), "minLength"),
        (schema_of({"type": "object", "properties": {"a": False}, "required": ["a"]}), "finite length"),
        (schema_of({"$ref": "#"}), "finite length"),
        (schema_of({"$ref": "#/$defs/node", "$defs": {"node": NODE}}), "finite length"),
        (schema_of({"type": "array", "minItems": 1, "items": {"$ref": "#"}}), "finite length"),
        (schema_of({"anyOf": [{"$ref": "#"}, {"allOf": [{"$ref": "#"}]}]}), "finite length"),
        (schema_of({"type": "object", "minProperties": 2}), "minProperties"),
        (Grammar(regex="("), "unclosed group"),
        (Grammar(regex="a(?!b)"), "look-ahead"),
        (Grammar(lark='start: "a" b'), 'unknown name: "b"'),
        (Grammar(lark="nothing"), "grammar that can be followed"),
        (Grammar(lark='start: %json {"type":"object","minProperties":2}'), "minProperties"),
        (Grammar(lark='start: "%json {" /"/ a // "\na: %json{"$ref":"#"}'), "finite length"),
        (Grammar(lark='start: %json {"type":"integer"} | %json {"$ref":"#"}'), "finite length"),
        (Grammar(lark="start: %json " + '{"items":' * DEPTH_MAX + "{}" + "}" * DEPTH_MAX), "64 levels"),
        (Grammar(lark="start: %json " + "[" * 60_000), "64 levels"),
        (Grammar(lark='start: %json {"minimum": NaN}'), "grammar that can be followed"),
    ],
    ids=str,
)
def test_what_cannot_be_followed_is_refused_in_words(compiler: Compiler, grammar: Grammar, said: str) -> None:
    """Claim: a schema with a word that is not followed exactly, one without a solution, and text that is no grammar are
    InvalidRequest, with the field and the reason. Conclusive: for each kind of defect the sentence has its name."""
    with pytest.raises(InvalidRequest) as caught:
        compiler.compile(grammar, ENDS).result()
    assert caught.value.field == f"grammar.{grammar.kind}"
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("grammar", "whole", "others"),
    [
        (
            schema_of({"type": "object"}),
            ["{}", '{"a":1}', '{"a":{"b":[true,null]}}'],
            ["[]", '{ "a":1}', '{"a": 1}', "{"],
        ),
        (Grammar(json_object=True), ["{}", '{"a":"}"}'], ['{"a":1,}', "1", " {}"]),
        (Grammar(json_object=True, allow_whitespace=True), ['{ "a" : 1 }'], ['{"a":01}']),
        (Grammar(json_schema="{ }"), ["1", '"a"', "[1,2]"], ["a", "[1, 2]"]),
        (Grammar(regex="[a-c]+/\\d"), ["a/1", "cab/9"], ["a1", "/1", "a/1 "]),
        (Grammar(regex='a"|b\\n'), ['a"', "b\n"], ["a", "b\\n"]),
        (Grammar(choice=("yes", 'n"o', "é\n", "yes!")), ["yes", 'n"o', "é\n", "yes!"], ["no", "y", "yes!!"]),
        (Grammar(lark='start: "a" B+\nB: /[0-9]/'), ["a1", "a123"], ["a", "b1"]),
        (
            Grammar(lark='start: "%json {\\"$ref" /[\\/"]/ // %json {"$ref":"#"}'),
            ['%json {"$ref"', '%json {"$ref/'],
            ["{"],
        ),
        (Grammar(lark='%llguidance {"no_forcing": false}\nstart: "abcd"'), ["abcd"], ["abc"]),
        (schema_of({"type": "object", "minProperties": 1}), ['{"a":1}'], ["{}"]),
        (
            schema_of({"properties": {"a": {"$ref": "#/$defs/node"}}, "$defs": {"node": {**NODE, "required": []}}}),
            ['{"a":{"next":{"next":{}}}}'],
            ['{"a":{"next":1}}'],
        ),
    ],
    ids=str,
)
def test_legal_texts(
    accepts: Callable[[Grammar, str], bool], grammar: Grammar, whole: list[str], others: list[str]
) -> None:
    """Claim: each kind of grammar accepts its texts, token by token in any tokenisation, and no others; JSON is compact
    unless white space is allowed. Conclusive: texts are given byte by byte, the most unusual tokenisation, and an end
    is asked for after the last."""
    for text in whole:
        assert accepts(grammar, text), text
    for text in others:
        assert not accepts(grammar, text), text


def test_what_could_not_end_is_refused() -> None:
    """Claim: a grammar with `ignore_eos`, and with a model without end tokens, is InvalidRequest naming the field.
    Conclusive: the same request without one of the two is not refused."""
    ignoring: dict[str, Any] = {"ignore_eos": True, "min_tokens": 1}
    with pytest.raises(InvalidRequest, match="sampling.ignore_eos"):
        SamplingParams(grammar=Grammar(regex="a"), **ignoring)
    SamplingParams(**ignoring)
    request = GenerationRequest(token_ids=(1,), sampling=SamplingParams(grammar=Grammar(regex="a")))
    model = Description("digest", "fingerprint", "model", 4096, 64, (0,), "float32", "cpu", "libraries", 1)
    request.check_model((1,), model)
    with pytest.raises(InvalidRequest, match="no end token"):
        request.check_model((1,), replace(model, end_token_ids=()))


def test_depth_does_not_count_brackets_in_strings() -> None:
    """Claim: the depth is that of brackets outside strings, escaped quotes considered. Conclusive: computed by hand."""
    assert depth_of('{"a": [1, {"b": "[[[\\"[["}]}') == 3
    assert depth_of("") == 0


def test_a_process_without_grammars_does_not_hold_the_library() -> None:
    """Claim: the services' modules import neither the library nor read a tokenizer for it. Conclusive: a fresh process
    that imports all three and makes a compiler has no module of that name, and its tokenizer is not asked for."""
    code = (
        "import sys, specdec.coordinator.service, specdec.target_service.service, specdec.draft_service.service\n"
        "from specdec.grammar.jobs import MaskThreads\n"
        "MaskThreads(lambda: 1 / 0)\n"
        "assert 'llguidance' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, check=False)
    assert done.returncode == 0
