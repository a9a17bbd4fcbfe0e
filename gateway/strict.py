"""An object of a request: read from JSON, its keys and the form of its values checked before anything is made of it."""

from __future__ import annotations

import difflib
from typing import Any, ClassVar, TypeVar

import pydantic_core
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from specdec.gateway.errors import HttpError
from specdec.gateway.fields import BY_ENDPOINT, Fate

KEY_COUNT_MAX = 128  # of one object: no object of the interface has as many
SEPARATOR_COUNT_MAX = 1 << 16  # commas in a body beside those of token ids: each value costs time to read
DEPTH_MAX = 32  # of values whose form is the client's
NAME_LENGTH_MAX = 512
Model = TypeVar("Model", bound="Strict")


def depth_of(value: Any, depth_max: int) -> int:
    """Returns the levels of lists and objects in a value, at most `depth_max` + 1 of them."""
    level, depth = [value], 0
    while depth <= depth_max:
        inner = [own for own in level if isinstance(own, (dict, list))]
        if not inner:
            break
        depth += 1
        level = [part for own in inner for part in (own.values() if isinstance(own, dict) else own)]
    return depth


def bounded_json(bytes_max: int, depth_max: int = DEPTH_MAX) -> Any:
    """Returns a check of a value whose form is the client's: its levels and its length as JSON."""

    def check(value: Any) -> Any:
        if depth_of(value, depth_max) > depth_max:
            raise PydanticCustomError("too_deep", "it has more than {limit} levels", {"limit": depth_max})
        size = len(pydantic_core.to_json(value))
        if size > bytes_max:
            facts = {"size": size, "limit": bytes_max}
            raise PydanticCustomError("too_long", "it has {size} bytes as JSON; at most {limit} are taken", facts)
        return value

    return AfterValidator(check)


class Strict(BaseModel):
    """An object of a request: values of the exact type, and no key that is not known. A null stands for no value."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())
    endpoint: ClassVar[str] = ""  # of `fields`, for a whole body

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if len(value) > KEY_COUNT_MAX:
            raise PydanticCustomError("too_long", "it has more than {limit} keys", {"limit": KEY_COUNT_MAX})
        known, names = BY_ENDPOINT.get(cls.endpoint, {}), _keys_of(cls)
        kept = {}
        for key, own in value.items():
            field = known.get(key)
            if own is None:
                if field is None and key not in names:
                    raise _unknown(key, cls)
            elif field is not None and field.fate is Fate.REFUSED:
                if not any(own == neutral and type(own) is type(neutral) for neutral in field.neutral):
                    raise PydanticCustomError(
                        "unsupported_parameter", "{param} is not supported: {why}", {"param": key, "why": field.meaning}
                    )
            elif key not in names:
                raise _unknown(key, cls)
            else:
                kept[key] = own
        return kept


def _keys_of(model: type[Strict]) -> list[str]:
    return [own.alias or name for name, own in model.model_fields.items()]


def _unknown(key: str, model: type[Strict]) -> PydanticCustomError:
    names = [*_keys_of(model), *BY_ENDPOINT.get(model.endpoint, {})]
    close = difflib.get_close_matches(key[:NAME_LENGTH_MAX], names, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    facts = {"param": key[:NAME_LENGTH_MAX], "hint": hint}
    return PydanticCustomError("unknown_parameter", "{param} is not known{hint}", facts)


def read_body(model: type[Model], body: bytes, positions_max: int = 0) -> Model:
    """Returns the request in a body. Raises HttpError, of status 400, that names a wrong field."""
    if body.count(b",") > SEPARATOR_COUNT_MAX + 2 * positions_max:
        raise HttpError(413, f"the body has too many values for a model of {positions_max} positions", "too_long")
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise HttpError(400, f"the body is not valid JSON: {error}", "invalid_json") from None
    if not isinstance(value, dict):
        raise HttpError(400, "the body must be a JSON object", "invalid_json")
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = max(error.errors(include_url=False, include_input=False), key=lambda own: len(own["loc"]))
    named = first.get("ctx", {}).get("param")
    places = [str(place) for place in first["loc"] if isinstance(place, int) or place in _names(place)]
    path = ".".join([*places, *([named] if named else [])])
    words = first["msg"].removeprefix("Input should be ")
    kind = first["type"]
    code = kind if kind in ("unknown_parameter", "unsupported_parameter", "too_deep") else "invalid_value"
    if kind == "missing":
        raise HttpError(400, f"{path} is missing", "missing_required_parameter", path)
    if first["msg"].startswith("Input should be "):
        words = f"it must be {words}"
    sentence = words if named or not path else f"{path}: {words}"
    raise HttpError(400, sentence, code, path or None)


def _names(place: str) -> set[str]:
    """The place itself if it is a field's name; nothing for the names that pydantic gives to parts of a union."""
    return {place} if place.isidentifier() and place != "str" else set()
