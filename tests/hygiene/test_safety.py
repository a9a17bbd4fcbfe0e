"""Forbidden in the sources: running data, and naming a machine they were written on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.hygiene.sources import ROOT, Module, imported_names, is_within, product_modules, project_files, report

UNSAFE_MODULES = ("pickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
UNSAFE_CALLS = frozenset({"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "os.system"})
UNSAFE_FLAGS = frozenset({"trust_remote_code", "allow_pickle", "shell"})
# Written in pieces, so that this file does not hold what it looks for.
PYTHON_HOSTS = ("py" + "pi.org", "python" + "hosted.org", "download.py" + "torch.org")
REGISTRY_HOSTS = (*PYTHON_HOSTS, "npm" + "js.", "crates" + ".io")
MACHINE_PATHS = re.compile(r"(?<![\w.}-])(?:/" + "work/|/" + r"root/|/tmp/" + r"w(?!\w))")
PROMPTS = "specdec/embedded/heldout_prompts.jsonl"  # source text of others, whatever it names


def unsafe_uses(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """(node, name) of every import and call that could run data."""
    yield from ((node, f"import {name}") for node, name in imported_names(module) if is_within(name, UNSAFE_MODULES))
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        if called in UNSAFE_CALLS:
            yield node, f"{called}()"
        for flag in node.keywords:
            if flag.arg in UNSAFE_FLAGS and not (isinstance(flag.value, ast.Constant) and flag.value.value is False):
                yield node, f"{flag.arg}={ast.unparse(flag.value)}"


def test_nothing_read_is_ever_run() -> None:
    """Claim: no pickle, no torch.load, no eval or exec, no remote code, no shell: a file or message cannot run.

    Conclusive for calls by name; a flag passed on as a variable counts as set.
    """
    problems = [f"{module.at(node)}: {what}" for module in product_modules() for node, what in unsafe_uses(module)]
    assert not problems, report(problems, "Read data with safetensors, JSON, YAML's safe loader or protobuf instead:")


def test_one_place_starts_python() -> None:
    """Claim: every Python process of specdec is started by `python_command`, so that it imports nothing from the folder
    it is started in; the renderer of chat templates and the maker of a GGUF file's folder, whose packages are below the
    commands, have the same flag, and the second process of the watch is isolated by itself.

    Conclusive for processes started by `sys.executable`: no other module names it.
    """
    named = {
        module.path: ast.unparse(node)
        for module in product_modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.List | ast.Call) and "sys.executable" in {ast.unparse(part) for part in parts_of(node)}
    }
    own = {"specdec/launch/children.py", "specdec/process_watch.py", "specdec/chat/rendering.py", "specdec/folders.py"}
    assert named.keys() == own, named
    assert named["specdec/folders.py"].startswith("[sys.executable, '-P', '-m', GGUF_FOLDER_MAKER, ")
    assert named["specdec/chat/rendering.py"] == "[sys.executable, '-P', '-m', 'specdec.chat.renderer']"
    assert named["specdec/launch/children.py"] == "[sys.executable, '-P', *arguments]"
    assert named["specdec/process_watch.py"].startswith("[sys.executable, '-I', '-S', __file__, ")


def parts_of(node: ast.List | ast.Call) -> list[ast.expr]:
    """The entries of a list, the arguments of a call."""
    return node.elts if isinstance(node, ast.List) else node.args


def text_lines() -> Iterator[tuple[str, int, str]]:
    """(path, number, line) of every text file of the project."""
    for path in project_files():
        content = (ROOT / path).read_bytes()
        if path != PROMPTS and b"\0" not in content:
            for number, line in enumerate(content.decode("utf-8", "replace").splitlines(), 1):
                yield path, number, line


def test_no_file_names_a_registry_or_a_machine() -> None:
    """Claim: the user chooses packages and their location: no package host, no absolute path of a work place."""
    problems = [
        f"{path}:{number}: {line.strip()[:80]}"
        for path, number, line in text_lines()
        if MACHINE_PATHS.search(line) or any(host in line for host in REGISTRY_HOSTS)
    ]
    assert not problems, report(problems, "Leave the host or path out, or make it relative to the repository:")


def unchecked_prints(module: Module) -> Iterator[tuple[ast.Call, str]]:
    """Prints of what is neither a constant nor the result of `printable`, and consoles that rich would make."""
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) in ("Console", "console.Console"):
            yield node, "Console()"
        if ast.unparse(node.func) == "print" and not all(is_printable(argument) for argument in node.args):
            yield node, "print()"


def is_printable(argument: ast.expr) -> bool:
    """Whether an argument of `print` is a constant, by form or by name, or a call that shows what is no text."""
    if isinstance(argument, ast.Call):
        return ast.unparse(argument.func) in ("printable", "printable_line", "shown")
    return isinstance(argument, ast.Constant) or ast.unparse(argument).isupper()


def test_what_is_printed_is_text() -> None:
    """Claim: commands and services print through `specdec.terminal`, which shows control characters. Conclusive for
    calls by name. Tools of developers print their own numbers; the watch, the renderer and the command that compiles
    kernels print in processes of their own, without the package or to no terminal."""
    own = (
        "specdec/terminal.py",
        "specdec/process_watch.py",
        "specdec/chat/renderer.py",
        "bench/",
        "models/",
        "examples/",
    )
    own += ("specdec/engine/cpu/compile_kernels.py",)
    problems = [
        f"{module.at(node)}: {what}"
        for module in product_modules()
        if not module.path.startswith(own)
        for node, what in unchecked_prints(module)
    ]
    assert not problems, report(problems, "Use specdec.terminal, or say and warn of specdec.streams:")
    planted = "print(name)\nprint(f'{x}')\nprint('x', END)\nprint()\nConsole()\nprint(printable(x))\nprint('a' + b)\n"
    found = [node.lineno for node, _ in unchecked_prints(Module("planted.py", planted, ast.parse(planted)))]
    assert found == [1, 2, 5, 7]


def test_the_patterns_find_what_they_look_for() -> None:
    """Claim: the checks above can fail; planted lines are found, similar allowed ones are not."""
    planted = "import pickle\nload(x, trust_remote_code=True)\nexec(x)\nmodel.eval()\nload(x, allow_pickle=False)\n"
    found = [what for _, what in unsafe_uses(Module("planted.py", planted, ast.parse(planted)))]
    assert found == ["import pickle", "trust_remote_code=True", "exec()"]
    assert MACHINE_PATHS.search("see /" + "work/x") and MACHINE_PATHS.search("'/" + "root/.cache'")
    assert not MACHINE_PATHS.search("docs/" + "work/x") and not MACHINE_PATHS.search("/tmp/" + "words")
