"""Imports between packages: the table of docs/architecture.md as a test, and two promises that need a fresh process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Set
from dataclasses import dataclass

import pytest

from tests.hygiene.sources import (
    LINKED,
    ROOT,
    Module,
    imported_names,
    is_within,
    product_modules,
    report,
)

TOOLS = ("bench", "models")
PROJECT = ("specdec", *LINKED, *TOOLS, "tests")
MODEL_LIBRARIES = ("torch", "transformers", "safetensors", "numpy")
NETWORK_LIBRARIES = ("grpc", "grpc_health", "grpc_reflection", "grpc_status")
CLOCKS_AND_CHANCE = ("asyncio", "threading", "time", "datetime", "random", "secrets", "uuid", "os", "socket")
# Plain values and pure functions of the protocol, which every package may use; tree, session and policy are machines.
VALUE_MODULES = ("types", "items", "request", "report", "limits", "noise", "fingerprint", "shape", "heads")
VALUES = tuple(f"specdec.protocol.{name}" for name in VALUE_MODULES)
# Where generated types may be named beside rpc/convert*.py: the edges that register methods and open streams.
EDGES_OF_THE_WIRE = frozenset(
    {
        "specdec.coordinator.service",
        "specdec.coordinator.replicas",
        "specdec.draft_service.service",
        "specdec.target_service.service",
        "specdec.replica.app",
        "specdec.launch.serving",
        "specdec.cli",
    }
)


@dataclass(frozen=True, slots=True)
class Imports:
    """One line of the table. `project`: the parts of the project that may be imported; `never`: outside libraries."""

    package: str
    project: tuple[str, ...]
    never: tuple[str, ...] = ()


TABLE = (
    Imports("specdec.errors", (), MODEL_LIBRARIES + NETWORK_LIBRARIES),
    Imports("specdec.folders", ("specdec.errors",), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("pydantic",)),
    Imports("specdec.process_watch", (), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("pydantic",)),
    Imports("specdec.terminal", (), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("pydantic",)),
    Imports("specdec.streams", ("specdec.terminal",), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("pydantic",)),
    Imports("specdec.tokenizer_file", ("specdec.errors",), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("pydantic",)),
    Imports("specdec.settings", (), MODEL_LIBRARIES + NETWORK_LIBRARIES + ("asyncio",)),
    Imports(
        "specdec.config",
        ("specdec.errors", "specdec.folders", "specdec.settings", *VALUES),
        MODEL_LIBRARIES + NETWORK_LIBRARIES + ("asyncio",),
    ),
    Imports(
        "specdec.protocol",
        ("specdec.errors",),
        MODEL_LIBRARIES + NETWORK_LIBRARIES + CLOCKS_AND_CHANCE,
    ),
    Imports(
        "specdec.policy",
        (
            "specdec.errors",
            "specdec.protocol.types",
            "specdec.protocol.plan",
            "specdec.protocol.policy",
            "specdec.protocol.report",
        ),
        MODEL_LIBRARIES + NETWORK_LIBRARIES + CLOCKS_AND_CHANCE,
    ),
    Imports(
        "specdec.decoding",
        (
            "specdec.errors",
            "specdec.protocol.types",
            "specdec.protocol.noise",
            "specdec.protocol.shape",
            "specdec.engine.cpu.kernels",
            "specdec.engine.cpu.sampling",
        ),
        NETWORK_LIBRARIES + ("asyncio", "transformers"),
    ),
    Imports(
        "specdec.engine",
        (
            "specdec.errors",
            "specdec.terminal",
            "specdec.folders",
            "specdec.process_watch",
            "specdec.tokenizer_file",
            "specdec.protocol.types",
            "specdec.protocol.heads",
            "specdec.protocol.fingerprint",
        ),
        NETWORK_LIBRARIES + ("asyncio", "pydantic"),
    ),
    Imports(
        "specdec.telemetry",
        ("specdec.__version__", "specdec.errors", "specdec.terminal", "specdec.config", *VALUES),
        MODEL_LIBRARIES,
    ),
    Imports(
        "specdec.rpc",
        ("specdec.__version__", "specdec.errors", "specdec.config", "specdec.telemetry", "specdec.v1", *VALUES),
        MODEL_LIBRARIES,
    ),
    Imports(
        "specdec.replica",
        (
            "specdec.process_watch",
            "specdec.errors",
            "specdec.config",
            "specdec.folders",
            "specdec.engine",
            "specdec.rpc",
            "specdec.telemetry",
            "specdec.v1",
            *VALUES,
        ),
        ("transformers",),
    ),
    Imports(
        "specdec.launch",
        (
            "specdec.errors",
            "specdec.folders",
            "specdec.terminal",
            "specdec.streams",
            "specdec.settings",
            "specdec.config",
            "specdec.engine.parallel.place",
            "specdec.engine.loading.model_folder",
            "specdec.rpc",
            "specdec.v1",
            *VALUES,
        ),
        MODEL_LIBRARIES + NETWORK_LIBRARIES,
    ),
    Imports(
        "specdec.traces",
        ("specdec.errors",),
        MODEL_LIBRARIES + NETWORK_LIBRARIES,
    ),
    Imports(
        "specdec.cli",
        (
            "specdec.__version__",
            "specdec.errors",
            "specdec.terminal",
            "specdec.streams",
            "specdec.launch",
            "specdec.traces",
            "specdec.config",
            "specdec.folders",
            "specdec.rpc",
            "specdec.telemetry",
            "specdec.v1",
            "specdec.settings",
            "specdec.advise.settings",
            "specdec.chat",
            "specdec.distill.settings",
            "specdec.engine.loading.model_folder",
            "specdec.coordinator.service",
            "specdec.draft_service.service",
            "specdec.target_service.service",
            *VALUES,
        ),
        MODEL_LIBRARIES,
    ),
    Imports(
        "specdec.chat",
        ("specdec.errors", "specdec.folders", "specdec.tokenizer_file"),
        MODEL_LIBRARIES + NETWORK_LIBRARIES,
    ),
    Imports(
        "specdec.distill",
        (
            "specdec.errors",
            "specdec.folders",
            "specdec.terminal",
            "specdec.settings",
            "specdec.tokenizer_file",
            "specdec.chat",
            "specdec.decoding",
            "specdec.engine",
            *VALUES,
        ),
        NETWORK_LIBRARIES + ("asyncio",),
    ),
    Imports(
        "specdec.advise",
        (
            "specdec.errors",
            "specdec.terminal",
            "specdec.settings",
            "specdec.config",
            "specdec.cli",
            "specdec.launch.serving",
            "specdec.decoding",
            "specdec.distill",
            "specdec.engine",
            "specdec.policy.steps",
            "specdec.rpc.client",
            "specdec.v1",
            *VALUES,
        ),
        NETWORK_LIBRARIES,
    ),
    Imports(
        "specdec.ray",
        (
            "specdec.errors",
            "specdec.terminal",
            "specdec.settings",
            "specdec.config",
            "specdec.rpc.client",
            "specdec.cli.options",
            "specdec.launch.children",
            "specdec.streams",
        ),
        MODEL_LIBRARIES,
    ),
    *(
        Imports(
            service,
            (
                "specdec.errors",
                "specdec.config",
                "specdec.decoding",
                "specdec.engine",
                "specdec.replica",
                "specdec.rpc",
                "specdec.telemetry",
                "specdec.v1",
                "specdec.cli.main",
                "specdec.protocol.tree",
                "specdec.protocol.growth",
                "specdec.protocol.calibration",
                "specdec.policy.steps",
                *VALUES,
                *more,
            ),
            ("transformers",),
        )
        for service, more in (
            ("specdec.draft_service", ()),
            ("specdec.target_service", ("specdec.folders", "specdec.protocol.rejection")),
        )
    ),
    Imports(
        "specdec.coordinator",
        (
            "specdec.process_watch",
            "specdec.errors",
            "specdec.config",
            "specdec.folders",
            "specdec.policy",
            "specdec.protocol",
            "specdec.rpc",
            "specdec.telemetry",
            "specdec.v1",
            "specdec.cli.main",
        ),
        MODEL_LIBRARIES,
    ),
)


def modules_of(package: str) -> list[Module]:
    """The modules a line of the table is about."""
    return [module for module in product_modules() if is_within(module.name, (package,))]


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


def test_every_package_has_a_line() -> None:
    """Claim: no package escapes the table; a new one gets a line before it gets code."""
    packages = [line.package for line in TABLE]
    strays = [
        module.path
        for module in product_modules()
        if not is_within(module.name, tuple(packages)) and not is_within(module.name, TOOLS)
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


def test_the_coordinator_never_loads_torch() -> None:
    """Claim: the coordinator runs where no model library is installed (design section 5).

    Conclusive: a fresh process imports every module of it, and all their imports in turn are in sys.modules.
    """
    names = [module.name for module in modules_of("specdec.coordinator") if not module.name.endswith("__main__")]
    loaded = loaded_by_importing([*names, "specdec.cli.main"])
    assert "specdec.protocol.rejection" in loaded
    never = ("torch", "transformers", "specdec.engine", "specdec.decoding")
    unwanted = sorted(name for name in loaded if is_within(name, never))
    assert not unwanted, f"importing the coordinator loads {unwanted[:5]}; keep them in the other services"


def test_the_protocol_loads_the_standard_library_only() -> None:
    """Claim: specdec.protocol is values and pure functions: it needs no installed package, not even transitively."""
    before = loaded_by_importing([])
    names = [module.name for module in modules_of("specdec.protocol")]
    loaded = {name.split(".")[0] for name in loaded_by_importing(names) - before}
    outside = loaded - set(sys.stdlib_module_names) - {"specdec"}
    assert not outside, f"specdec.protocol loads {sorted(outside)}; it may use the standard library and specdec.errors"
