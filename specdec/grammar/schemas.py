"""What the library does not see of a JSON schema: that it has no solution of finite length, or one that it may miss,
and which dates and times there are.

The library refuses the words that it does not follow, and schemas that contradict themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

from specdec.errors import InvalidRequest

NAMED_PARTS = ("properties", "patternProperties", "$defs", "definitions")
LISTED_PARTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
SINGLE_PARTS = ("items", "additionalProperties")
YEAR = r"(?:000[1-9]|00[1-9][0-9]|0[1-9][0-9][0-9]|[1-9][0-9]{3})"  # from 1 on, as readers of dates have it
LEAP_YEAR = r"(?:[0-9][0-9](?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
LONG_MONTH, SHORT_MONTH = "(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])", "(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
DAY = f"(?:{LONG_MONTH}|{SHORT_MONTH}|02-(?:0[1-9]|1[0-9]|2[0-8]))"
DATE = f"(?:{YEAR}-{DAY}|{LEAP_YEAR}-02-29)"
HOUR = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
TIME = rf"(?:{HOUR}:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+-]{HOUR})|23:59:60(?:\.[0-9]+)?(?:[Zz]|[+-]00:00))"
PATTERNS = {"date": f"^{DATE}$", "time": f"^{TIME}$", "date-time": f"^{DATE}[Tt]{TIME}$"}  # RFC 3339, section 5.6, 5.7
NESTED = ("array", "object")  # types whose values have parts; others have a value of finite length


def check_schema(schema: dict[str, Any], field: str) -> None:
    """Raises InvalidRequest for a schema without a solution of finite length, and for `minProperties` that repeated
    names could seem to reach. Whether its words make sense is left to the library. `field`: that it came in."""
    targets: dict[str, Any] = {}
    for part in parts_of(schema):
        _check_count(part, field)
        ref = part.get("$ref")
        if isinstance(ref, str) and ref not in targets:
            targets[ref] = _target(schema, ref)
    finite = {ref for ref, target in targets.items() if target is None}  # the library knows what these are
    while more := {ref for ref, target in targets.items() if ref not in finite and _is_finite(target, finite)}:
        finite |= more
    if not _is_finite(schema, finite):
        endless = next((ref for ref in targets if ref not in finite), "#")
        raise InvalidRequest(field, endless, "a schema with a solution of finite length")


def name_days(schema: dict[str, Any]) -> bool:
    """Adds to each part with a date or a time the pattern of those that there are: the library has a 29th of February
    in every year, a year 0 and a leap second in every minute. Returns whether there was such a part."""
    dated = [part for part in parts_of(schema) if part.get("format") in PATTERNS]
    for part in dated:
        pattern = PATTERNS[part["format"]]
        if "pattern" not in part:
            part["pattern"] = pattern
        elif isinstance(every := part.setdefault("allOf", []), list):
            every.append({"pattern": pattern})
    return bool(dated)


def parts_of(schema: Any) -> Iterator[dict[str, Any]]:
    """Yields a schema and those inside it."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, dict):
            continue
        yield part
        for word in NAMED_PARTS:
            named = part.get(word)
            waiting += named.values() if isinstance(named, dict) else ()
        for word in LISTED_PARTS:
            listed = part.get(word)
            waiting += listed if isinstance(listed, list) else ()
        waiting += [part[word] for word in SINGLE_PARTS if word in part]


def _check_count(part: dict[str, Any], field: str) -> None:
    """An object may repeat names that are not its own, and a reader counts them once."""
    least, required = part.get("minProperties"), part.get("required")
    may_repeat = part.get("additionalProperties") is not False or bool(part.get("patternProperties"))
    sure_count = max(1, len(required) if isinstance(required, list) else 0)
    if may_repeat and isinstance(least, (int, float)) and least > sure_count:
        limit = f"at most {sure_count}, 1 or the number of required names, where others than `properties` are allowed"
        raise InvalidRequest(field, f"minProperties {least}", limit)


def _target(schema: dict[str, Any], ref: str) -> Any:
    """The part that a reference within the schema names; None for another, and for one without a target."""
    if not ref.startswith("#"):
        return None
    found: Any = schema
    for step in unquote(ref[1:]).split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and step.isdecimal() and int(step) < len(found):
            found = found[int(step)]
        elif isinstance(found, dict) and step in found:
            found = found[step]
        else:
            return None
    return found


def _is_finite(schema: Any, finite: set[str]) -> bool:
    """Whether a schema has a solution of finite length, as far as references and required parts decide it, given the
    references that have one."""
    if not isinstance(schema, dict):
        return schema is not False
    if "const" in schema or "enum" in schema:
        return True
    ref, every = schema.get("$ref"), schema.get("allOf")
    if isinstance(ref, str) and ref not in finite:
        return False
    if isinstance(every, list) and not all(_is_finite(part, finite) for part in every):
        return False
    for word in ("anyOf", "oneOf"):
        some = schema.get(word)
        if isinstance(some, list) and some and not any(_is_finite(part, finite) for part in some):
            return False
    kinds = schema.get("type", "string")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if any(kind not in NESTED for kind in kinds):
        return True
    return ("array" in kinds and _has_items(schema, finite)) or ("object" in kinds and _has_names(schema, finite))


def _has_items(schema: dict[str, Any], finite: set[str]) -> bool:
    first, least, rest = schema.get("prefixItems", []), schema.get("minItems", 0), schema.get("items", True)
    if not isinstance(least, int) or not isinstance(first, list):
        return True
    if isinstance(rest, list):
        first, rest = rest, schema.get("additionalItems", True)
    return all(_is_finite(part, finite) for part in first[:least]) and (len(first) >= least or _is_finite(rest, finite))


def _has_names(schema: dict[str, Any], finite: set[str]) -> bool:
    required, known = schema.get("required", []), schema.get("properties", {})
    if not isinstance(required, list) or not isinstance(known, dict) or schema.get("patternProperties"):
        return True
    others = schema.get("additionalProperties", True)
    return all(_is_finite(known.get(name, others) if isinstance(name, str) else True, finite) for name in required)
