"""Where Python source of permissive licence lies on any machine: the standard library and well-known packages.

Knows names, licences and folders; reads no file. A package that is not installed is left out, so the corpus depends
on the machine; what was found is written beside it (`data.py`).
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# In every source: code that is not the package's own, or (certifi, MPL-2.0) not of a permissive licence.
FOLDERS_LEFT_OUT = frozenset({"__pycache__", "site-packages", "dist-packages", "certifi"})


@dataclass(frozen=True, slots=True)
class Source:
    """One package, its licence, the folders in it that are taken (all when empty) and those left out."""

    name: str
    licence: str
    only: tuple[str, ...] = ()
    without: tuple[str, ...] = ()


STANDARD_LIBRARY = Source("python", "PSF-2.0", without=("idlelib", "lib2to3", "turtledemo"))

SOURCES = (
    STANDARD_LIBRARY,
    Source("networkx", "BSD-3-Clause"),
    Source("mpmath", "BSD-3-Clause"),
    Source("pip", "MIT"),
    Source("setuptools", "MIT"),
    Source("jinja2", "BSD-3-Clause"),
    Source("click", "BSD-3-Clause"),
    Source("rich", "MIT"),
    Source("_pytest", "MIT"),
    Source("aiohttp", "Apache-2.0"),
    Source("opentelemetry", "Apache-2.0"),
    Source("httpx", "BSD-3-Clause"),
    Source("typer", "MIT"),
    Source("pygments", "BSD-2-Clause", without=("lexers",)),
    Source("requests", "Apache-2.0"),
    Source("pydantic", "MIT"),
    Source("sympy", "BSD-3-Clause", only=("core",)),
    Source("torch", "BSD-3-Clause", only=("nn", "optim", "utils", "distributions")),
)


def source_folders(source: Source) -> tuple[Path, ...]:
    """Folders the source lies in on this machine; none when it is not installed. Imports nothing of it."""
    if source is STANDARD_LIBRARY:
        return (Path(sysconfig.get_paths()["stdlib"]),)
    spec = importlib.util.find_spec(source.name)
    if spec is None or not spec.submodule_search_locations:
        return ()
    return tuple(Path(folder) for folder in spec.submodule_search_locations)


def is_taken(source: Source, relative: Path) -> bool:
    """Whether a file, named relative to the source's folder, belongs to the corpus by its place."""
    folders = relative.parts[:-1]
    if FOLDERS_LEFT_OUT.intersection(folders) or (folders and folders[0] in source.without):
        return False
    return not source.only or (bool(folders) and folders[0] in source.only)


def source_files(source: Source) -> Iterator[tuple[str, Path]]:
    """(name, path) of each file taken; the name starts with the source's and is the same on every machine."""
    for folder in source_folders(source):
        for path in sorted(folder.rglob("*.py")):
            relative = path.relative_to(folder)
            if is_taken(source, relative):
                yield f"{source.name}/{relative.as_posix()}", path
