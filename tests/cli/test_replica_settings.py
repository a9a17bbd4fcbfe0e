"""The settings of a coordinator's targets and drafts: lists from every source, files, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.config import CoordinatorSettings
from specdec.launch.children import arguments_of
from specdec.settings import ADDRESSES_FILE_BYTES_MAX, VALUE_COUNT_MAX, read_addresses
from tests.cli.test_settings import read, refusal

BESIDE = "--tokenizer", "t", "--insecure"


def test_targets_and_drafts_come_as_lists_from_every_source(tmp_path: Path) -> None:
    """Claim: repeated flags, lists with commas or spaces, in a flag, a variable or a file, JSON and YAML lists all give
    the same targets, in their order; a child that is given the settings as flags reads the same."""
    wanted = ("a:1", "10.0.0.1:2", "[::1]:3")
    file = tmp_path / "c.yaml"
    for flags in (["--target", "a:1", "--target=10.0.0.1:2,[::1]:3"], ["--target", " a:1  10.0.0.1:2, [::1]:3,"]):
        assert read("coordinator", *BESIDE, *flags).target == wanted
    for text in ("a:1,10.0.0.1:2,[::1]:3", "a:1 10.0.0.1:2 [::1]:3", '["a:1", "10.0.0.1:2", "[::1]:3"]'):
        assert read("coordinator", *BESIDE, environment={"SPECDEC_TARGET": text}).target == wanted
    for line in ("target: a:1, 10.0.0.1:2, [::1]:3", "target: ['a:1', '10.0.0.1:2', '[::1]:3']"):
        file.write_text(line)
        assert read("coordinator", *BESIDE, "--config", str(file)).target == wanted
    settings = read("coordinator", *BESIDE, "--target=a:1", "--draft=b:1", "--draft=b:2", "--target-wait-s=0")
    assert (settings.target, settings.draft, settings.target_wait_s) == (("a:1",), ("b:1", "b:2"), 0.0)
    assert read("coordinator", *arguments_of(settings)) == settings
    assert CoordinatorSettings(target="localhost:1", tokenizer="t").draft == ()


def test_a_file_has_an_address_a_line(tmp_path: Path) -> None:
    """Claim: @FILE is read at the start, with comments and empty lines, and may be empty; the setting keeps the name of
    the file."""
    file = tmp_path / "targets"
    file.write_text("# two\n10.0.0.1:50052\n\n  gpu-2:50052  # the second\r\n")
    assert read("coordinator", *BESIDE, "--target", f"@{file}").target == (f"@{file}",)
    assert read_addresses(file) == ("10.0.0.1:50052", "gpu-2:50052")
    file.write_text("")
    assert read_addresses(file) == ()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"a:1\nhere\n", "line 2 of the file is 'here'; it must be HOST:PORT"),
        (b"a:1 b:2\n", "line 1 of the file is 'a:1 b:2'; it must be HOST:PORT"),
        (b"@other\n", "line 1 of the file is '@other'"),
        (b"a:\xff1\n", "the file cannot be read as text"),
        (b"#" * (ADDRESSES_FILE_BYTES_MAX + 1), f"the file has more than {ADDRESSES_FILE_BYTES_MAX} bytes"),
        (None, "the file cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_is_not_understood_is_refused(tmp_path: Path, content: bytes | None, expected: str) -> None:
    """Claim: at the start a file that is missing or malformed is an error with flag, file and line."""
    file = tmp_path / "targets"
    if content is not None:
        file.write_bytes(content)
    said = refusal("coordinator", *BESIDE, "--target", f"@{file}")
    assert said.startswith("--target is '@/") and said.partition("; ")[2].startswith(expected)


def test_what_is_no_address_is_refused() -> None:
    """Claim: a value that is neither HOST:PORT nor @FILE, among them the schemes of gRPC, too many values and none are
    refused with flag, value and limit, as is a wait outside its range."""
    for value in ("here", "a:", ":1", "a:65536", "ipv4:10.0.0.1:1", "dns:///a:1", "unix:///x:1"):
        said = refusal("coordinator", *BESIDE, "--target", "b:1", "--draft", value)
        assert said == f"--draft is '{value}'; it must be HOST:PORT, such as 127.0.0.1:50052, or @FILE"
    many = ",".join(f"a:{port}" for port in range(1, VALUE_COUNT_MAX + 2))
    assert "--target has 65 values; it must have 1 to 64" in refusal("coordinator", *BESIDE, "--target", many)
    assert "--target has 0 values; it must have 1 to 64" in refusal("coordinator", *BESIDE, "--target", ",")
    said = refusal("coordinator", *BESIDE, "--target", "b:1", "--target-wait-s", "3601")
    assert said == "--target-wait-s is '3601'; it must be from 0 to 3600"


def test_every_address_is_checked_for_its_reach(tmp_path: Path) -> None:
    """Claim: without TLS or --insecure a second target beyond this machine is refused, and so is a file, whose later
    lines are not known; --insecure-links allows both."""
    file = tmp_path / "targets"
    file.write_text("127.0.0.1:1\n")
    for value, named in (("10.0.0.1:2", "10.0.0.1"), (f"@{file}", f"@{file}")):
        given = "--tokenizer", "t", "--target", "localhost:1", "--target", value
        assert f"--target {named} reaches beyond this machine" in refusal("coordinator", *given)
        assert read("coordinator", *given, "--insecure-links").target == ("localhost:1", value)
