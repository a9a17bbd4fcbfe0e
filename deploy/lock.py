"""Writes requirements.lock: every package that the images install, with version and the hashes of all its files.

`make lock` runs it. The versions of direct dependencies are those of constraints.txt; uv resolves the rest for every
Python from 3.11 on, by the index that pip uses by default. The sections of the file add up: `coordinator`, `replica`
(what draft and target need beside it), `torch` (torch and what nothing else needs, in its build for NVIDIA GPUs) and
`ray`; `gateway` has what a gateway needs beside `coordinator`. `deploy/requirements.py` prints them while an image is
built.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from requirements import LOCK, PROJECT, SECTION, entries, name_of, requirements

PYTHON_MIN = "3.11"
HEADER = """\
# What the images install, with the hashes of every file (pip's --require-hashes). Written by `make lock`, from
# pyproject.toml and the versions in constraints.txt; the sections add up (deploy/lock.py).
"""


def compiled(lines: list[str], constraints: list[Path], hashes: bool = False) -> str:
    """Returns what uv resolves of the requirements, one entry a package. Ends the command if uv fails."""
    files = [argument for path in constraints for argument in ("--constraint", str(path))]
    options = ["--universal", "--python-version", PYTHON_MIN, "--no-header", "--no-annotate", "--quiet"]
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "-", *options, *files]
    done = subprocess.run(
        [*command, *(["--generate-hashes"] if hashes else [])],
        input="\n".join(lines),
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        sys.exit(f"uv found no versions for {', '.join(lines)}: change constraints.txt")
    return done.stdout


def main() -> None:
    pinned = PROJECT.with_name("constraints.txt")
    whole = compiled(requirements(PROJECT, "ray"), [pinned], hashes=True)
    LOCK.write_text(whole, encoding="utf-8")
    of_image = {image: requirements(PROJECT, image) for image in ("coordinator", "gateway", "replica")}
    parts = {
        "coordinator": of_image["coordinator"],
        "gateway": of_image["gateway"],
        "replica": [line for line in of_image["replica"] if name_of(line) != "torch"],
        "torch": of_image["replica"],
    }
    names = {part: {name_of(line) for line in entries(compiled(lines, [LOCK]))} for part, lines in parts.items()}
    names["ray"] = {name_of(line) for line in entries(whole)}
    text, seen = HEADER, set[str]()
    for section, own in names.items():
        found = [entry for entry in entries(whole) if name_of(entry) in own - seen]
        text += f"{SECTION}{section}\n" + "".join(found)
        seen |= own if section != "gateway" else set()  # images without it need theirs from a later section
        print(f"{section}: {len(found)} packages")
    LOCK.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
