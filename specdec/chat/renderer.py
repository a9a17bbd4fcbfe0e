"""Renders a chat template as `transformers` does, in a process of its own: `python -m specdec.chat.renderer`.

A template is a program by the maker of the model folder. jinja's sandbox keeps it from all but its variables, not from
work without end: one operator, filter or format can take gigabytes, and constant parts do so while the template is
compiled. So the kernel holds the bounds of this process: it gets no more memory, and is ended at the time limit.

Lines of JSON come and go: first the template and its bounds, then the variables of each rendering. The first answer has
`variables`, the names that the template looks up; one to a rendering has `text`, or `refusal`, the template's own words
about the messages; either may have `fault`, what is wrong with the template.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

WORDS_MAX = 1000  # characters of a refusal or fault
GIVEN = {"messages", "tools", "documents", "add_generation_prompt"}  # in every rendering
ASKING = ("defined", "undefined", "default", "d")  # tests and filters for a name that may not be there


class Refused(TemplateError):
    """The template called `raise_exception`."""


class Generation(Extension):
    """`{% generation %}` marks the assistant's words for training; here they are words like others, in the scope of a
    call block as in `transformers`."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("words_of"), [], [], body).set_lineno(line)

    def words_of(self, caller: Any) -> Any:
        """The words between the tags."""
        return caller()


class PlainDict:
    """`dict` in a template, without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """As `dict.fromkeys`."""
        return dict.fromkeys(*args)


class PlainNamespace(Namespace):
    """`namespace` in a template, without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: N805  # `self` is a name that a template may give
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace has no name {name!r}: it begins with an underscore")
        super().__setitem__(name, value)


def refuse(message: str) -> NoReturn:
    """`raise_exception` in a template."""
    raise Refused(message)


def tojson(
    x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """The filter, without jinja's HTML escapes."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Renderer:
    """A compiled template, and the names that it looks up. Making it raises what jinja raises for one that is not
    valid."""

    def __init__(self, source: str, characters_max: int) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = tojson
        environment.globals |= {"raise_exception": refuse, "dict": PlainDict(), "namespace": PlainNamespace}
        environment.globals["strftime_now"] = lambda format: self._now.strftime(format)
        self._now: datetime = datetime.min
        self._characters_max = characters_max
        self._template = environment.from_string(source)
        self.variables = sorted(variables_of(environment.parse(source)))

    def render(self, variables: Mapping[str, Any], now: datetime) -> str:
        """Returns the text; `now`: the time that the template may say. Raises what the template raises."""
        self._now = now
        pieces, length = [], 0
        for piece in self._template.generate(variables):
            pieces.append(piece)
            length += len(piece)
            if length > self._characters_max:
                raise OverflowError(f"its text has more than {self._characters_max} characters")
        return "".join(pieces)


def variables_of(template: nodes.Template) -> set[str]:
    """Returns the names that a template looks up outside itself: not one that it sets, unless it asks whether it is
    defined, as templates do with those that may be given."""
    names = {node.name for node in template.find_all(nodes.Name) if node.ctx == "store"} - GIVEN
    for asking in template.find_all((nodes.Test, nodes.Filter)):
        if asking.name in ASKING and isinstance(asking.node, nodes.Name):
            names.discard(asking.node.name)
    return meta.find_undeclared_variables(template) - names


def bound_memory(more: int) -> None:
    """Allows this process `more` bytes of address space than it has, or fewer, if it has a limit already."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
    limit = pages * resource.getpagesize() + more
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard == resource.RLIM_INFINITY or limit < hard:
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def answers(questions: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yields the answer to each question. The kernel ends the process if one takes longer than `seconds` of the
    first."""
    renderer: Renderer | None = None
    bounds: dict[str, Any] = {}
    for asked in questions:
        bounds = asked.get("bounds", bounds)
        signal.setitimer(signal.ITIMER_REAL, bounds["seconds"])  # SIGALRM ends it within whatever operation it is
        try:
            if renderer is None:
                bound_memory(bounds["memory_bytes"])
                renderer = Renderer(asked["source"], bounds["characters"])
                answer: dict[str, Any] = {"variables": renderer.variables}
            else:
                answer = {"text": renderer.render(asked["variables"], datetime.fromisoformat(asked["now"]))}
        except Refused as refused:
            answer = {"refusal": str(refused)[:WORDS_MAX]}
        except MemoryError:
            answer = {"fault": f"it takes more than {bounds['memory_bytes'] >> 20} MiB of memory"}
        except Exception as error:  # a template raises what it likes
            answer = {"fault": f"{type(error).__name__}: {error}"[:WORDS_MAX]}
        yield answer
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def main() -> None:
    """Answers lines until their end. Ctrl-C is of the process that asks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for answer in answers(map(json.loads, sys.stdin)):
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
