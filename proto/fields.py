"""Writes specdec/protocol/fields.py, the values of a request, from the proto files: `make proto` runs it.

    python proto/fields.py [FILE]     # by default that one

Fields of SamplingParams and SpeculativePolicy are what their types, comments and options (field.proto) say. Enums have
values of their own, since each word needs code that knows it.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorSet

ROOT = Path(__file__).resolve().parents[1]
MADE = ROOT / "specdec" / "protocol" / "fields.py"
HEADER = '''"""Fields of a request: values, checks and meanings. Made from proto/ by `make proto`; change that."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.protocol.limits import {names}

'''
CLASS = '''

@dataclass(frozen=True, slots=True, kw_only=True)
class {name}{base}:
    """{meaning}"""

{fields}

    def {check}(self) -> None:
        """Raises InvalidRequest for a field outside its limits."""
{checks}
'''
TYPES = {
    **dict.fromkeys((FieldDescriptorProto.TYPE_DOUBLE, FieldDescriptorProto.TYPE_FLOAT), "float"),
    **dict.fromkeys((FieldDescriptorProto.TYPE_UINT32, FieldDescriptorProto.TYPE_INT32), "int"),
    **dict.fromkeys((FieldDescriptorProto.TYPE_UINT64, FieldDescriptorProto.TYPE_FIXED64), "int"),
    FieldDescriptorProto.TYPE_BOOL: "bool",
    FieldDescriptorProto.TYPE_STRING: "str",
}
UNITS = {"str": "strings", "int": "ids"}  # of the entries of a repeated field; those of messages are "entries"


class WireField:
    """One field of a request. `message`: its type if that is a message; `path`: what errors call it."""

    def __init__(self, own: FieldDescriptorProto, option: Any, message: WireMessage | None, prefix: str) -> None:
        self.name, self.option, self.message, self.path = own.name, option, message, prefix + own.name
        self.is_repeated = own.label == FieldDescriptorProto.LABEL_REPEATED
        if message is None and own.type not in TYPES or message is not None and not self.is_repeated:
            raise SystemExit(f"proto/fields.py: {own.name} has a type that no value of a request has")
        self.kind = TYPES[own.type] if message is None else f"tuple[{', '.join(part.kind for part in message.fields)}]"
        self.has_range = option.HasField("high")
        self.constant = own.name.upper() + "_COUNT" * self.is_repeated
        for part in message.fields if message else ():
            part.constant = f"{own.name}_{part.name}".upper()
        if not (self.has_range or option.limit or self.kind == "bool"):
            raise SystemExit(f"proto/fields.py: {own.name} has no limit")

    def number(self, value: float) -> str:
        """A number of the field's type, as Python has it; the size of a repeated field is an integer."""
        kind = int if self.is_repeated else {"float": float, "bool": bool}.get(self.kind, int)
        return repr(kind(value))

    @property
    def declaration(self) -> str:
        if self.is_repeated:
            return f"{self.name}: tuple[{self.kind}, ...] = ()"
        if self.option.HasField("absent"):
            return f"{self.name}: {self.kind} = {self.number(self.option.absent)}"
        return f"{self.name}: {self.kind} | None = None"

    @property
    def low(self) -> str:
        return f"{self.constant}_MIN" if self.option.low and self.has_range else f"{self.option.low:g}"

    @property
    def high(self) -> str:
        return f"{self.constant}_MAX" if self.has_range else self.option.limit

    def constants(self) -> Iterator[str]:
        """The range, where it is this field's alone."""
        if self.has_range and self.option.low:
            yield f"{self.constant}_MIN = {self.number(self.option.low)}"
        if self.has_range:
            yield f"{self.constant}_MAX = {self.number(self.option.high)}  # {self.option.reason}"
        for part in self.message.fields if self.message else ():
            yield from part.constants()

    def check(self, value: str, path: str) -> str:
        """The check of a number."""
        flags = [name for name in ("is_above_low", "is_zero_allowed") if getattr(self.option, name)]
        more = "".join(f", {name}=True" for name in flags)
        kind = "number" if self.kind == "float" else "integer"
        if self.has_range and self.option.low == self.option.high:
            return f'check_only("{path}", {value}, {self.high}, "{self.option.reason}")'
        return f'check_{kind}("{path}", {value}, {self.low}, {self.high}{more})'

    def checks(self) -> Iterator[str]:
        """The lines of its check."""
        value = f"self.{self.name}"
        if self.is_repeated:
            unit = UNITS.get(self.kind, "entries")
            yield f'check_count("{self.path}", {value}, {self.high}, "{unit}")'
            if self.message:
                yield f"for {', '.join(part.name for part in self.message.fields)} in {value}:"
                yield from (f"    {part.check(part.name, f'{self.path}.{part.name}')}" for part in self.message.fields)
            elif self.kind == "str":  # ids are held to the vocabulary, once the model is known
                yield f'check_texts("{self.path}", {value}, {self.option.each})'
        elif self.kind not in ("bool", "str"):
            is_given = self.option.HasField("absent")
            yield from () if is_given else (f"if {value} is not None:",)
            yield "    " * (not is_given) + self.check(value, self.path)


class WireMessage:
    """A message and its fields with values; enums are left out."""

    def __init__(self, name: str, messages: dict[str, DescriptorProto], option_of: Any, prefix: str) -> None:
        self.fields: list[WireField] = []
        for own in messages[name].field:
            if own.type == FieldDescriptorProto.TYPE_ENUM:
                continue
            inner = own.type_name.rpartition(".")[2]
            part = WireMessage(inner, messages, option_of, "") if inner else None
            option = option_of(own)
            self.fields.append(WireField(own, option, part, "" if option.is_resolved else prefix))


def made_class(name: str, base: str, meaning: str, check: str, fields: list[WireField]) -> str:
    """A class of some fields; every one of its checks in the order of the wire."""
    declarations = "\n".join(f"    {field.declaration}" for field in fields)
    checks = "\n".join(f"        {line}" for field in fields for line in field.checks())
    return CLASS.format(
        name=name, base=base and f"({base})", meaning=meaning, fields=declarations, check=check, checks=checks
    )


def read_files() -> FileDescriptorSet:
    """All proto files with comments and options. The options are known once their file is."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "descriptors"
        files = sorted(own.relative_to(ROOT).as_posix() for own in ROOT.glob("proto/**/*.proto"))
        options = ("-Iproto", "--include_source_info", f"--descriptor_set_out={path}")
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *files], cwd=ROOT, check=True)
        data = path.read_bytes()
    for file in FileDescriptorSet.FromString(data).file:
        if file.name.endswith("/field.proto"):
            descriptor_pool.Default().AddSerializedFile(file.SerializeToString())
    return FileDescriptorSet.FromString(data)


def meanings(files: FileDescriptorSet, names: tuple[str, ...]) -> Iterator[str]:
    """An entry of MEANINGS for each field of the messages: its comment, in lines of the length that files have."""
    for file in files.file:
        comments = {tuple(own.path): own.leading_comments for own in file.source_code_info.location}
        for place, message in enumerate(file.message_type):
            for index, own in enumerate(message.field if message.name in names else ()):
                lines = textwrap.wrap(" ".join(comments[4, place, 2, index].split()), 100)
                parts = "\n".join(repr(line + " " * (line is not lines[-1])) for line in lines)
                yield f'"{message.name}.{own.name}": ({parts}),'


def text() -> str:
    """The module."""
    files = read_files()
    extension = descriptor_pool.Default().FindExtensionByName("specdec.v1.wire")
    messages = {message.name: message for file in files.file for message in file.message_type}

    def fields_of(name: str, prefix: str) -> list[WireField]:
        return WireMessage(name, messages, lambda own: own.options.Extensions[extension], prefix).fields

    sampling, speculative = fields_of("SamplingParams", "sampling."), fields_of("SpeculativePolicy", "speculative.")
    common = [field for field in sampling if field.option.is_resolved]
    others = [field for field in sampling if not field.option.is_resolved]
    classes = (
        made_class("CommonSamplingParams", "", "The fields that target and draft get too.", "check_common", common),
        made_class("SamplingFields", "CommonSamplingParams", "SamplingParams.", "check_others", others),
        made_class("SpeculativeFields", "", "SpeculativePolicy, without enums.", "check_all", speculative),
    )
    constants = "\n".join(line for field in (*sampling, *speculative) for line in field.constants())
    entries = "\n".join(meanings(files, ("SamplingParams", "SpeculativePolicy")))
    body = f"{constants}\n{''.join(classes)}\n\nMEANINGS = {{\n{entries}\n}}\n"
    imported = set(re.findall(r"check_[a-z]+(?=\()", body)) - {"check_common", "check_others", "check_all"}
    for field in (*sampling, *speculative):
        parts = field.message.fields if field.message else [field]
        imported.update(name for part in parts for name in (part.option.limit, part.option.each * (part.kind == "str")))
    return HEADER.format(names=", ".join(sorted(imported - {""}))) + body


if __name__ == "__main__":
    command = [Path(sys.executable).with_name("ruff"), "format", "--stdin-filename", MADE, "-"]
    done = subprocess.run(command, input=text(), cwd=ROOT, capture_output=True, text=True, check=True)
    Path(*sys.argv[1:] or [MADE]).write_text(done.stdout, encoding="utf-8")
