"""Writes specdec/protocol/fields.py, the values of a request, from the proto files: `make proto` runs it.

    python proto/fields.py [FILE]     # by default that one

Fields of SamplingParams and SpeculativePolicy are what their types, comments and options (field.proto) say. Enums have
values of their own, since each word needs code that knows it.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Wire
from google.protobuf.descriptor_pb2 import FileDescriptorSet

ROOT = Path(__file__).resolve().parents[1]
MADE = ROOT / "specdec" / "protocol" / "fields.py"
HEADER = '''"""Fields of a request: values, checks and meanings. Made from proto/ by `make proto`; change that."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.protocol import limits
{imports}
'''
CLASS = '''

@dataclass(frozen=True, slots=True, kw_only=True)
class {name}{base}:
    """{meaning}"""

    {declarations}

    def {check}(self) -> None:
        """Raises InvalidRequest for a field outside its limits."""
        {checks}
'''
TYPES = {Wire.TYPE_DOUBLE: "float", Wire.TYPE_BOOL: "bool", Wire.TYPE_STRING: "str"} | dict.fromkeys(
    (Wire.TYPE_UINT32, Wire.TYPE_UINT64, Wire.TYPE_FIXED64), "int"
)
UNITS = {"str": "strings", "int": "ids"}  # of the entries of a repeated field; those of messages are "entries"


class WireField:
    """One field. `parts`: those of its message, if it is one; `path`: what errors call it; `constant`: the beginning of
    the names of its limits."""

    def __init__(self, own: Wire, option: Any, parts: list[WireField], prefix: str) -> None:
        self.name, self.option, self.parts = own.name, option, parts
        self.path = own.name if option.is_resolved else prefix + own.name
        self.is_repeated = own.label == Wire.LABEL_REPEATED
        self.has_range = option.HasField("high")
        self.constant = own.name.upper() + "_COUNT" * self.is_repeated
        for part in parts:
            part.constant = f"{own.name}_{part.name}".upper()
        self.kind: str = f"tuple[{', '.join(part.kind for part in parts)}]" if parts else TYPES.get(own.type, "")
        self.module = ""  # of a value that checks itself, written by hand, since its kinds need code that knows them
        if own.type_name and not self.is_repeated:
            self.kind = own.type_name.rpartition(".")[2]
            self.module = f"specdec.protocol.{own.name}"
        elif not self.kind or not self.is_repeated and self.kind not in ("bool", "int", "float"):
            raise SystemExit(f"proto/fields.py: {own.name} has a type that no value of a request has")
        elif not (self.has_range or option.limit or self.kind == "bool"):
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

    def constants(self) -> Iterator[str]:
        """Its range, and those of its parts, where they are this field's alone."""
        if self.has_range and self.option.low:
            yield f"{self.constant}_MIN = {self.number(self.option.low)}"
        if self.has_range:
            yield f"{self.constant}_MAX = {self.number(self.option.high)}  # {self.option.reason}"
        for part in self.parts:
            yield from part.constants()

    def check(self, value: str, path: str) -> str:
        """The check of a number, or of the count of entries."""
        high = f"{self.constant}_MAX" if self.has_range else f"limits.{self.option.limit}"
        if self.is_repeated:
            return f'limits.check_count("{path}", {value}, {high}, "{UNITS.get(self.kind, "entries")}")'
        low = f"{self.constant}_MIN" if self.has_range and self.option.low else f"{self.option.low:g}"
        flags = "".join(f", {name}=True" for name in ("is_above_low", "is_zero_allowed") if getattr(self.option, name))
        kind = "number" if self.kind == "float" else "integer"
        return f'limits.check_{kind}("{path}", {value}, {low}, {high}{flags})'

    def checks(self) -> Iterator[str]:
        """The lines of its check. Ids are held to the vocabulary, once the model is known."""
        value = f"self.{self.name}"
        if self.module:
            return
        if self.kind != "bool":
            is_optional = not (self.is_repeated or self.option.HasField("absent"))
            yield f"if {value} is not None: " * is_optional + self.check(value, self.path)
        if self.parts:
            yield f"for {', '.join(part.name for part in self.parts)} in {value}:"
            yield from (f"    {part.check(part.name, f'{self.path}.{part.name}')}" for part in self.parts)
        elif self.is_repeated and self.kind == "str":
            yield f'limits.check_texts("{self.path}", {value}, limits.{self.option.each})'


def read_files() -> FileDescriptorSet:
    """All proto files with comments and options. The options are known once their file is."""
    with tempfile.NamedTemporaryFile() as file:
        files = sorted(own.relative_to(ROOT).as_posix() for own in ROOT.glob("proto/**/*.proto"))
        options = ("-Iproto", "--include_source_info", f"--descriptor_set_out={file.name}")
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *files], cwd=ROOT, check=True)
        data = file.read()
    for own in FileDescriptorSet.FromString(data).file:
        if own.name.endswith("/field.proto"):
            descriptor_pool.Default().AddSerializedFile(own.SerializeToString())
    return FileDescriptorSet.FromString(data)


FILES = read_files()
OPTION = descriptor_pool.Default().FindExtensionByName("specdec.v1.wire")
MESSAGES = {message.name: message for file in FILES.file for message in file.message_type}


def is_list_of_parts(own: Any) -> bool:
    """Whether a field has messages whose own fields are its parts."""
    return bool(own.type_name) and own.label == Wire.LABEL_REPEATED


def fields_of(message: str, prefix: str = "") -> list[WireField]:
    """The fields of a message without enums; errors call them by `prefix` and name, those that replicas get by name."""
    return [
        WireField(own, own.options.Extensions[OPTION], parts, prefix)
        for own in MESSAGES[message].field
        if own.type != Wire.TYPE_ENUM
        for parts in [fields_of(own.type_name.rpartition(".")[2]) if is_list_of_parts(own) else []]
    ]


def made_class(name: str, base: str, meaning: str, check: str, fields: list[WireField]) -> str:
    """A class of some fields, with their checks in the order of the wire."""
    declarations = "\n    ".join(field.declaration for field in fields)
    checks = "\n        ".join(line for field in fields for line in field.checks())
    return CLASS.format(name=name, base=base, meaning=meaning, declarations=declarations, check=check, checks=checks)


def meanings(*names: str) -> Iterator[str]:
    """An entry of MEANINGS for each field of the messages: its comment, in lines as long as those of files."""
    for file in FILES.file:
        comments = {tuple(own.path): own.leading_comments for own in file.source_code_info.location}
        for place, message in enumerate(file.message_type):
            for index, own in enumerate(message.field if message.name in names else ()):
                lines = textwrap.wrap(" ".join(comments[4, place, 2, index].split()), 100)
                parts = "\n".join(repr(line + " " * (line is not lines[-1])) for line in lines)
                yield f'"{message.name}.{own.name}": ({parts}),'


def text() -> str:
    """The module."""
    sampling, speculative = fields_of("SamplingParams", "sampling."), fields_of("SpeculativePolicy", "speculative.")
    common = [field for field in sampling if field.option.is_resolved]
    imports = "".join(f"from {field.module} import {field.kind}\n" for field in sampling if field.module)
    others = [field for field in sampling if not field.option.is_resolved]
    parts = (
        HEADER.format(imports=imports),
        *(f"{line}\n" for field in (*sampling, *speculative) for line in field.constants()),
        made_class("CommonSamplingParams", "", "The fields that target and draft get too.", "check_common", common),
        made_class("SamplingFields", "(CommonSamplingParams)", "SamplingParams.", "check_others", others),
        made_class("SpeculativeFields", "", "SpeculativePolicy, without enums.", "check_all", speculative),
        "\n\nMEANINGS = {\n",
        *meanings("SamplingParams", "SpeculativePolicy"),
        "}\n",
    )
    return "".join(parts)


if __name__ == "__main__":
    command = [Path(sys.executable).with_name("ruff"), "format", "--stdin-filename", MADE, "-"]
    done = subprocess.run(command, input=text(), cwd=ROOT, capture_output=True, text=True, check=True)
    Path(*sys.argv[1:] or [MADE]).write_text(done.stdout, encoding="utf-8")
