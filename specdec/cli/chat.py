"""`specdec chat`: a conversation in the terminal, with the model's own chat template.

Without --address it starts the three services for itself, as `specdec demo` does. Each line of standard input is a
message; the whole conversation is the next prompt, of which the services have all but the last message in their caches.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.client.request import make_request
from specdec.client.run import Run
from specdec.config import SAMPLING, SPECULATION, ServeSettings, TlsSettings
from specdec.errors import ConfigError, SpecdecError
from specdec.folders import CHAT_HEAD, CHAT_MODEL
from specdec.settings import CONNECTION, MODEL, PROMPT, Address, setting, split_address
from specdec.streams import warn
from specdec.terminal import print_text

if TYPE_CHECKING:
    from specdec.chat.messages import Message
    from specdec.chat.template import ChatTemplate

NEW, QUIT = "/new", "/quit"
TIMEOUT_S = 600.0
SESSIONS = 2  # one text at a time, and the end of the one before: caches of 16 would take gigabytes


class ChatSettings(TlsSettings):
    """The model, the services, and the sampling parameters of the answers."""

    model: str = setting(CHAT_MODEL, MODEL, "Target model with a chat template: folder or hub id.", min_length=1)
    draft_model: str = setting("none", MODEL, "Draft model: folder or hub id; none: no draft service.", min_length=1)
    heads: str = setting("", MODEL, "Folder of heads on the target, or none; absent: those shipped for the chat model.")
    address: Address | None = setting(
        None,
        CONNECTION,
        "HOST:PORT of a coordinator of this very --model; absent: the services are started here.",
    )
    system: str = setting("", PROMPT, "System message; absent: the template's own.")
    max_tokens: int = setting(512, SAMPLING, "Most tokens of an answer.", ge=1, le=(1 << 32) - 1)
    temperature: float = setting(0.7, SAMPLING, "0 selects the likeliest token; otherwise 0.01 to 100.")
    top_p: float = setting(1.0, SAMPLING, "Cumulative probability of the tokens to sample from; above 0, at most 1.")
    seed: int | None = setting(None, SAMPLING, "Makes the answers reproducible.", ge=0, le=(1 << 64) - 1)
    speculative: bool = setting(
        True, SPECULATION, "Use every proposer; the answers have the same distribution without."
    )

    def reach(self) -> None:
        """Raises ConfigError for an address beyond this machine with neither TLS nor --insecure."""
        if self.address is not None:
            try:
                self.check_reach(split_address(self.address)[0], "--address")
            except ValueError as error:
                raise ConfigError(str(error)) from None


def chat(settings: ChatSettings) -> int:
    """Runs until the end of standard input; returns the exit code. Raises SpecdecError for what ends all answers."""
    settings.reach()
    folder, template = template_of(settings.model)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with services(settings, folder) as address:
        if is_terminal:
            import readline  # noqa: F401  # edits and recalls lines of input()

            from specdec.cli.generate import LEGEND
            from specdec.engine.loading.model_folder import shown_name

            name = shown_name(settings.model)
            print_text(f"{name}: a line is a message; {NEW} begins anew, {QUIT} or Ctrl-D ends. ", end="")
            print(LEGEND)
        messages = beginning(settings)
        while (line := read_line("> " if is_terminal else "")) not in (None, QUIT):
            if line == NEW:
                messages = beginning(settings)
            elif line:
                converse(settings, address, template, messages, line)
    return 0


def template_of(model: str) -> tuple[Path, ChatTemplate]:
    """Returns the folder of a model, and its chat template. Raises ConfigError, ModelRefused."""
    from specdec.chat.template import ChatTemplate
    from specdec.engine.loading.model_folder import open_model_folder

    folder = open_model_folder(model).path
    template = ChatTemplate.read(folder)
    if template is None:
        raise ConfigError(f"{model} has no chat template; specdec generate continues plain text")
    return folder, template


@contextmanager
def services(settings: ChatSettings, folder: Path) -> Iterator[str]:
    """Yields the coordinator's address; without --address it starts the three services, and stops them."""
    from specdec.launch.serving import running

    if settings.address is not None:
        yield settings.address
        return
    own = ServeSettings(
        model=str(folder),
        draft_model=settings.draft_model,
        heads=settings.heads or (str(CHAT_HEAD) if settings.model == CHAT_MODEL else "none"),
        port=0,
        log_level="error",
        drain_grace_s=1.0,
        max_num_seqs=SESSIONS,
    )
    with running(own) as serving:
        yield serving.address


def beginning(settings: ChatSettings) -> list[Message]:
    """The messages before the first one of the user."""
    return [{"role": "system", "content": settings.system}] if settings.system else []


def read_line(prompt: str) -> str | None:
    """Returns a line without the spaces around it; None at the end of the input, and after Ctrl-C."""
    try:
        return input(prompt).strip()
    except (EOFError, KeyboardInterrupt):
        print()
        return None
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8: {error}") from None


def converse(settings: ChatSettings, address: str, template: ChatTemplate, messages: list[Message], line: str) -> None:
    """Prints the answer to a message, and adds both to the conversation. A refused message is not added; Ctrl-C ends
    the answer, and what came of it is kept."""
    run = Run()
    asked = [*messages, {"role": "user", "content": line}]
    try:
        asyncio.run(answer(settings, address, template.encode(asked), run))
    except KeyboardInterrupt:
        print()
    except SpecdecError as error:
        warn(f"{error}; {NEW} begins a new conversation")
        return
    messages[:] = [*asked, {"role": "assistant", "content": run.text}]


async def answer(settings: ChatSettings, address: str, prompt_ids: tuple[int, ...], run: Run) -> None:
    """Prints an answer as it is committed, and fills `run` with it. Raises SpecdecError."""
    from specdec.cli.generate import show
    from specdec.client.stream import Client

    given = {name: getattr(settings, name) for name in ("max_tokens", "temperature", "top_p", "seed")}
    request = make_request(prompt_ids, enabled=settings.speculative, **given)
    is_colored = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    async with Client(address, settings) as client, aclosing(client.generate(request, TIMEOUT_S)) as events:
        async for event in events:
            show(event, is_colored)
            run.take(event)
