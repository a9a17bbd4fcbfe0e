"""Imports between packages: the table of docs/architecture.md as a test, and two promises that need a fresh process."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Set

import pytest

from tests.hygiene.import_table import PROJECT, TABLE, TOOLS, Imports
from tests.hygiene.sources import (
    ROOT,
    Module,
    imported_names,
    is_within,
    product_modules,
    report,
)

# Where generated types may be named beside rpc/convert*.py: the edges that register methods and open streams.
EDGES_OF_THE_WIRE = frozenset(
    {
        "specdec.coordinator.service",
        "specdec.coordinator.peers",
        "specdec.coordinator.replicas",
        "specdec.rpc.wire_fields",
        "specdec.draft_service.service",
        "specdec.target_service.service",
        "specdec.replica.app",
        "specdec.launch.serving",
        "specdec.client",
        "specdec.gateway",
    }
)
PLACES = {line.package: place for place, line in enumerate(TABLE)}


def line_of(name: str) -> str | None:
    """The package of the line that a module or name is about: the longest that it lies in."""
    lines = [package for package in PLACES if is_within(name, (package,))]
    return max(lines, key=len, default=None)


def modules_of(package: str) -> list[Module]:
    """The modules a line of the table is about."""
    return [module for module in product_modules() if line_of(module.name) == package]


@pytest.mark.parametrize("line", TABLE, ids=lambda line: line.package)
def test_imports_follow_the_table(line: Imports) -> None:
    """Claim: a package imports only what its line allows (docs/architecture.md).

    Conclusive: every import statement is read, those inside functions too, and none is written relatively.
    """
    allowed = (*line.project, line.package)
    problems = []
    for module in modules_of(line.package):
        for node, name in imported_names(module):
            inside = name.split(".")[0] in PROJECT or name.startswith(".")
            if is_within(name, line.never) or (inside and not is_within(name, allowed)):
                problems.append(f"{module.at(node)}: {line.package} may not import {name}")
    assert not problems, report(problems, "Move the code to a package that may, or pass the value in:")


def circles(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """The groups of more than one node of which each reaches every other (Tarjan 1972)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    waiting: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        numbers[node] = lowest[node] = len(numbers)
        waiting.append(node)
        for following in sorted(graph[node]):
            if following not in numbers:
                visit(following)
            if following in waiting:
                lowest[node] = min(lowest[node], lowest[following])
        if lowest[node] == numbers[node]:
            group = waiting[waiting.index(node) :]
            del waiting[waiting.index(node) :]
            if len(group) > 1:
                found.append(sorted(group))

    for node in sorted(graph):
        if node not in numbers:
            visit(node)
    return found


def test_no_modules_import_each_other() -> None:
    """Claim: no module needs one that needs it, not even inside a function or for its types only: a reader can begin at
    the bottom. Conclusive: every import of the product is an arrow, groups that reach each other are computed; the
    search itself finds a planted circle of three."""
    modules = {module.name: module for module in product_modules() if not is_within(module.name, TOOLS)}

    def needed(name: str) -> set[str]:
        named = (imported for _, imported in imported_names(modules[name]))
        nearest = (one if one in modules else one.rpartition(".")[0] for one in named)
        return {one for one in nearest if one in modules and one != name}

    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [["a", "b", "c"]]
    assert circles({name: needed(name) for name in modules}) == [], "Move what both need below them."


def upward(imports: Mapping[str, Set[str]]) -> list[str]:
    """The imports, names by the module that has them, whose line is below that of the module."""
    return [
        f"{module} -> {name}"
        for module, names in imports.items()
        for name in sorted(names)
        if (own := line_of(module)) and (other := line_of(name)) and PLACES[other] > PLACES[own]
    ]


def test_no_arrow_points_up() -> None:
    """Claim: the table is an order: a package imports from lines above its own only, so none needs what is built on it,
    and the page has the lines in this order. Conclusive: every import is looked up, and a planted one is found; the
    services, which the command runs, name it in their programs (`__main__`) alone, which no module imports."""
    modules = [module for module in product_modules() if not is_within(module.name, TOOLS)]
    assert upward({module.name: {name for _, name in imported_names(module)} for module in modules}) == []
    assert upward({"specdec.advise.serving": {"specdec.cli.demo.fill"}}) == [
        "specdec.advise.serving -> specdec.cli.demo.fill"
    ]
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8").partition("| package | content |")[2]
    heads = [line.split(" | ")[0] for line in page.partition("\n\n")[0].splitlines() if line.startswith("| `")]
    named = [name for head in heads for name in re.findall(r"`([\w.]+)`", head)]
    assert [name if name.startswith("specdec.") else f"specdec.{name}" for name in named] == list(PLACES)


def test_one_module_knows_commands_of_other_packages() -> None:
    """Claim: of the command's modules only its table names advise and distill; it names them by their settings, and
    what they run as text. Conclusive: the table's lines of both are compared."""
    packages = ("specdec.advise", "specdec.distill", "specdec.ray")
    knowing = [line.package for line in TABLE if any(is_within(name, packages) for name in line.project)]
    assert [package for package in knowing if is_within(package, ("specdec.cli",))] == ["specdec.cli.main"]


def test_every_package_has_a_line() -> None:
    """Claim: no package escapes the table; a new one gets a line before it gets code."""
    strays = [
        module.path
        for module in product_modules()
        if line_of(module.name) is None and not is_within(module.name, TOOLS)
    ]
    assert [path for path in strays if path != "specdec/__init__.py"] == [], "Add the package to TABLE of this test."


def test_what_serves_imports_no_tools() -> None:
    """Claim: bench, models and tests are used by people, never by the services."""
    problems = [
        f"{module.at(node)}: imports {name}"
        for module in product_modules()
        if not is_within(module.name, TOOLS)
        for node, name in imported_names(module)
        if is_within(name, (*TOOLS, "tests"))
    ]
    assert not problems, report(problems, "Move what is shared into specdec:")


def test_generated_types_stop_at_the_edge() -> None:
    """Claim: beyond rpc/convert*.py and the modules that register methods, the project speaks in its own values."""
    problems = [
        f"{module.at(node)}: imports {name}"
        for module in product_modules()
        if not is_within(module.name, TOOLS)
        and not module.name.startswith("specdec.rpc.convert")
        and not is_within(module.name, EDGES_OF_THE_WIRE)
        for node, name in imported_names(module)
        if is_within(name, ("specdec.v1",))
    ]
    assert not problems, report(problems, "Convert in specdec/rpc/convert*.py and pass values of specdec.protocol:")


def loaded_by_importing(names: list[str]) -> set[str]:
    """Names of all modules a fresh interpreter holds after importing those."""
    program = f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_coordinators_and_their_clients_never_load_torch() -> None:
    """Claim: the coordinator and its clients run where no model library is installed (design section 5).

    Conclusive: a fresh process imports every module of both, and all their imports in turn are in sys.modules.
    """
    names = [module.name for package in ("specdec.coordinator", "specdec.client") for module in modules_of(package)]
    loaded = loaded_by_importing([*names, "specdec.cli.main"])
    assert "specdec.protocol.rejection" in loaded
    never = ("torch", "transformers", "specdec.engine", "specdec.decoding")
    unwanted = sorted(name for name in loaded if is_within(name, never))
    assert not unwanted, f"importing them loads {unwanted[:5]}; keep them in the other services"


def test_the_protocol_loads_the_standard_library_only() -> None:
    """Claim: specdec.protocol is values and pure functions: it needs no installed package, not even transitively."""
    before = loaded_by_importing([])
    names = [module.name for module in modules_of("specdec.protocol")]
    loaded = {name.split(".")[0] for name in loaded_by_importing(names) - before}
    outside = loaded - set(sys.stdlib_module_names) - {"specdec"}
    assert not outside, f"specdec.protocol loads {sorted(outside)}; it may use the standard library and specdec.errors"
