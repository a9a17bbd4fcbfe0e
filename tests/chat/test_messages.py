"""Messages, tools and arguments of a rendering: which are taken, which are refused, by their place."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from specdec.chat.messages import BYTES_MAX, DEPTH_MAX
from specdec.chat.template import TOOLS_FILE, ChatTemplate
from specdec.errors import ConfigError, ModelRefused
from tests.support.services import MODELS

SHOWN = "{{ messages | tojson }}{{ tools | tojson }}{{ extra is defined }}"
USER = {"role": "user", "content": "Hello"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def with_arguments(arguments: Any) -> list[dict[str, Any]]:
    """A conversation with an earlier call."""
    return [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}]


def deep(levels: int) -> Any:
    """Lists in lists."""
    found: Any = []
    for _ in range(levels - 1):
        found = [found]
    return found


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "not JSON": (
        r"messages\[1\].tool_calls\[0\].function.arguments is not",
        {"messages": with_arguments('{"a": ')},
    ),
    "a list": (
        r"tool_calls\[0\].function.arguments is not the text of a JSON object",
        {"messages": with_arguments("[]")},
    ),
    "not a number": ("arguments is not the text of a JSON object", {"messages": with_arguments('{"a": NaN}')}),
    "too deep to parse": ("arguments is not the text", {"messages": with_arguments('{"a":' + "[" * 10**5)}),
    "arguments of many levels": (
        f"more than {DEPTH_MAX} levels",
        {"messages": with_arguments(json.dumps({"a": deep(DEPTH_MAX)}))},
    ),
    "a call without a name": (
        r"messages\[0\].tool_calls\[1\].function has no name",
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, {"type": "function"}]}]},
    ),
    "an image": (
        r"messages\[0\].content\[1\]: its type is 'image_url'; it must be 'text'",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}]},
    ),
    "a part without text": (r"content\[0\]: its type", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}),
    "a bare part": (r"content\[0\]: its type is 'a'", {"messages": [{"role": "user", "content": ["a"]}]}),
    "long tools": (
        f"more than {BYTES_MAX} bytes",
        {"messages": [USER], "tools": [{"function": {"name": "x" * BYTES_MAX}}]},
    ),
    "long letters": (
        f"more than {BYTES_MAX} bytes",
        {"messages": [{"role": "user", "content": "ü" * (BYTES_MAX // 2)}]},
    ),
    "many arguments": (f"more than {BYTES_MAX} bytes", {"messages": [USER], "kwargs": {"extra": [0] * BYTES_MAX}}),
    "long names": (f"more than {BYTES_MAX} bytes", {"messages": [USER], "kwargs": {"x" * BYTES_MAX: 1}}),
    "deep arguments": (f"more than {DEPTH_MAX} levels", {"messages": [USER], "kwargs": {"extra": deep(10**5)}}),
    "both ends": (
        "add_generation_prompt and continue_final_message exclude",
        {"messages": [USER], "continue_final_message": True},
    ),
    "nothing to continue": (
        "needs a text in the last message",
        {"messages": with_arguments("{}"), "add_generation_prompt": False, "continue_final_message": True},
    ),
    "no messages to continue": (
        "needs a text in the last message",
        {"messages": [], "add_generation_prompt": False, "continue_final_message": True},
    ),
}


@pytest.fixture(scope="module")
def shown() -> ChatTemplate:
    """A template that shows what it gets."""
    return ChatTemplate(Path("folder"), SHOWN, {})


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_rendered_is_refused_by_its_place(shown: ChatTemplate, case: str) -> None:
    """Claim: each of these is an error of the request, not of the template, which names the place or the limit.
    Conclusive: the template renders whatever it gets, and the next rendering is whole."""
    words, asked = REFUSED[case]
    with pytest.raises(ConfigError, match=words) as refusal:
        shown.render(**asked)
    assert not isinstance(refusal.value, ModelRefused)
    assert json.loads(shown.render([USER], [TOOL]).partition("]")[0] + "]") == [USER]


def test_the_limits_themselves_are_taken(shown: ChatTemplate) -> None:
    """Claim: arguments of the most levels and of most of the bytes are rendered."""
    assert shown.render([USER], [TOOL], {"extra": deep(DEPTH_MAX - 2)}).endswith("True")
    assert shown.render([USER], [TOOL], {"extra": "ü" * (BYTES_MAX // 2 - 1000)}).endswith("True")


def test_a_message_that_the_template_leaves_out_cannot_be_continued() -> None:
    """Claim: a template that shows nothing of the last message, or a part of it, gives none to continue."""
    for source in ("{{ messages[0].content }}", "{{ messages[1].content[5:] }}"):
        found = ChatTemplate(Path("folder"), source, {})
        with pytest.raises(ConfigError, match="leaves out words of the last message"):
            found.render([USER, {"role": "assistant", "content": "Well, I"}], None, None, False, True)


def test_earlier_reasoning_has_the_names_of_transformers(tmp_path: Path) -> None:
    """Claim: a message's reasoning reaches a template by every name by which it does in `transformers`. Source: the
    library."""
    theirs = AutoTokenizer.from_pretrained(MODELS / "target")
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}|{{ messages[0].reasoning }}"
    ours = ChatTemplate(tmp_path, source, {})
    for given in (
        {"reasoning_content": "a"},
        {"reasoning": "b"},
        {"thinking": "c"},
        {"thinking": "d", "reasoning": "e"},
    ):
        chat = [USER | given]
        assert ours.render(chat) == theirs.apply_chat_template(chat, chat_template=source, tokenize=False)


@pytest.mark.parametrize("in_config", [True, False])
def test_a_template_for_tools_is_taken_with_tools(tmp_path: Path, in_config: bool) -> None:
    """Claim: of a folder with a template named `tool_use` that one renders chats with tools, and the default one those
    without, as `apply_chat_template` chooses. Source: the library."""
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "target", folder)
    default, with_tools = "plain {{ messages | length }}", "tools {{ tools | length }}"
    if in_config:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        named = [{"name": "default", "template": default}, {"name": "tool_use", "template": with_tools}]
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": named}))
    else:
        (folder / TOOLS_FILE).parent.mkdir()
        (folder / TOOLS_FILE).write_text(with_tools)
        (folder / "chat_template.jinja").write_text(default)
    ours, theirs = ChatTemplate.read(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for tools in (None, [TOOL]):
        found = ours.render([USER], tools)
        assert (
            found
            == theirs.apply_chat_template([USER], tools=tools, tokenize=False)
            == ("tools 1" if tools else "plain 1")
        )


def test_threads_may_render_at_once() -> None:
    """Claim: renderings of several threads each give their own text. Conclusive: 200 different ones by 8 threads
    through one process, which answers in order."""
    found = ChatTemplate(Path("folder"), "{{ messages[0].content }}", {})
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda number: found.render([{"role": "user", "content": f"{number}"}]), range(200)))
    assert texts == [f"{number}" for number in range(200)]


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("{% set a = 1 %}{{ a }}{{ b }}", {"b"}),
        ("{% if x %}{% set a = 1 %}{% endif %}{{ a }}", {"x"}),
        ("{% if a is not defined %}{% set a = 1 %}{% endif %}{{ a }}", {"a"}),
        ("{% set a = a | default(1) %}{{ a }}", {"a"}),
        ("{% set messages = messages[1:] %}{{ messages }}{{ range(2) }}{{ namespace() }}", {"messages"}),
        ("{% for m in messages %}{{ m.tools }}{{ loop.index }}{{ 'enable' }}{# b #}{% endfor %}", {"messages"}),
        ("{% macro say(m) %}{{ m }}{{ outside }}{% endmacro %}{{ say(1) }}", {"outside"}),
    ],
)
def test_the_names_of_a_template_are_those_it_looks_up(source: str, names: set[str]) -> None:
    """Claim: `variables` has the names that a caller can change the prompt by: not what the template sets itself, loops
    over, says in words or comments, nor functions, but what it sets only where nothing was given."""
    assert ChatTemplate(Path("folder"), source, {}).variables == names
