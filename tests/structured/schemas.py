"""JSON schemas that the proofs of structured output generate under: 40, of every kind of word that is supported.

Each has a name, whether its texts are bounded (a text of it cannot grow without end), and the schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Schema:
    """`is_bounded`: no text of it is longer than a few hundred characters."""

    name: str
    schema: Json
    is_bounded: bool = True


def record(**properties: Json) -> Json:
    """Returns an object of exactly these members."""
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def text(length_max: int, length_min: int = 0) -> Json:
    """Returns a string of bounded length."""
    return {"type": "string", "minLength": length_min, "maxLength": length_max}


def whole(low: int, high: int) -> Json:
    """Returns an integer within limits."""
    return {"type": "integer", "minimum": low, "maximum": high}


def items(entry: Json, count_max: int, count_min: int = 0) -> Json:
    """Returns an array of bounded length."""
    return {"type": "array", "items": entry, "minItems": count_min, "maxItems": count_max}


def matching(pattern: str) -> Json:
    """Returns a string of a pattern."""
    return {"type": "string", "pattern": pattern}


def formatted(name: str) -> Json:
    """Returns a string of a format."""
    return {"type": "string", "format": name}


FLAG: Json = {"type": "boolean"}
COLOR: Json = {"enum": ["red", "green", "blue", "dark red"]}
EXCLUSIVE: Json = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 100}
TREE: Json = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": whole(0, 99),
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
            },
            "required": ["value", "children"],
            "additionalProperties": False,
        }
    },
}
CHAIN: Json = {
    "$ref": "#/$defs/link",
    "$defs": {
        "link": {
            "type": "object",
            "properties": {"name": text(8), "next": {"anyOf": [{"$ref": "#/$defs/link"}, {"type": "null"}]}},
            "required": ["name", "next"],
            "additionalProperties": False,
        }
    },
}
SUM: Json = {
    "$ref": "#/$defs/sum",
    "$defs": {
        "sum": {
            "anyOf": [
                whole(0, 9),
                record(plus={"type": "array", "items": {"$ref": "#/$defs/sum"}, "minItems": 2, "maxItems": 2}),
            ]
        }
    },
}
PERSON = record(first_name=text(12, 1), last_name=text(12, 1), age=whole(0, 120))
ADDRESS = record(street=text(20), number=whole(1, 999), zip=matching("^[0-9]{5}$"))

SCHEMAS = (
    Schema("flag", record(is_good=FLAG)),
    Schema("person", PERSON),
    Schema("optional members", PERSON | {"required": ["age"]}),
    Schema("no member required", PERSON | {"required": []}),
    Schema("nested", record(person=PERSON, address=ADDRESS)),
    Schema("nested five deep", record(a=record(b=record(c=record(d=record(e=FLAG)))))),
    Schema("array of objects", record(people=items(PERSON, 3))),
    Schema("array at the top", items(whole(0, 9), 6, 2)),
    Schema("tuple", {"type": "array", "prefixItems": [text(5), whole(0, 9), FLAG], "items": False, "minItems": 3}),
    Schema("array of arrays", items(items(whole(-5, 5), 3, 1), 3, 1)),
    Schema("enum of strings", record(color=COLOR)),
    Schema("enum of kinds", record(value={"enum": [1, 2.5, "three", None, True, [4], {"five": 5}]})),
    Schema("const", record(kind={"const": "story"}, title=text(20))),
    Schema("integer limits", record(year=whole(1900, 2100), month=whole(1, 12), day=whole(1, 31))),
    Schema("integer limits exclusive", record(n={"type": "integer", "exclusiveMinimum": -7, "exclusiveMaximum": 1000})),
    Schema("negative integers", record(depth=whole(-11000, -1))),
    Schema("number limits", record(share={"type": "number", "minimum": 0, "maximum": 1}), is_bounded=False),
    Schema("number limits exclusive", record(x=EXCLUSIVE), is_bounded=False),
    Schema("multiple of", record(price={"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 995})),
    Schema("null or text", record(note={"type": ["string", "null"], "maxLength": 16})),
    Schema("any of", {"anyOf": [record(cat=text(10)), record(dog=whole(0, 9))]}),
    Schema("one of with a tag", record(shape={"oneOf": [
        record(kind={"const": "circle"}, radius=whole(1, 9)),
        record(kind={"const": "square"}, side=whole(1, 9)),
    ]})),
    Schema("all of", {"allOf": [
        {"type": "object", "properties": {"name": text(10), "size": whole(0, 99)}, "required": ["name", "size"]},
        {"type": "object", "properties": {"size": {"minimum": 10}}},
    ]}, is_bounded=False),
    Schema("string lengths", record(code=text(4, 4), word=text(9, 3))),
    Schema("pattern", record(plate=matching("^[A-Z]{2}-[0-9]{3,4}$"))),
    Schema("pattern with choices", record(when=matching("^(mon|tues|wednes|thurs|fri)day( morning| evening)?$"))),
    Schema("pattern of a version", record(version=matching("^[0-9]{1,2}\\.[0-9]{1,2}\\.[0-9]{1,2}$"))),
    Schema("format date", record(date=formatted("date"))),
    Schema("format time and date-time", record(time=formatted("time"), stamp=formatted("date-time")), is_bounded=False),
    Schema("format uuid", record(id=formatted("uuid"))),
    Schema("format email", record(email=formatted("email")), is_bounded=False),
    Schema("format ipv4", record(address=formatted("ipv4"))),
    Schema("tree", TREE, is_bounded=False),
    Schema("chain", CHAIN, is_bounded=False),
    Schema("sum", SUM, is_bounded=False),
    Schema("definitions", {"$defs": {"p": PERSON}} | record(hero={"$ref": "#/$defs/p"}, friend={"$ref": "#/$defs/p"})),
    Schema("map of numbers", {"type": "object", "additionalProperties": whole(0, 99)}, is_bounded=False),
    Schema("names with escapes", record(**{'say "hi"': FLAG, "tab\there": whole(0, 9), "größe": whole(0, 99)})),
    Schema("unbounded text", record(story={"type": "string"}), is_bounded=False),
    Schema("tool call", record(name={"enum": ["get_weather", "set_alarm"]}, arguments=record(
        city=text(16, 1), hours=items(whole(0, 23), 3, 1), unit={"enum": ["C", "F"]},
    ))),
)  # fmt: skip
