"""Settings from flags, environment and a YAML file: one reader for every schema of `specdec.config`.

A flag overrides an environment variable, which overrides the file, which overrides the default. Unknown keys are
errors, and every error is one line with the source of the value. The help is generated from the schema, the only place
with a text for each flag.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import shutil
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pydantic
from pydantic.fields import FieldInfo

from specdec.config import GROUPS, Settings
from specdec.errors import ConfigError
from specdec.settings import ENVIRONMENT_PREFIX, KERNELS_VARIABLE, flag_of

# Kubernetes sets such variables for a Service named specdec-…; they are addresses, not settings.
_SERVICE_LINK = re.compile(r"_(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP)\w*)?)$")
_SERVICE_LINK_VALUE = re.compile(r"(tcp|udp|sctp)://")  # the value of NAME_PORT for a Service named NAME

AnySettings = TypeVar("AnySettings", bound=Settings)


class UsageError(ConfigError):
    """A wrong flag, key or value: the command was not started."""

    reason = "USAGE"
    exit_code = 2


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that raises UsageError instead of printing its usage."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def plain_type(annotation: Any) -> Any:
    """Returns the type of a given value: `int` for `int | None`."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(annotation) if part is not type(None))
    return annotation


def is_list(field: FieldInfo) -> bool:
    """Whether the flag may be repeated."""
    return typing.get_origin(plain_type(field.annotation)) is tuple


def metavar_of(field: FieldInfo) -> str:
    """Returns the name of the value in the help."""
    kind = plain_type(field.annotation)
    if typing.get_origin(kind) is typing.Literal:
        return "|".join(typing.get_args(kind))
    return _extra(field).get("metavar") or {int: "N", float: "X", Path: "FILE"}.get(kind, "TEXT")


def help_of(field: FieldInfo) -> str:
    """Returns the field's help text with its default, escaped for argparse."""
    text = (field.description or "").replace("%", "%%")
    if field.is_required():
        return f"{text} Required."
    if field.default in (None, False, (), ""):
        return text
    return f"{text} [default: {field.default}]"


def make_parser(command: str, summary: str, settings_class: type[Settings]) -> OneLineParser:
    """Returns the parser of one command; its result has given flags only."""
    width = min(shutil.get_terminal_size().columns, 110)
    parser = OneLineParser(
        prog=f"specdec {command}",
        description=summary,
        epilog=f"Every flag can be given as {ENVIRONMENT_PREFIX}<NAME> in the environment, or as <name> in the YAML "
        "file of --config. A flag overrides the environment, which overrides the file.",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=width),
        usage=f"specdec {command} " + " ".join([*_positional_names(settings_class), "[FLAGS]"]),
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of the settings below.")
    fields = settings_class.model_fields
    titles = {name: _extra(field)["group"] for name, field in fields.items()}
    groups = {title: parser.add_argument_group(title) for title in GROUPS if title in titles.values()}
    for name, field in fields.items():
        _add_flag(groups[titles[name]], name, field)
    return parser


def _extra(field: FieldInfo) -> dict[str, Any]:
    return typing.cast("dict[str, Any]", field.json_schema_extra)


def _positional_names(settings_class: type[Settings]) -> list[str]:
    return [name.upper() for name, field in settings_class.model_fields.items() if _extra(field).get("positional")]


def _add_flag(group: Any, name: str, field: FieldInfo) -> None:
    if _extra(field).get("positional"):
        group.add_argument(name, nargs="?", metavar=name.upper(), help=help_of(field))
    elif plain_type(field.annotation) is bool:
        group.add_argument(flag_of(name), dest=name, action=argparse.BooleanOptionalAction, help=help_of(field))
    else:
        how: dict[str, Any] = {"action": "append" if is_list(field) else "store"}
        if _extra(field).get("several"):
            how = {"action": "extend", "nargs": "+"}
        flags = [flag for flag in (flag_of(name), _extra(field).get("missing_flag")) if flag]
        group.add_argument(*flags, dest=name, **how, metavar=metavar_of(field), help=help_of(field))


def read_settings(
    settings_class: type[AnySettings],
    parser: OneLineParser,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    known_fields: frozenset[str],
) -> AnySettings:
    """Returns the settings. Raises UsageError, one line, for any error. `known_fields`: those of all commands, allowed
    in an environment shared by several commands."""
    given, unknown = parser.parse_known_args(list(arguments))
    flags = vars(given)
    if unknown:
        raise UsageError(_unknown(unknown[0], [flag_of(name) for name in settings_class.model_fields], parser.prog))
    file = flags.pop("config", None) or environment.get(ENVIRONMENT_PREFIX + "CONFIG")
    layers: list[tuple[dict[str, Any], typing.Callable[[str], str]]] = [
        (_from_file(settings_class, file) if file else {}, lambda name: f"{name} in {file}"),
        (_from_environment(settings_class, environment, known_fields), lambda name: ENVIRONMENT_PREFIX + name.upper()),
        (flags, lambda name: name.upper() if name in _lowered_positionals(settings_class) else flag_of(name)),
    ]
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer, origin in layers:
        values.update(layer)
        origins.update({name: origin(name) for name in layer})
    try:
        return settings_class(**values)
    except pydantic.ValidationError as error:
        raise UsageError(_sentence(error, settings_class, origins)) from None


def _lowered_positionals(settings_class: type[Settings]) -> set[str]:
    return {name.lower() for name in _positional_names(settings_class)}


def _unknown(key: str, known: Sequence[str], where: str) -> str:
    """Returns an error message for an unknown key, with the closest known key."""
    close = difflib.get_close_matches(key.partition("=")[0], known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"see {where} --help"
    return f"{key} is not known; {hint}"


def read_yaml(file: str) -> dict[Any, Any]:
    """Returns the content of a --config file; {} if empty. Raises UsageError unless it holds names and values."""
    import yaml  # only needed for --config

    try:
        content = yaml.safe_load(Path(file).read_text(encoding="utf-8")) or {}
    except OSError as error:
        raise UsageError(f"--config {file} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"--config {file} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UsageError(f"--config {file} must hold NAME: VALUE lines")
    return content


def _from_file(settings_class: type[Settings], file: str) -> dict[str, Any]:
    content = read_yaml(file)
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    for name in values:
        if name not in settings_class.model_fields:
            close = difflib.get_close_matches(name, settings_class.model_fields, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; --help lists the settings of this command"
            raise UsageError(f"{name} in {file} is not known{hint}")
    return values


def _from_environment(
    settings_class: type[Settings], environment: Mapping[str, str], known_fields: frozenset[str]
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, text in environment.items():
        is_setting = variable.startswith(ENVIRONMENT_PREFIX) and variable != KERNELS_VARIABLE
        if not is_setting or text == "" or variable == ENVIRONMENT_PREFIX + "CONFIG":
            continue
        name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
        if name in settings_class.model_fields:
            values[name] = _parse_list(text) if is_list(settings_class.model_fields[name]) else text
        elif name not in known_fields and not _SERVICE_LINK.search(variable):
            known = [ENVIRONMENT_PREFIX + field.upper() for field in sorted(known_fields)]
            raise UsageError(_unknown(variable, known, "specdec COMMAND"))
    return values


def _parse_list(text: str) -> list[Any]:
    """Returns a JSON list, or a list of one entry."""
    try:
        parsed = json.loads(text)
    except ValueError:
        return [text]
    return parsed if isinstance(parsed, list) else [text]


def _sentence(error: pydantic.ValidationError, settings_class: type[Settings], origins: Mapping[str, str]) -> str:
    """Returns the first validation error as one line."""
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input should be ").partition(", unable")[0]
    if not first["loc"]:
        return message
    name = str(first["loc"][0])
    if first["type"] == "missing":
        variable = ENVIRONMENT_PREFIX + name.upper()
        purpose = (settings_class.model_fields[name].description or "").rstrip(".")
        return f"{flag_of(name)} is missing ({purpose}); give it, or {variable}, or {name} in --config"
    origin = origins.get(name, flag_of(name))
    shown = repr(first["input"])
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    if first["type"] in ("greater_than_equal", "less_than_equal"):
        message = _range(settings_class.model_fields[name]) or message
    if first["msg"].startswith("Input should be "):
        message = f"it must be {message}"
    if origin.startswith(ENVIRONMENT_PREFIX) and _SERVICE_LINK_VALUE.match(str(first["input"])):
        message += (
            "; Kubernetes sets it for a Service of that name: set enableServiceLinks: false in the pod, rename the "
            f"Service, or give {flag_of(name)}"
        )
    return f"{origin} is {shown}; {message}"


def _range(field: FieldInfo) -> str:
    """Returns "from 0 to 65535" if the field has both limits."""
    bounds = {end: getattr(limit, end) for limit in field.metadata for end in ("ge", "le") if hasattr(limit, end)}
    return f"from {bounds['ge']} to {bounds['le']}" if {"ge", "le"} <= bounds.keys() else ""
