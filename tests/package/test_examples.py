"""The programs of `examples/` against the shipped pair, which serves; and what a newcomer's tools are told: hooks of
pre-commit, the workflow of a public forge, the pages' index."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from google.protobuf import json_format

from specdec.v1 import coordinator_service_pb2 as pb
from tests.hygiene.sources import ROOT
from tests.support.services import MODELS, Services, running

EXAMPLES = ROOT / "examples"
PROMPT = "def area(width, height):\n"
SAMPLING = {"max_tokens": 64, "temperature": 0.7, "seed": 1}  # of the examples


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    """The shipped pair."""
    with running(MODELS / "target", MODELS / "draft", threads=1, dtype="float32") as started:
        yield started


def output_of(*command: str | Path, folder: Path = ROOT) -> str:
    """Standard output of a program that has to succeed."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_output(output: str, services: Services) -> None:
    """The text of a client is that of `Generate` with its parameters; a line with the acceptance follows."""
    text, _, last = output.rstrip("\n").rpartition("\n")
    assert text == services.client.generate(PROMPT, **SAMPLING).text
    assert re.fullmatch(r"\[\d+% of the draft tokens accepted\]", last)


@pytest.mark.more
def test_the_python_client_prints_the_text(services: Services) -> None:
    """Claim: `examples/generate.py` prints the text of its prompt. Conclusive: with a seed it is that of another client
    of the same coordinator."""
    check_output(output_of(sys.executable, EXAMPLES / "generate.py", PROMPT, services.coordinator.address), services)


def test_the_readme_shows_the_python_client() -> None:
    """Claim: the client in README.md is `examples/generate.py`, line by line, so it runs."""
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert (EXAMPLES / "generate.py").read_text(encoding="utf-8").endswith(shown)


@pytest.mark.more
def test_acceptance_is_drawn_by_class(services: Services, tmp_path: Path) -> None:
    """Claim: each class has one line, with its prompts, its share of accepted tokens and a bar; the best comes first.
    Conclusive: classes and numbers of prompts are the file's, and the shares fall from line to line."""
    lines = [json.loads(line) for line in (EXAMPLES / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    chosen = [line for line in lines if line["class"] in ("code", "prose")][:5]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in chosen), encoding="utf-8")
    program = EXAMPLES / "acceptance_by_class.py"
    output = output_of(sys.executable, program, file, "--address", services.coordinator.address, "--max-tokens", "24")
    rows = re.findall(r"│ (\w+) +│ +(\d+) +│ +(\d+) +│ +(\d+)% +│ +([\d.]+) +│", output)
    assert {name: int(count) for name, count, *_ in rows} == {"code": 3, "prose": 2}
    shares = [int(share) for *_, share, _ in rows]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0 and "█" in output
    assert all(int(drafted) > 0 and 1 <= float(tokens) <= 5 for _, _, drafted, _, tokens in rows)


def code_of(script: str) -> str:
    """JavaScript without its comments."""
    return re.sub(r"//.*", "", script)


def test_the_javascript_client_uses_names_of_the_proto() -> None:
    """Claim: every field that `examples/generate.mjs` sends or reads is in the proto, and so are its service and call.
    Conclusive: its request, as JSON, is parsed as the message, which refuses unknown names; each path of names that it
    reads is followed from the answer down."""
    script = code_of((EXAMPLES / "generate.mjs").read_text(encoding="utf-8"))
    (literal,) = re.findall(r"client\.Generate\((\{.*?\})\);", script, re.DOTALL)
    told = re.sub(r"(\w+):", r'"\1":', literal.replace("prompt", '"a prompt"'))
    request = json_format.Parse(told, pb.GenerateRequest())
    assert request.text == "a prompt" and request.sampling.seed == SAMPLING["seed"]
    service = pb.DESCRIPTOR.services_by_name["CoordinatorService"]
    assert "Generate" in service.methods_by_name and service.name in script
    paths = re.findall(r"response((?:\.\w+)+)", script)
    assert ".finished.statistics.draft_acceptance_rate" in paths and ".delta.text" in paths
    for path in paths:
        message = service.methods_by_name["Generate"].output_type
        for name in path.split(".")[1:]:
            message = message.fields_by_name[name].message_type


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="Node is not installed")
def test_the_javascript_client_prints_the_text(services: Services, tmp_path: Path) -> None:
    """Claim: `examples/generate.mjs` prints the text of its prompt, from the proto files alone. Conclusive: as for
    Python; its packages are installed by the command that it names."""
    script = (EXAMPLES / "generate.mjs").read_text(encoding="utf-8")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "generate.mjs").write_text(script, encoding="utf-8")
    (tmp_path / "package.json").write_text("{}", encoding="utf-8")
    shutil.copytree(ROOT / "proto", tmp_path / "proto")
    (install,) = re.findall(r"^//   (npm install .*)$", script, re.MULTILINE)
    output_of(*install.split(), folder=tmp_path)
    check_output(
        output_of("node", "examples/generate.mjs", PROMPT, services.coordinator.address, folder=tmp_path), services
    )


def test_hooks_name_tools_that_are_installed() -> None:
    """Claim: each hook of .pre-commit-config.yaml runs a tool of the environment that `make install` makes, on files
    that exist: ruff's check and format, mypy, and the test of the stubs."""
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    hooks = {hook["id"]: hook for hook in repository["hooks"]}
    assert repository["repo"] == "local" and hooks.keys() == {"ruff-check", "ruff-format", "mypy", "stubs"}
    for hook in hooks.values():
        tool, *arguments = hook["entry"].split()
        assert hook["language"] == "system" and tool.startswith(".venv/bin/")
        assert Path(sys.executable).with_name(Path(tool).name).exists()
        assert all((ROOT / argument).exists() for argument in arguments if argument.startswith("tests/"))
    pattern = re.compile(hooks["stubs"]["files"])
    found = [
        bool(pattern.search(path)) for path in ("proto/specdec/v1/types.proto", "specdec/v1/types_pb2.py", "README.md")
    ]
    assert found == [True, True, False]


def test_the_workflow_runs_the_gate() -> None:
    """Claim: the workflow of the public forge is valid by its schema, and its one command is `.ci/run`, which can be
    run. Conclusive: the schema is the forge's own, from check-jsonschema."""
    file = ROOT / ".github" / "workflows" / "ci.yml"
    checker = Path(sys.executable).with_name("check-jsonschema")
    output_of(checker, "--builtin-schema", "vendor.github-workflows", file)
    jobs = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"]
    assert [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step] == [".ci/run"]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_the_index_names_every_page() -> None:
    """Claim: docs/README.md has each page of the folder, once, and no other; commands of CONTRIBUTING.md that `make`
    runs are targets of the Makefile."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert sorted(re.findall(r"^\|.*\| \[[^]]+\]\((\w+\.md)\) \|$", index, re.MULTILINE)) == sorted(pages)
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = re.findall(r"`?make ([a-z-]+)", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(set(asked)) > 4 and set(asked) <= targets
