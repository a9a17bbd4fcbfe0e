"""What is written beside the code: contracts on public names, an opening on each module, a claim on each test.

Beside the claim each test must hold a check; what counts as one is `CHECKING_CALL`.
"""

from __future__ import annotations

import ast
import re

from tests.hygiene.sources import (
    ROOT,
    FunctionNode,
    Module,
    is_within,
    modules_below,
    product_modules,
    project_files,
    report,
)

CONTRACT_PACKAGES = ("specdec.protocol", "specdec.decoding", "specdec.engine", "specdec.rpc")
LEFT_FOR_LATER = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")
# Waiting with a limit is a check: it fails by itself when what is awaited does not come.
CHECKING_CALL = re.compile(r"(^|[._])(raises|check|assert|expect|fail|wait_for|until)", re.IGNORECASE)


# Words of an earlier code, each with the term of the papers and of vLLM that stands in its place. Case does not count.
UNUSED_WORDS = {
    r"laws?": "sampling parameters, or the target distribution",
    r"evidence": "verification result, or sampler output",
    r"corrections?|replacement tokens?": "recovered token",
    r"evict(s|ed|ing|ions?)": "preempted; only blocks are evicted",
    r"segments?": "chunk, or round group",
    r"rooms?": "admission, space or capacity",
    r"adopt\w*": "match prefix",
    r"vacat\w*": "free",
    r"gatherings?": "step delay",
    r"outlooks?": "estimate",
    r"trials?": "exploration, or probe",
    r"in vain": "without gain",
    r"leaf": "node",
    r"presum\w*": "assume",
    r"crossings?": "copy to the host",
    r"figures?": "metric, statistic or measurement",
    r"(not|un)[ -]?proven": "not supported",
    r"whoever|so many|nobody|anybody|somebody": "a noun: the client, the draft, a session",
}
UNUSED = re.compile(r"(?<![a-z])(?:" + "|".join(f"(?:{word})" for word in UNUSED_WORDS) + r")(?![a-z])", re.IGNORECASE)
# The same letters where they belong to others: a library's name, a field of Kubernetes, an argument of Triton.
BORROWED = re.compile(r"leaf modules?|correction factor|eviction_policy|evict_first")
TEXT_SUFFIXES = (".py", ".proto", ".md", ".yaml", ".toml", "Makefile", "Dockerfile")


def is_prose_of_the_project(path: str) -> bool:
    """Files people read; generated stubs, this list and the questions of the chat draft's recipe left out."""
    others = ("tests/hygiene/test_words.py", "models/chat_questions.py")
    return path.endswith(TEXT_SUFFIXES) and not path.startswith("specdec/v1/") and path not in others


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


def unused_words(text: str) -> list[str]:
    """Words of `text` that have another term here."""
    return [found.group() for found in UNUSED.finditer(BORROWED.sub("", text))]


def test_one_word_per_concept() -> None:
    """Claim: a concept has one word, the field's; words that meant the same before are nowhere in code, docs or tests.

    Conclusive: every file people read is searched, names and prose alike, and the search finds each word in a sentence
    and inside a name.
    """
    assert all(
        unused_words(text) for text in ("The law of it", "law_of(x)", "MAX_LAWS", "An evicted session", "evictions=1")
    )
    assert not unused_words("flaw, lawn, an evictable block, broom")
    problems = [
        f"{path}:{number}: {', '.join(words)}"
        for path in project_files()
        if is_prose_of_the_project(path)
        for number, line in enumerate((ROOT / path).read_text(encoding="utf-8").splitlines(), 1)
        if (words := unused_words(line))
    ]
    remedy = "Use the term of the glossary in docs/architecture.md:\n" + "\n".join(
        f"  {word}: {term}" for word, term in UNUSED_WORDS.items()
    )
    assert not problems, report(problems, remedy)
