"""What is installed is what was chosen: pinned versions, hashes of files, digests of images."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.digests import REFERENCE
from deploy.requirements import LOCK, PROJECT, entries, printed, requirements, sections
from tests.hygiene.sources import ROOT

LINES = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"]
PINNED = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in LINES)}
ORDER = ("coordinator", "gateway", "replica", "torch", "ray")
NEEDED = {section: [s for s in ORDER[:place] if s != "gateway"] for place, section in enumerate(ORDER)}


def direct() -> list[Requirement]:
    """Every requirement of pyproject.toml: of the project, of each extra, of its build."""
    content = tomllib.loads(PROJECT.read_text(encoding="utf-8"))
    lists = [content["build-system"]["requires"], content["project"]["dependencies"]]
    lists += content["project"]["optional-dependencies"].values()
    return [Requirement(line) for lines in lists for line in lines]


def locked() -> dict[str, dict[str, Requirement]]:
    """Name -> `name==version` of every section, for this interpreter."""
    found = {}
    for section, lines in sections(LOCK.read_text(encoding="utf-8")).items():
        own = [Requirement(entry.partition(" \\\n")[0]) for entry in lines]
        found[section] = {canonicalize_name(one.name): one for one in own if not one.marker or one.marker.evaluate()}
    return found


def test_every_direct_dependency_is_pinned() -> None:
    """Claim: constraints.txt has one version of each package that pyproject.toml names, within its range, and of no
    other. Source: what was not named there came in whatever version was newest on that day. Conclusive: the two sets
    are equal."""
    assert len(PINNED) == len(LINES)
    assert {canonicalize_name(one.name) for one in direct()} == PINNED.keys()
    for one in direct():
        assert one.specifier.contains(PINNED[canonicalize_name(one.name)]), one


def test_the_lock_is_complete() -> None:
    """Claim: requirements.lock has a version and hashes of every package that an image installs, the versions of
    constraints.txt among them, in sections that need only what stands before, without the gateway's.

    Conclusive: the requirements of each package are read from its installed metadata and looked up, from those of
    pyproject.toml on; a package of the lock that this environment lacks is left out of that walk alone.
    """
    text = LOCK.read_text(encoding="utf-8")
    assert all(re.search(r"==[^ ]+.*\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+$", entry) for entry in entries(text))
    assert len(entries(text)) == sum(map(len, sections(text).values()))
    found = locked()
    assert tuple(found) == ORDER
    for name, version in PINNED.items():
        assert all(own[name].specifier.contains(version) for own in found.values() if name in own), name
    wanted = {
        image: [Requirement(line) for line in requirements(PROJECT, image)] for image in ORDER if image != "torch"
    }
    wanted["replica"] = [one for one in wanted["replica"] if one.name != "torch"]
    walked = 0
    for section in ORDER:
        known = {name: one for before in (*NEEDED[section], section) for name, one in found[before].items()}
        waiting = list(wanted.get(section, ())) + [Requirement(name) for name in found[section]]
        seen: set[str] = set()
        while waiting:
            one = waiting.pop()
            if str(one) in seen:
                continue
            seen.add(str(one))
            name = canonicalize_name(one.name)
            (exact,) = known[name].specifier
            assert one.specifier.contains(exact.version), f"{section}: {one} is not {exact}"
            try:
                needed = metadata.requires(name) or []
            except metadata.PackageNotFoundError:  # of another platform, or torch's for a GPU
                continue
            if metadata.version(name) != exact.version:
                continue
            walked += 1
            for other in map(Requirement, needed):
                extras = ("", *(sorted(one.extras)))
                if any(other.marker is None or other.marker.evaluate({"extra": extra}) for extra in extras):
                    waiting.append(other)
    assert walked > 100


def test_another_index_of_torch() -> None:
    """Claim: with TORCH_INDEX_URL torch has its version and that index, no hash of a file that is not there; every
    other section is as before."""
    text = LOCK.read_text(encoding="utf-8")
    assert printed(text, ["torch"], "https://example.org/cpu") == (
        f"--index-url https://example.org/cpu\ntorch=={PINNED['torch']}\n"
    )
    assert printed(text, ["coordinator", "ray"], "https://example.org/cpu") == printed(text, ["coordinator", "ray"], "")


@pytest.mark.more
def test_pip_takes_the_lock_and_refuses_another_file(tmp_path: Path) -> None:
    """Claim: pip installs a coordinator's packages by their hashes, and refuses a file with another one. Conclusive:
    the same command fails after one digit of one hash of each file of one package was changed."""
    text = printed(LOCK.read_text(encoding="utf-8"), ["coordinator"], "")
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile", "--no-deps"]

    def install(content: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "requirements.txt").write_text(content, encoding="utf-8")
        command = [*pip, "--require-hashes", "-r", str(tmp_path / "requirements.txt")]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)

    (entry,) = (entry for entry in entries(text) if entry.startswith("structlog=="))
    refused = install(re.sub(r"(?<=sha256:)[0-9a-f]", lambda digit: "0" if digit.group() != "0" else "1", entry))
    assert refused.returncode != 0 and "DO NOT MATCH" in refused.stderr
    done = install(text)
    assert done.returncode == 0, done.stderr
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [str(python), "-m", "specdec.cli", "coordinator", "--help"]
    printed_help = subprocess.run(started, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert "usage: specdec coordinator" in printed_help.stdout, printed_help.stderr


def test_digests_are_written_for_all_images_or_none(tmp_path: Path) -> None:
    """Claim: the command writes the digest of every image from outside into every file that names it, again over an
    older one; without an answer for one image it changes nothing.

    The registry is a stand-in for the tool that asks it: an executable named `skopeo`, which answers by image.
    Conclusive: every reference that an independent search finds has the digest of its image.
    """
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    tool, path = tmp_path / "bin" / "skopeo", tmp_path / "deploy"
    tool.parent.mkdir()

    def run(script: str) -> subprocess.CompletedProcess[str]:
        tool.write_text(f"#!/bin/sh\nfor image; do :; done\n{script}\n", encoding="utf-8")
        tool.chmod(0o755)
        environment = {"PATH": f"{tool.parent}:/usr/bin:/bin"}
        command = [sys.executable, str(path / "digests.py")]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)

    def files() -> dict[Path, str]:
        manifests = [*sorted(path.rglob("*.yaml")), path / "Dockerfile"]
        return {file: file.read_text(encoding="utf-8") for file in manifests}

    before = files()
    failed = run('case "$image" in *grafana*) echo no such image >&2; exit 1;; esac; echo "sha256:$(printf %064d 7)"')
    assert failed.returncode != 0 and "no such image" in failed.stderr and "nothing was written" in failed.stderr
    assert files() == before
    for salt in ("first", "second"):
        done = run(f'printf "sha256:"; echo "{salt} $image" | sha256sum | cut -d " " -f 1')
        assert done.returncode == 0, done.stderr
        known = dict(line.split("@") for line in done.stdout.splitlines())
        named = [match for text in files().values() for match in re.findall(r"(?:image: |_IMAGE=)(\S+:\S+)", text)]
        outside = [name for name in named if not name.startswith("specdec-")]
        assert {name.partition("@")[0] for name in outside} == known.keys() and len(known) == 5
        assert all(name == f"{name.partition('@')[0]}@{known[name.partition('@')[0]]}" for name in outside)
    assert {file: REFERENCE.sub(r"\g<start>\g<image>", text) for file, text in files().items()} == before
