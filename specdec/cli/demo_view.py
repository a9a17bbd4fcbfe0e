"""The demo on the terminal: a text as it streams with a line of rates below it, and the closing table.

Without a terminal the same is printed as plain text, each text once it is complete.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from specdec.cli.demo_texts import DemoSettings, DemoText, statistics_of
from specdec.cli.generate import LEGEND
from specdec.client.run import Run, rate_of
from specdec.launch.children import Child
from specdec.protocol.types import TokenKind
from specdec.terminal import make_console

REFRESHES_PER_S = 8  # few: drawing slows the services on the same machine
STYLES = {TokenKind.ACCEPTED: "green", TokenKind.RECOVERED: "yellow"}
COLUMNS = ("prompt", "on tok/s", "off tok/s", "on/off", "accepted", "mean length", "link B/tok")


class DemoView:
    """Prints to standard output, in this order: `begin`, `streaming` for each text, `conclude`."""

    def __init__(self) -> None:
        self._console = make_console(has_highlights=False)

    def begin(self, settings: DemoSettings, services: Sequence[Child]) -> None:
        """Prints the services, the sampling parameters, and the legend of colours."""
        self._console.print("   ".join(f"{child.command} {child.address}" for child in services))
        self._console.print(
            f"temperature {settings.temperature:g}, seed {settings.seed}, {settings.length} tokens a text; "
            "each with speculation, then without"
        )
        if self._console.is_terminal:
            self._console.print(Text.from_ansi(LEGEND))

    @contextmanager
    def streaming(self, text: DemoText) -> Iterator[None]:
        """Shows a text while it is generated."""
        self._console.rule(f"held-out prompt {text.prompt_id}", align="left")
        self._console.print(text.prompt, style="dim", end="")
        live = Live(
            get_renderable=lambda: Group(colored_text(text), rates_line(text)),
            console=self._console,
            refresh_per_second=REFRESHES_PER_S,
        )
        if not self._console.is_terminal:
            yield
            self._console.print(live.get_renderable())
            return
        with live:
            live.refresh()  # a fast text has all its tokens before the thread that refreshes first runs
            yield

    def conclude(self, texts: Sequence[DemoText], services: Sequence[Child]) -> None:
        """Prints the summary, the table, the services' memory, and whether the texts were equal."""
        self._console.print(f"\n{sentence(texts)}")
        self._console.print(table_of(texts))
        self._console.print(memory_line(services))
        self._console.print(closing_line(texts))


def colored_text(text: DemoText) -> Text:
    """Returns tokens in the colours of their kinds; in the second generation, later tokens are dim."""
    shown = Text.assemble(*((piece, STYLES.get(kind, "")) for piece, kind in list(text.on.pieces)))
    if text.off.token_ids and text.off.finished is None:
        shown.stylize("dim", len(text.off.text))
    return shown


def rates_line(text: DemoText) -> Text:
    """Returns the known rates of both generations."""

    def rate(run: Run) -> str:
        return f"{rate_of([run]):.0f} tokens/s" if rate_of([run]) else "..."

    line = f"with speculation {rate(text.on)}   without {rate(text.off)}"
    return Text(f"{line}   {text.ratio:.2f} times as fast" if text.ratio else line, style="bold")


def sentence(texts: Sequence[DemoText]) -> str:
    """Returns a summary of the table."""
    values = statistics_of(texts)
    return (
        f"The same texts came {values['ratio']:.2f} times as fast with speculation, {values['on_tokens_per_s']:.0f} "
        f"tokens/s instead of {values['off_tokens_per_s']:.0f}: the target accepted "
        f"{values['acceptance']:.0%} of the draft tokens, so each pass that had any to verify gave "
        f"{values['mean_acceptance_length']:.2f} tokens instead of 1."
    )


def memory_line(services: Sequence[Child]) -> str:
    """Returns the most memory of each service, as text."""
    own = ", ".join(f"{child.command} {child.memory_peak_bytes / 1e6:.0f} MB" for child in services)
    return f"Memory at most: {own}."


def closing_line(texts: Sequence[DemoText]) -> str:
    """Returns whether the texts were equal, as text."""
    differing = ", ".join(str(text.prompt_id) for text in texts if not text.is_equal)
    if not differing:
        return "Each text had the same tokens with speculation and without."
    return f"DIFFERENT TOKENS with speculation and without, prompt {differing}: this is a defect."


def table_of(texts: Sequence[DemoText]) -> Table:
    """Returns a table with a line for each prompt, and one for all."""
    table = Table(title="with speculation (on) and without (off), in turn, on the same services")
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for text in texts:
        add_line(table, str(text.prompt_id), [text])
    table.add_section()
    add_line(table, "all", texts)
    return table


def add_line(table: Table, name: str, texts: Sequence[DemoText]) -> None:
    """Adds the statistics of these texts."""
    values = statistics_of(texts)
    table.add_row(
        name,
        f"{values['on_tokens_per_s']:.0f}",
        f"{values['off_tokens_per_s']:.0f}",
        f"{values['ratio']:.2f}",
        f"{values['acceptance']:.0%}",
        f"{values['mean_acceptance_length']:.2f}",
        f"{values['draft_link_bytes_per_token']:.0f}",
    )
