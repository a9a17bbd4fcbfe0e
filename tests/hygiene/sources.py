"""The input of the style tests: the project's files, and Python files as syntax trees.

Nothing is imported or run from here; a module that cannot be parsed fails the test that reads it.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCT_FOLDERS = (
    "specdec",
    "draft_service",
    "target_service",
    "coordinator",
    "gateway",
    "models",
    "bench",
    "examples",
)
GENERATED = "specdec/v1/"
LINKED = ("draft_service", "target_service", "coordinator", "gateway")  # imported through links in specdec/
FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file. `path` is relative to the root, with slashes."""

    path: str
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """The dotted name it is imported by."""
        name = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"specdec.{name}" if name.split(".")[0] in LINKED else name

    def at(self, node: ast.AST) -> str:
        """file:line of a node, as editors open it."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def functions(self) -> Iterator[FunctionNode]:
        """Every function, methods and inner ones included."""
        return (node for node in ast.walk(self.tree) if isinstance(node, FunctionNode))


@cache
def project_files() -> tuple[str, ...]:
    """Files of the project relative to the root: all that git does not ignore."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    found = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True).stdout.decode().split("\0")
    return tuple(sorted(path for path in set(found) if path and (ROOT / path).is_file()))


@cache
def modules_below(*folders: str) -> tuple[Module, ...]:
    """Python files below the folders, generated stubs left out."""
    chosen = [
        path
        for path in project_files()
        if path.endswith(".py") and path.split("/")[0] in folders and not path.startswith(GENERATED)
    ]
    return tuple(read_module(path) for path in chosen)


@cache
def read_module(path: str) -> Module:
    """A module of the project by its path."""
    text = (ROOT / path).read_text(encoding="utf-8")
    return Module(path, text, ast.parse(text, filename=path))


def product_modules() -> tuple[Module, ...]:
    """All that is not a test and not generated."""
    return modules_below(*PRODUCT_FOLDERS)


def imported_names(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """(node, dotted name) of every import, inside functions too; for `from a import b` it is a.b."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)


def is_within(name: str, prefixes: tuple[str, ...] | frozenset[str]) -> bool:
    """Whether a dotted name is one of the prefixes or lies below one."""
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def report(problems: list[str], remedy: str) -> str:
    """The message of a failed check: the remedy, then the places."""
    return f"{remedy}\n  " + "\n  ".join(problems)
