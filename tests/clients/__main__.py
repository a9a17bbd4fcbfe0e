"""`python -m tests.clients`: programs of others, unmodified, against a running `specdec serve --http-port`.

Each client gets an environment of its own, made once, and a short program (`scripts/`) that asks as the client's pages
show it: a chat whole and streamed, with seed and usage, and tools. Texts and usage must be those of `Generate`, calls
those that the model wrote. Prints a table; ends with 1 if an answer differs or a client fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.clients.served import Served, served

SCRIPTS = Path(__file__).parent / "scripts"
CLIENT_TIMEOUT_S = 600
TEXTS = ("whole", "streamed", "usage", "streamed usage")


@dataclass(frozen=True, slots=True)
class Foreign:
    """A client: its packages with versions, its program, and the answers that the program gives."""

    packages: tuple[str, ...]
    script: str
    asked: tuple[str, ...]


CLIENTS = {
    "langchain-openai": Foreign(
        ("langchain-openai==1.7.4",), "langchain_openai_chat.py", (*TEXTS, "calls", "streamed calls")
    ),
    "instructor": Foreign(("instructor==1.17.0",), "instructor_tools.py", ("calls",)),
    "pydantic-ai": Foreign(("pydantic-ai-slim[openai]==2.68.0",), "pydantic_ai_agent.py", (*TEXTS, "calls")),
    "litellm": Foreign(("litellm==1.110.2",), "litellm_completion.py", (*TEXTS, "calls")),
    "llm": Foreign(("llm==0.36",), "llm_model.py", (*TEXTS, "calls", "streamed calls")),
}


def python_of(name: str, environments: Path) -> Path:
    """The interpreter of a client's environment, which is made if it is not there. Raises CalledProcessError."""
    folder, client = environments / name, CLIENTS[name]
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.is_file() or done.read_text(encoding="utf-8") != " ".join(client.packages):
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *client.packages], check=True)
        done.write_text(" ".join(client.packages), encoding="utf-8")
    return python


def answers_of(name: str, python: Path, place: Served) -> dict[str, Any]:
    """What a client's program prints: its version and its answers. Raises RuntimeError with its last words."""
    command = [python, SCRIPTS / CLIENTS[name].script]
    job = json.dumps(place.job)
    done = subprocess.run(command, input=job, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def differences(asked: Sequence[str], answers: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """The answers that are missing or not the expected ones."""
    return [
        f"{name}: {answers.get(name)!r}, not {expected[name]!r}"
        for name in asked
        if answers.get(name) != expected[name]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the clients; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(CLIENTS)} (all)")
    parser.add_argument(
        "--environments", type=Path, default=Path("out/clients"), help="folder of the environments (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - CLIENTS.keys():
        parser.error(f"{', '.join(sorted(unknown))}: not known; choose from {', '.join(CLIENTS)}")
    table = Table("client", "version", "asked", "result")
    is_good = True
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as place:
        for name in options.names or CLIENTS:
            version, asked = "", CLIENTS[name].asked
            try:
                found = answers_of(name, python_of(name, options.environments), place)
                version, wrong = found["version"], differences(asked, found["answers"], place.expected)
            except (RuntimeError, subprocess.SubprocessError) as error:
                wrong = [str(error)]
            is_good &= not wrong
            table.add_row(name, version, ", ".join(asked), "\n".join(wrong) or "as Generate's")
    Console().print(table)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
