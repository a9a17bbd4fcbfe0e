"""A new field of the wire: one description, from which everything on its way follows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from specdec.folders import EMBEDDED_MODELS
from specdec.launch.children import Child, python_command
from tests.hygiene.sources import ROOT
from tests.support.copies import copy_project
from tests.support.services import Client

NEW_FIELD = """\
  // Keeps tokens whose information is near the expected one, up to this probability; in (0, 1]. Absent: 1.
  optional double typical_p = 99 [(wire) = {
    high: 1
    reason: "a probability"
    is_above_low: true
    absent: 1
    is_resolved: true
  }];
"""
# Behind specdec/rpc/convert_items.py: each replica tells of every item that opens a session.
WITNESS = """

def _seen(message: open_item_pb.ResolvedSamplingParams) -> items.ResolvedSamplingParams:
    import sys

    params = params_of_message(message)
    print(f"opened with typical_p {params.typical_p}", file=sys.stderr, flush=True)
    return params


params_of_message, params_from_message = params_from_message, _seen
"""


@dataclass
class Project:
    """A copy of the project with one more field, and services of it that run."""

    folder: Path
    address: str = ""

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Runs Python on the copy."""
        environment = {name: own for name, own in os.environ.items() if not name.startswith("SPECDEC_")}
        return subprocess.run(
            python_command(*arguments),
            env=environment | {"PYTHONPATH": str(self.folder)},
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def generate(self, *flags: str) -> subprocess.CompletedProcess[str]:
        """Runs `specdec generate` on it, of a few tokens."""
        asked = ("generate", "Once upon a time", "--max-tokens", "8", "--address", self.address)
        return self.run("-m", "specdec.cli", *asked, *flags)

    def opened(self, service: str) -> list[str]:
        """What a replica has told of the items that opened its sessions."""
        lines = (self.folder / f"{service}.err").read_text(encoding="utf-8").splitlines()
        return [line for line in lines if line.startswith("opened with")]


def copy_with_field(folder: Path) -> None:
    """Copies the project, adds the field to its description, and regenerates what `make proto` does."""
    copy_project(folder)
    for kernels in (ROOT / "specdec" / "engine" / "cpu").glob("*.so"):
        shutil.copy(kernels, folder / "specdec" / "engine" / "cpu")
    proto = folder / "proto" / "specdec" / "v1" / "coordinator_service.proto"
    before, own, rest = proto.read_text(encoding="utf-8").partition("message SamplingParams {")
    fields, end, rest = rest.partition("\n}\n")
    proto.write_text(f"{before}{own}{fields}\n{NEW_FIELD}{end.lstrip()}{rest}", encoding="utf-8")
    command = ["make", "-o", "install", "proto", f"BIN={Path(sys.executable).parent}"]
    made = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    assert made.returncode == 0, made.stderr


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The copy, with a target, a draft and a coordinator of the embedded pair."""
    folder = tmp_path_factory.mktemp("project")
    copy_with_field(folder)
    with (folder / "specdec" / "rpc" / "convert_items.py").open("a", encoding="utf-8") as file:
        file.write(WITNESS)
    with ExitStack() as stack:

        def started(service: str, *arguments: str) -> str:
            errors = stack.enter_context((folder / f"{service}.err").open("w", encoding="utf-8"))
            environment = {"PYTHONPATH": str(folder)}
            child = Child(service, ["--port=0", *arguments], environment, stderr=errors)
            return stack.enter_context(child).wait_ready()

        target = started("target", "--threads=1", f"--model={EMBEDDED_MODELS / 'target'}")
        draft = started("draft", "--threads=1", f"--model={EMBEDDED_MODELS / 'draft'}")
        links = (f"--target={target}", f"--draft={draft}", f"--tokenizer={EMBEDDED_MODELS / 'target'}")
        address = started("coordinator", *links, "--speculation-policy=fixed")
        client = Client(address)
        stack.callback(client.close)
        client.wait_for_draft()
        yield Project(folder, address)


@pytest.mark.more
def test_a_field_is_described_once(project: Project) -> None:
    """Claim: a sampling parameter that is added to its message in proto/, and nowhere else, travels after `make proto`:
    from a flag of `specdec generate` through the coordinator to target and draft; absent it is its default; beyond its
    limit the coordinator refuses it by field, value and limit; the help has its comment, and HTTP takes it.

    Conclusive: the only difference from the project is the field (and a line on standard error for each item that
    opens a session, by which the replicas tell what arrived). The three services and the command are processes of the
    copy, over real sockets; nothing of a refused request arrives.
    """
    for flags, value in ((("--typical-p", "0.5"), 0.5), ((), 1.0)):
        answered = project.generate(*flags)
        assert answered.returncode == 0 and answered.stdout.strip(), answered.stderr
        for service in ("target", "draft"):
            assert project.opened(service)[-1] == f"opened with typical_p {value}"
    count = len(project.opened("target"))
    for wrong, words in (("1.5", "a number from 0 to 1"), ("0", "above 0 and at most 1")):
        refused = project.generate("--typical-p", wrong)
        assert refused.returncode != 0
        assert f"typical_p is {float(wrong)}; it must be {words}" in refused.stderr
    assert len(project.opened("target")) == count
    help_text = " ".join(project.generate("--help").stdout.split())
    assert "--typical-p X Keeps tokens whose information is near the expected one" in help_text
    shown = project.run("-c", "from specdec.gateway.requests import ChatRequest as own; print(*own.model_fields)")
    assert "typical_p" in shown.stdout.split(), shown.stderr
