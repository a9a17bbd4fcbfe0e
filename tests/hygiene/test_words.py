"""What is written beside the code: contracts on public names, an opening on each module, a claim on each test.

Beside the claim each test must hold a check; what counts as one is `CHECKING_CALL`.
"""

from __future__ import annotations

import ast
import re

from tests.hygiene.sources import FunctionNode, Module, is_within, modules_below, product_modules, report

CONTRACT_PACKAGES = ("specdec.protocol", "specdec.decoding", "specdec.engine", "specdec.rpc")
LEFT_FOR_LATER = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
# Waiting with a limit is a check: it fails by itself when what is awaited does not come.
CHECKING_CALL = re.compile(r"(^|[._])(raises|check|assert|expect|fail|wait_for|until)", re.IGNORECASE)


def is_property(function: ast.AST) -> bool:
    """A property's name and type say what it is; its contract is the class's."""
    return any("property" in ast.unparse(decorator) for decorator in getattr(function, "decorator_list", ()))


def public_definitions(body: list[ast.stmt]) -> list[FunctionNode | ast.ClassDef]:
    """Classes, functions and methods whose names do not begin with an underscore, properties left out."""
    found = []
    for node in body:
        if isinstance(node, (ast.ClassDef, FunctionNode)) and not node.name.startswith("_") and not is_property(node):
            found.append(node)
            if isinstance(node, ast.ClassDef):
                found += public_definitions(node.body)
    return found


def interface_methods(modules: list[Module]) -> set[str]:
    """Methods whose contract stands once, on a `Protocol` class; those that implement them need not repeat it."""
    return {
        method.name
        for module in modules
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and any("Protocol" in ast.unparse(base) for base in node.bases)
        for method in node.body
        if isinstance(method, FunctionNode) and ast.get_docstring(method)
    }


def test_public_names_state_their_contract() -> None:
    """Claim: every public class, function and method of the packages others build on has a docstring."""
    modules = [module for module in modules_below("specdec") if is_within(module.name, CONTRACT_PACKAGES)]
    stated = interface_methods(modules)
    problems = [
        f"{module.at(node)}: {node.name}"
        for module in modules
        for node in public_definitions(module.tree.body)
        if not ast.get_docstring(node) and node.name not in stated
    ]
    assert not problems, report(problems, "State the contract: what it changes, raises, and what its shapes are:")


def test_every_module_says_what_it_knows() -> None:
    """Claim: a module opens with a docstring, tests included; an empty one marks a folder and needs none."""
    problems = [
        f"{module.path}:1"
        for module in (*product_modules(), *modules_below("tests"))
        if module.tree.body and not ast.get_docstring(module.tree)
    ]
    assert not problems, report(problems, "Open the module with two to six sentences: what it knows and what not:")


def test_nothing_is_left_for_later() -> None:
    """Claim: no marker of unfinished work; what is not done is an issue."""
    problems = [
        f"{module.path}:{number}: {line.strip()[:80]}"
        for module in (*product_modules(), *modules_below("tests"))
        for number, line in enumerate(module.text.splitlines(), 1)
        if LEFT_FOR_LATER.search(line)
    ]
    assert not problems, report(problems, "Do it, or leave the mark out:")


def checks_something(test: FunctionNode) -> bool:
    """Whether it asserts, expects an error, or calls a function named for checking."""
    for node in ast.walk(test):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call) and CHECKING_CALL.search(ast.unparse(node.func)):
            return True
    return False


def functions_pytest_runs(module: Module) -> list[FunctionNode]:
    """The functions pytest runs."""
    return [function for function in module.functions() if function.name.startswith("test_")]


def test_every_test_checks_something() -> None:
    """Claim: no test passes by merely running: each asserts, raises or calls a check."""
    problems = [
        f"{module.at(test)}: {test.name}"
        for module in modules_below("tests")
        for test in functions_pytest_runs(module)
        if not checks_something(test)
    ]
    assert not problems, report(problems, "Assert what the test claims:")


def test_every_test_states_its_claim() -> None:
    """Claim: each test's docstring says what is claimed; the reader need not work it out from the code."""
    problems = [
        f"{module.at(test)}: {test.name}"
        for module in modules_below("tests")
        for test in functions_pytest_runs(module)
        if not ast.get_docstring(test)
    ]
    assert not problems, report(problems, "Add a docstring: the claim, its source, why the check is conclusive:")
