"""`python -m tests.clients`: programs of others, unmodified, against a running `specdec serve --http-port`.

Each client gets an environment of its own, made once, and a short program (`scripts/`) that asks as the client's pages
show it: a chat whole and streamed, with seed and usage, tools, and objects of a type. Texts and usage must be those of
`Generate`, calls those that the model wrote, every answer of the chat model an object of the type. A benchmark's report
must have what the coordinator counted meanwhile, an evaluation the scores of its own model. Prints a table; ends with 1
if an answer differs or a client fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.clients.served import CASES, COUNTERS, OBJECTS, SCORES, served
from tests.support.environments import python_of

SCRIPTS = Path(__file__).parent / "scripts"
CLIENT_TIMEOUT_S = 600
TEXTS = ("whole", "streamed", "usage", "streamed usage")
COUNTED = ("answered", "failed", *COUNTERS)
GUIDELLM = ("guidellm==0.8.1", "torch==2.13.0")
AIPERF = ("aiperf==0.13.0",)
LM_EVAL = ("lm-eval[api]==0.4.13", "torch==2.13.0", "transformers==5.23.0", "accelerate==1.15.0")


@dataclass(frozen=True, slots=True)
class Foreign:
    """A client: its packages with versions, itself first, its program, the answers that the program gives, and the
    program's flags."""

    packages: tuple[str, ...]
    script: str
    asked: tuple[str, ...]
    flags: tuple[str, ...] = ()


CLIENTS = {
    "langchain-openai": Foreign(
        ("langchain-openai==1.7.4",), "langchain_openai_chat.py", (*TEXTS, "calls", "streamed calls", *OBJECTS[:2])
    ),
    "instructor": Foreign(
        ("instructor==1.17.0",),
        "instructor_tools.py",
        ("calls", *OBJECTS[:2], "strict tool objects", "json objects"),
    ),
    "openai": Foreign(("openai==3.57.0",), "openai_structured.py", ("schema objects", "streamed tool objects")),
    "pydantic-ai": Foreign(
        ("pydantic-ai-slim[openai]==2.68.0",), "pydantic_ai_agent.py", (*TEXTS, "calls", *OBJECTS[:2])
    ),
    "litellm": Foreign(("litellm==1.110.2",), "litellm_completion.py", (*TEXTS, "calls")),
    "llm": Foreign(("llm==0.36",), "llm_model.py", (*TEXTS, "calls", "streamed calls")),
    "guidellm": Foreign(GUIDELLM, "guidellm_run.py", COUNTED),
    "guidellm-streamed": Foreign(GUIDELLM, "guidellm_run.py", COUNTED, ("--streaming",)),
    "aiperf": Foreign(AIPERF, "aiperf_profile.py", COUNTED),
    "aiperf-streamed": Foreign(AIPERF, "aiperf_profile.py", COUNTED, ("--streaming",)),
    "lm-eval": Foreign(LM_EVAL, "lm_eval_run.py", tuple(SCORES)),
    "schemathesis": Foreign(("schemathesis==4.32.5",), "schemathesis_run.py", tuple(CASES)),
}


def answers_of(program: Sequence[str | Path], job: dict[str, Any]) -> dict[str, Any]:
    """What a client's program prints: its version and its answers. Raises RuntimeError with its last words; all of
    them go to stderr then."""
    told = json.dumps(job)
    done = subprocess.run(program, input=told, capture_output=True, text=True, timeout=CLIENT_TIMEOUT_S, check=False)
    if done.returncode:
        sys.stderr.write(done.stderr)
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
            version, client = "", CLIENTS[name]
            try:
                program = python_of(client.packages, options.environments), SCRIPTS / client.script, *client.flags
                before = place.counts()
                found = answers_of(program, place.job)
                expected = place.expected | {name: count - before[name] for name, count in place.counts().items()}
                version, wrong = found["version"], differences(client.asked, found["answers"], expected)
            except (RuntimeError, subprocess.SubprocessError) as error:
                wrong = [str(error)]
            is_good &= not wrong
            table.add_row(name, version, ", ".join(client.asked), "\n".join(wrong) or "as expected")
    Console().print(table)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
