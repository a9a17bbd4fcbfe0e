"""Entry point of the `specdec` command: finds the command, reads its settings, runs it, prints an error as one line.

Exit codes: 0 done; 1 failed, or without a reader; 2 usage error; 3 lost rank; 4 lost engine; 130 interrupted.
Heavy packages are imported after the settings are read, so help and usage errors are immediate.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from specdec import __version__, config, streams
from specdec.advise.settings import AdviseSettings
from specdec.cli.bench import BenchSettings
from specdec.cli.chat import ChatSettings
from specdec.cli.demo_texts import DemoSettings
from specdec.cli.options import UsageError, make_parser, read_settings
from specdec.cli.request import GenerateSettings
from specdec.cli.trace import TraceSettings
from specdec.distill.settings import DistillSettings
from specdec.errors import SpecdecError
from specdec.gateway_settings import GatewaySettings
from specdec.launch import child_events as events
from specdec.terminal import print_defects_as_text, print_text


@dataclass(frozen=True, slots=True)
class Command:
    """One sub-command: its summary, its settings, and "module:function" to run, which returns the exit code."""

    summary: str
    settings: type[config.Settings]
    run: str


COMMANDS = {
    "serve": Command(
        "Runs draft, target and coordinator on this machine and prints their addresses.",
        config.ServeSettings,
        "specdec.cli.serve:serve",
    ),
    "target": Command(
        "Runs the target service: the model that defines the distribution of the text.",
        config.TargetSettings,
        "specdec.cli.service:run_target",
    ),
    "draft": Command(
        "Runs the draft service: the small model that proposes tokens.",
        config.DraftSettings,
        "specdec.cli.service:run_draft",
    ),
    "coordinator": Command(
        "Runs the coordinator: accepts requests, collects draft tokens, has the target verify them.",
        config.CoordinatorSettings,
        "specdec.cli.service:run_coordinator",
    ),
    "gateway": Command(
        "Runs the HTTP gateway: OpenAI's interface in front of coordinators.",
        GatewaySettings,
        "specdec.cli.service:run_gateway",
    ),
    "generate": Command(
        "Sends a prompt to a coordinator and prints the text as it is committed.",
        GenerateSettings,
        "specdec.cli.generate:generate",
    ),
    "demo": Command(
        "Streams three texts of the embedded pair with speculation and without, and compares them.",
        DemoSettings,
        "specdec.cli.demo:demo",
    ),
    "chat": Command(
        "Talks with a chat model in the terminal; starts the services itself, unless given an address.",
        ChatSettings,
        "specdec.cli.chat:chat",
    ),
    "bench": Command(
        "Measures what a coordinator serves, with speculation and without in turns, and says whether it pays.",
        BenchSettings,
        "specdec.cli.bench:bench",
    ),
    "advise": Command(
        "Predicts how fast a target is with each of some drafts or heads, from one pass over its own texts.",
        AdviseSettings,
        "specdec.advise.command:advise",
    ),
    "distill": Command(
        "Makes a small draft that imitates a target, from the target's own texts.",
        DistillSettings,
        "specdec.distill.command:distill",
    ),
    "trace": Command("Shows the times of a generation from its trace.", TraceSettings, "specdec.cli.trace:trace"),
}
KNOWN_FIELDS = frozenset(name for command in COMMANDS.values() for name in command.settings.model_fields)


def overview() -> str:
    """Returns the help of `specdec` itself."""
    lines = ["usage: specdec COMMAND [FLAGS]", "", "Exact speculative decoding across machines.", "", "Commands:"]
    lines += [f"  {name:<12} {command.summary}" for name, command in COMMANDS.items()]
    lines += ["  ray          Runs the services as actors of a Ray cluster: ray up, ray status, ray down."]
    return "\n".join([*lines, "", "specdec COMMAND --help lists the flags of a command; --version prints the version."])


def run_command(arguments: Sequence[str]) -> int:
    """Runs the command named first. Raises SpecdecError for errors of the user or the environment."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print_text(overview())
        return 0
    if arguments[0] == "--version":
        print_text(f"specdec {__version__}")
        return 0
    name, *rest = arguments
    if name == "ray":
        return _function("specdec.ray.command:ray_command")(rest)
    command = COMMANDS.get(name)
    if command is None:
        raise UsageError(f"{name} is not a command; choose from {', '.join((*COMMANDS, 'ray'))}")
    parser = make_parser(name, command.summary, command.settings)
    settings = read_settings(command.settings, parser, rest, os.environ, KNOWN_FIELDS)
    return _function(command.run)(settings)


def _function(name: str) -> Callable[[Any], int]:
    """Returns the function of "module:function", which returns the exit code."""
    module_name, _, function_name = name.partition(":")
    function: Callable[[Any], int] = getattr(importlib.import_module(module_name), function_name)
    return function


def leave_deleted_folder() -> None:
    """Leaves a working folder that was deleted: libraries do not load there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        os.chdir("/")


def main(command: str | None = None) -> None:
    """Runs this process's command line and exits; `command`: the command, if the line has none."""
    streams.prepare()
    leave_deleted_folder()
    arguments = [command, *sys.argv[1:]] if command else sys.argv[1:]
    if os.getpid() == 1:  # of a container: the kernel ignores SIGTERM without a handler
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    events.die_with_parent()
    print_defects_as_text()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our errors report the same with more detail
    os.environ["PYTHONSAFEPATH"] = "1"  # of processes that libraries start: see `python_command`
    code: int | str | None
    try:
        try:
            code = run_command(arguments)
        except SystemExit as end:  # of --help
            code = end.code
        sys.stdout.flush()
    except SpecdecError as error:
        sentence = " ".join(str(error).split())
        if not events.report(event="failed", message=sentence):
            streams.warn(sentence)
        code = error.exit_code
    except BrokenPipeError:  # the reader closed our output
        code = 1
    except OSError as error:
        if not streams.is_of_output(error):
            raise
        streams.warn(f"the output cannot be written: {error.strerror}")
        code = 1
    except KeyboardInterrupt:
        code = 130
    streams.give_up()
    sys.exit(code)
