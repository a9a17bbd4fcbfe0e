"""The images: the packages and files of the Dockerfile, by reading it; it is linted, not built, here."""

from __future__ import annotations

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.requirements import ENGINE, LOCK, PROJECT, entries, name_of, requirements, sections
from specdec.engine.cuda.kernels.launch import PREBUILT as PREBUILT_FOLDER
from tests.deploy.images import DOCKERFILE, IMAGE_ROOT, instructions, stages, stages_of
from tests.deploy.manifests import SERVICES
from tests.hygiene.sources import ROOT, imported_names, is_within, modules_below

KERNELS = "specdec/engine/cpu/_kernels.so"
COMPILING = "specdec/engine/cpu/compile_kernels.py"
PREBUILT = str(PREBUILT_FOLDER.relative_to(ROOT))
PORTS = {"coordinator": "50051", "target": "50052", "draft": "50053", "gateway": "8000"}
# Distribution -> what is imported of it, where the names differ.
IMPORTED_AS = {
    "grpcio": "grpc",
    "grpcio-health-checking": "grpc_health",
    "grpcio-reflection": "grpc_reflection",
    "grpcio-status": "grpc_status",
    "prometheus-client": "prometheus_client",
    "protobuf": "google",
    "pyyaml": "yaml",
    "opentelemetry-api": "opentelemetry",
    "opentelemetry-sdk": "opentelemetry",
    "opentelemetry-exporter-otlp-proto-grpc": "opentelemetry",
}


def test_the_dockerfile_is_linted() -> None:
    """Claim: hadolint reports nothing, warnings included."""
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, str(DOCKERFILE)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "", done.stdout


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_has_a_stage(name: str) -> None:
    """Claim: a service's image runs its command as a plain user and names its port; every file it copies is in the
    repository and in the builder's context."""
    stage = stages()[name]
    assert stage.entrypoint == ["tini", "--", "python", "-m", "specdec.cli", name]
    assert stage.user == "10001:10001"
    assert ("EXPOSE", PORTS[name]) in instructions()
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    let_through = [line[1:] for line in ignored if line.startswith("!")]
    for source, _ in stage.copies:
        assert (ROOT / source).exists(), source
        assert any(source == path or source.startswith(path + "/") for path in let_through), source
    packages = {source for source, _ in stage.copies if (ROOT / source / "__init__.py").is_file()}
    assert packages == {"specdec", f"{name}_service" if name in ("draft", "target") else name}


def test_the_base_is_pinned() -> None:
    """Claim: every image built on from outside has a version."""
    outside = [rest for instruction, rest in instructions() if instruction == "ARG" and "IMAGE=" in rest]
    assert outside and all(re.search(r":\d+\.\d+", image) for image in outside)


@pytest.mark.parametrize("service", ("coordinator", "gateway"))
def test_no_model_library_is_needed(service: str) -> None:
    """Claim: the images of coordinator and gateway go without torch and install all else that their code imports.

    Conclusive: every import of the service and of the specdec modules it reaches, inside functions too, is walked;
    the packages are compared with the rest of pyproject.toml's list. `test_running` starts it without the others.
    """
    left = {name_of(line) for line in requirements(PROJECT, service)}
    everything = {name_of(line) for line in requirements(PROJECT, "replica")}
    assert everything - left == ENGINE
    modules = {module.name: module for module in modules_below(service, "specdec")}
    waiting = [name for name in modules if is_within(name, (f"specdec.{service}",)) and "__main__" not in name]
    reached: set[str] = set()
    outside: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        for _, imported in imported_names(modules[name]):
            own = next((part for part in (imported, imported.rpartition(".")[0]) if part in modules), None)
            if own is not None:
                waiting.append(own)
            elif imported.split(".")[0] != "specdec":
                outside.add(imported.split(".")[0])
    needed = outside - sys.stdlib_module_names
    brought_along = {"huggingface_hub", "pydantic_core"}  # by tokenizers and pydantic
    offered = {IMPORTED_AS.get(name, name) for name in left} | brought_along
    assert needed <= offered, needed - offered
    assert not {name for name in reached if name.startswith(("specdec.engine", "specdec.decoding", "specdec.replica"))}


def test_requirements_are_the_projects_own() -> None:
    """Claim: images install pyproject.toml's list, the gateway's what its extra names, Ray's also Ray, by the sections
    of the lock. Conclusive: what
    the command prints for a stage holds the names of the stage's list; `test_supply_chain` follows them further."""
    own = requirements(PROJECT, "replica")
    assert "grpcio>=1.74" in own and len(own) == len({name_of(line) for line in own})
    extra = ["h11", "jinja2", "starlette", "uvicorn"]
    assert [name_of(line) for line in requirements(PROJECT, "ray")[len(own) :]] == [*extra, "ray"]
    command = [sys.executable, str(ROOT / "deploy" / "requirements.py")]
    for image, names in (
        ("coordinator", ["coordinator"]),
        ("gateway", ["coordinator", "gateway"]),
        ("replica", ["coordinator", "replica", "torch"]),
        ("ray", ["coordinator", "replica", "torch", "ray"]),
    ):
        done = subprocess.run([*command, *names], capture_output=True, text=True, timeout=60)
        held = {name_of(entry) for entry in entries(done.stdout)}
        assert {name_of(line) for line in requirements(PROJECT, image)} <= held
    assert not ENGINE & {name_of(entry) for entry in sections(LOCK.read_text(encoding="utf-8"))["coordinator"]}
    tree = ast.parse((ROOT / "deploy" / "requirements.py").read_text(encoding="utf-8"))
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    assert names <= sys.stdlib_module_names, "it runs before anything is installed"


def test_nothing_is_installed_without_the_lock() -> None:
    """Claim: every command of the Dockerfile that installs packages reads what the lock's command printed, with hashes
    demanded, but for torch, whose section has them unless TORCH_INDEX_URL names another index."""
    commands = [
        rest for instruction, rest in instructions() if instruction == "RUN" and " install --no-cache-dir" in rest
    ]
    assert len(commands) == 6
    for command in commands:
        (section,) = re.findall(r"python deploy/requirements\.py ([a-z ]+) >", command)
        assert "--require-hashes" in command or section == "torch"
        assert command.count(" -r ") == command.count(" install ") == 1


def problems_of_kernels(text: str) -> list[str]:
    """What keeps images of a Dockerfile from having the CPU engine's kernels, or the compiler from staying outside."""
    found = stages_of(text)
    if "kernels" not in found:
        return ["no stage compiles the kernels"]
    problems = []
    stage = found["kernels"]
    if not any(re.search(r"install .*\bgcc\b.*\blibc6-dev\b", command) for command in stage.commands):
        problems.append("the stage installs no compiler")
    if f"python {COMPILING} --complete" not in stage.commands:
        problems.append("the stage does not compile all instruction sets")
    if ("specdec/engine/cpu", "specdec/engine/cpu") not in stage.copies:
        problems.append("the stage lacks the sources")
    taken = ("kernels", f"{IMAGE_ROOT}/{KERNELS}", f"{Path(KERNELS).parent}/")
    problems += [f"{name} lacks the library" for name in ("draft", "target", "ray") if taken not in found[name].taken]
    problems += [
        f"{name} has a compiler"
        for name in (*SERVICES, "service", "replica", "ray")
        if any("gcc" in command for command in found[name].commands)
    ]
    return problems


def test_images_that_compute_have_the_kernels() -> None:
    """Claim: a stage with a compiler makes the library; the images of draft and target and that of Ray take it from
    there, and no image keeps a compiler; the builder gets the sources, and no library of the checkout.

    Conclusive: whatever line of these is left out is found; `test_the_stage_of_the_kernels_compiles_them` runs them.
    """
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert problems_of_kernels(text) == []
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert "!specdec" in ignored and ignored.index("**/_kernels.so") > ignored.index("!specdec")
    assert not [line for line in ignored if line.rstrip("*").endswith((".c", ".h", "native", "native/"))]
    planted = {
        "COPY --from=kernels /opt/specdec/specdec/engine/cpu/_kernels.so specdec/engine/cpu/\n": "lacks the library",
        "COPY specdec/engine/cpu specdec/engine/cpu\n": "lacks the sources",
        "RUN python specdec/engine/cpu/compile_kernels.py --complete\n": "does not compile",
        " --complete": "does not compile",
        "gcc libc6-dev": "installs no compiler",
    }
    for line, problem in planted.items():
        assert line in text, line
        assert any(problem in found for found in problems_of_kernels(text.replace(line, ""))), line
    without_stage = re.sub(r"FROM \S+ AS kernels\n(?:.*\n)*?\n", "", text)
    assert problems_of_kernels(without_stage) == ["no stage compiles the kernels"]
    second = text.rpartition("COPY --from=kernels")
    assert problems_of_kernels(second[0] + second[2].partition("\n")[2]) == ["ray lacks the library"]


def problems_of_triton(text: str) -> list[str]:
    """What keeps images of a Dockerfile from starting Triton without a compiler."""
    found = stages_of(text)
    stage = found["triton"]
    problems = []
    if not any(re.search(r"install .*\bgcc\b.*\blibc6-dev\b", command) for command in stage.commands):
        problems.append("the stage installs no compiler")
    if (stage.base, "/opt/venv/bin/python deploy/prebuild.py prebuilt") != ("replica-packages", stage.commands[-1]):
        problems.append("the stage does not compile for the packages of the images")
    if ("deploy/prebuild.py", "deploy/") not in stage.copies:
        problems.append("the stage lacks the script")
    taken = ("triton", f"{IMAGE_ROOT}/prebuilt", PREBUILT)
    for name in ("draft", "target", "ray"):
        if taken not in found[name].taken:
            problems.append(f"{name} lacks the module")
        if found[name].environment.get("TRITON_CACHE_DIR") != "/tmp/triton":  # the folder that all may write
            problems.append(f"{name} has no cache")
    return problems


def test_images_that_compute_can_start_triton() -> None:
    """Claim: a stage with a compiler makes what Triton would compile before its first launch, with the very packages
    of the images; those of draft and target and that of Ray take it to where it is looked for, and have a cache that
    they may write. Conclusive: whatever line of these is left out is found; `tests/cuda/kernels/test_start.py` starts
    Triton with no more than this."""
    text = DOCKERFILE.read_text(encoding="utf-8")
    assert problems_of_triton(text) == []
    start = text.index("FROM replica-packages AS triton")
    planted = {
        "gcc libc6-dev": "installs no compiler",
        "COPY deploy/prebuild.py deploy/\n": "lacks the script",
        "RUN /opt/venv/bin/python deploy/prebuild.py prebuilt\n": "does not compile",
        f"COPY --from=triton {IMAGE_ROOT}/prebuilt {PREBUILT}\n": "lacks the module",
        " TRITON_CACHE_DIR=/tmp/triton": "has no cache",
    }
    for line, problem in planted.items():
        assert line in text[start:], line
        without = text[:start] + text[start:].replace(line, "")
        assert any(problem in found for found in problems_of_triton(without)), line
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text(encoding="utf-8").split()
    assert "!deploy/prebuild.py" in ignored


@pytest.mark.more
def test_the_stage_of_the_kernels_compiles_them(tmp_path: Path) -> None:
    """Claim: with what the stage copies, and this machine's compiler, its command makes the library where the images
    take it from. Conclusive: the command runs in a folder that holds nothing else."""
    stage = stages()["kernels"]
    for source, destination in stage.copies:
        left_out = shutil.ignore_patterns("__pycache__", "_kernels.so")
        shutil.copytree(ROOT / source, tmp_path / destination, ignore=left_out)
    (command,) = [command for command in stage.commands if COMPILING in command]
    words = [sys.executable, *shlex.split(command)[1:]]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for _, source, _ in stages()["target"].taken:
        if KERNELS in source:
            assert (tmp_path / Path(source).relative_to(IMAGE_ROOT)).stat().st_size > 10_000
