"""The wire as files: everything in it is explained, what is made of it is committed, and no change
breaks clients of the public service."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet, SourceCodeInfo

from tests.hygiene.sources import ROOT, report

PROTO_FOLDER = ROOT / "proto"
GENERATOR_VERSION = "1.74.0"  # its stubs load under protobuf 6.31 to 7; later ones demand the newest protobuf
# Descriptor field numbers, of which source paths are made (google/protobuf/descriptor.proto).
FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM, MESSAGE_ONEOF = 2, 3, 4, 8
ENUM_VALUE, SERVICE_METHOD = 2, 2


def proto_files() -> list[str]:
    """The proto files relative to the root, as passed to the generator."""
    return sorted(path.relative_to(ROOT).as_posix() for path in PROTO_FOLDER.rglob("*.proto"))


def run_generator(*options: str) -> None:
    """Runs protoc as the `proto` target of the Makefile does."""
    command = [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *options, *proto_files()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def elements(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    """(source path, name) of every message, field, oneof, enum, enum value, service and rpc."""
    for index, message in enumerate(file.message_type):
        yield from message_elements(message, (FILE_MESSAGE, index), message.name)
    for index, enum in enumerate(file.enum_type):
        yield from enum_elements(enum, (FILE_ENUM, index), enum.name)
    for index, service in enumerate(file.service):
        yield (FILE_SERVICE, index), service.name
        for number, method in enumerate(service.method):
            yield (FILE_SERVICE, index, SERVICE_METHOD, number), f"{service.name}.{method.name}"


def message_elements(message, path: tuple[int, ...], name: str) -> Iterator[tuple[tuple[int, ...], str]]:
    """The same for one message and its content."""
    yield path, name
    for index, field in enumerate(message.field):
        yield (*path, MESSAGE_FIELD, index), f"{name}.{field.name}"
    for index, oneof in enumerate(message.oneof_decl):
        if not oneof.name.startswith("_"):  # the compiler's own, for `optional` fields
            yield (*path, MESSAGE_ONEOF, index), f"{name}.{oneof.name}"
    for index, enum in enumerate(message.enum_type):
        yield from enum_elements(enum, (*path, MESSAGE_ENUM, index), f"{name}.{enum.name}")
    for index, nested in enumerate(message.nested_type):
        yield from message_elements(nested, (*path, MESSAGE_NESTED, index), f"{name}.{nested.name}")


def enum_elements(enum, path: tuple[int, ...], name: str) -> Iterator[tuple[tuple[int, ...], str]]:
    """The same for one enum."""
    yield path, name
    for index, value in enumerate(enum.value):
        yield (*path, ENUM_VALUE, index), f"{name}.{value.name}"


def is_commented(location: SourceCodeInfo.Location) -> bool:
    """Whether a comment stands before or behind it."""
    return bool(location.leading_comments.strip() or location.trailing_comments.strip())


@pytest.fixture(scope="module")
def descriptors(tmp_path_factory: pytest.TempPathFactory) -> FileDescriptorSet:
    """All proto files as the compiler reads them, comments included."""
    path = tmp_path_factory.mktemp("proto") / "descriptors"
    run_generator("--include_source_info", f"--descriptor_set_out={path}")
    return FileDescriptorSet.FromString(path.read_bytes())


def test_everything_on_the_wire_is_explained(descriptors: FileDescriptorSet) -> None:
    """Claim: each message, field, oneof, enum, value, service and rpc has a comment: unit, range, meaning of absence.

    Conclusive: the compiler itself says which comment belongs to what.
    """
    problems, seen = [], 0
    for file in descriptors.file:
        locations = {tuple(location.path): location for location in file.source_code_info.location}
        for path, name in elements(file):
            seen += 1
            if not is_commented(locations[path]):
                problems.append(f"proto/{file.name}:{locations[path].span[0] + 1}: {name}")
    assert seen > 100
    assert not problems, report(problems, "Say in a comment above it what it is, its unit and its range:")


def test_stubs_are_those_of_the_proto_files(tmp_path: Path) -> None:
    """Claim: specdec/v1 is the output of the pinned generator for proto/, byte for byte, and nothing else."""
    found = version("grpcio-tools")
    assert found == GENERATOR_VERSION, f"grpcio-tools is {found}; install grpcio-tools=={GENERATOR_VERSION}"
    run_generator(*(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")))
    made = {path.name: path.read_bytes() for path in (tmp_path / "specdec" / "v1").iterdir()}
    kept = {path.name: path.read_bytes() for path in (ROOT / "specdec" / "v1").glob("*.py*")}
    differing = sorted(name for name in made | kept if made.get(name) != kept.get(name))
    assert not differing, report([f"specdec/v1/{name}:1" for name in differing], "Run `make proto` and commit:")


def test_the_values_of_a_request_are_those_of_the_proto_files(tmp_path: Path) -> None:
    """Claim: specdec/protocol/fields.py is what proto/fields.py writes, byte for byte."""
    made = tmp_path / "fields.py"
    subprocess.run([sys.executable, PROTO_FOLDER / "fields.py", made], check=True)
    kept = ROOT / "specdec" / "protocol" / "fields.py"
    assert made.read_bytes() == kept.read_bytes(), "run `make proto` and commit specdec/protocol/fields.py"


PUBLIC_IMAGE = PROTO_FOLDER / "public.binpb"
PUBLIC_TYPE = "specdec.v1.CoordinatorService"


def run_buf(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs buf, which is installed beside this Python."""
    command = [str(Path(sys.executable).with_name("buf")), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def broken_by(folder: Path, image: Path) -> str:
    """The breaking changes that buf finds in `folder` against the committed image; empty if there are none. `image`:
    where the image of `folder` is written."""
    made = run_buf("build", str(folder), "--type", PUBLIC_TYPE, "--exclude-source-info", "-o", str(image))
    assert made.returncode == 0, made.stderr
    return run_buf("breaking", str(image), "--against", str(PUBLIC_IMAGE)).stdout


def test_no_change_breaks_clients(tmp_path: Path) -> None:
    """Claim: a client built from an earlier coordinator_service.proto still works: no field, value or method that it
    reaches was removed, renumbered, retyped or renamed since the committed image."""
    assert broken_by(PROTO_FOLDER, tmp_path / "now.binpb") == ""


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("coordinator_service.proto", "optional uint32 max_tokens = 1 [", "optional uint32 max_tokens = 31 ["),
        ("coordinator_service.proto", "uint32 output_tokens = 2 [", "uint64 output_tokens = 2 ["),
        ("coordinator_service.proto", "rpc Generate(", "rpc Generation("),
        ("types.proto", "RULE_COUPLED = 3;", "RULE_SHARED = 3;"),
    ],
    ids=["renumbered field", "retyped field", "renamed method", "renamed value of an imported file"],
)
def test_a_breaking_change_is_found(tmp_path: Path, file: str, old: str, new: str) -> None:
    """Claim: the guard fails on changes that break clients, in the public file and in its imports.

    Conclusive: the only difference from the committed files is the planted one.
    """
    shutil.copytree(PROTO_FOLDER, tmp_path / "proto")
    changed = tmp_path / "proto" / "specdec" / "v1" / file
    text = changed.read_text(encoding="utf-8")
    assert text.count(old) == 1
    changed.write_text(text.replace(old, new), encoding="utf-8")
    assert broken_by(tmp_path / "proto", tmp_path / "now.binpb") != ""
