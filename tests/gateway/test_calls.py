"""Text of a model to content and calls: the same message for every partition of the text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.chat.template import ChatTemplate
from specdec.gateway.calls import (
    SPECIAL_MARK,
    CallArguments,
    CallStart,
    Content,
    Event,
    ToolCallParser,
    format_of,
)
from specdec.gateway.json_object import JsonObject, NotJson

TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"
TOOLS = ("f", "get_weather", "ü")
FORMATS = ("hermes", "llama3")
Message = tuple[str, list[tuple[str, str, str]]]  # content, and id, name and arguments of each call


def message_of(events: Iterable[Event]) -> Message:
    """The message that a client assembles; fails for an order of events that none could."""
    content, calls = "", []
    for event in events:
        if isinstance(event, Content):
            assert event.text
            content += event.text
        elif isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append((event.id, event.name, ""))
        else:
            assert event.index == len(calls) - 1 and event.text
            calls[-1] = (*calls[-1][:2], calls[-1][2] + event.text)
    return content, calls


def read(form: str, parts: Iterable[str], finish_reason: str = "stop") -> Message:
    """The message of a text that comes in these parts."""
    parser = ToolCallParser(form, TOOLS, "call")
    events = [event for part in parts for event in parser.feed(part)]
    found = message_of(events + parser.end(finish_reason))
    assert parser.call_count == len(found[1]) >= parser.complete_count
    return found


def test_a_special_mark_is_no_text() -> None:
    """Claim: a mark that is a special token begins a call, and is no part of content, arguments or names, in every
    partition; the format's own word is content then. Conclusive: the message is literal, and each cut of the text."""
    word, own = "<tool_call>", SPECIAL_MARK
    text = f'a{own}{{"name":"f","arguments":{{"s":"x{own}y"}}}} b{own}{word}{{"name":"f"}}{own}'
    expected = message(f'a b{word}{{"name":"f"}}', ("f", '{"s":"xy"}'))
    for parts in [[*text], *([text[:at], text[at:]] for at in range(len(text)))]:
        parser = ToolCallParser("hermes", TOOLS, "call", mark_id=5)
        events = [event for part in parts for event in parser.feed(part)]
        assert message_of(events + parser.end("stop")) == expected


def message(content: str, *calls: tuple[str, str]) -> Message:
    """A message with calls by name and arguments."""
    return content, [(f"call_{index}", *call) for index, call in enumerate(calls)]


HERMES: dict[str, tuple[str, Message]] = {
    "a call": ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', message("", ("f", '{"a": 1}'))),
    "words around": (
        'Well:\n<tool_call>{"name":"f","arguments":{}}</tool_call>\nDone.',
        message("Well:\n\nDone.", ("f", "{}")),
    ),
    "two calls": (
        '\n\n<tool_call>{"name": "f"}</tool_call>\n<tool_call>{"name": "ü", "arguments": {"b": [{}]}}</tool_call>\n',
        message("", ("f", "{}"), ("ü", '{"b": [{}]}')),
    ),
    "no arguments": ('<tool_call>{"name": "f"}</tool_call>', message("", ("f", "{}"))),
    "arguments first": (
        '<tool_call>{"arguments": {"x": "}"}, "name": "f"}</tool_call>',
        message("", ("f", '{"x": "}"}')),
    ),
    "parameters": ('<tool_call>{"name": "f", "parameters": {"x": 1}}</tool_call>', message("", ("f", '{"x": 1}'))),
    "more keys": (
        '<tool_call>{"type": "function", "id": {"a": [1]}, "name": "f", "arguments": {}, "b": "</tool_call>"}'
        "</tool_call>!",
        message("!", ("f", "{}")),
    ),
    "marks and braces in strings": (
        '<tool_call>{"name": "f", "arguments": {"a": "}}</tool_call>{<tool_call>\\"}", "b\\\\": "\\u00e4\\\\"}}'
        "</tool_call>",
        message("", ("f", '{"a": "}}</tool_call>{<tool_call>\\"}", "b\\\\": "\\u00e4\\\\"}')),
    ),
    "an escaped name": ('<tool_call>{"n\\u0061me": "\\u00fc", "arguments": {}}</tool_call>', message("", ("ü", "{}"))),
    "a name twice": ('<tool_call>{"name": "f", "name": "ü"}</tool_call>', message("", ("f", "{}"))),
    "a forgotten end": (
        '<tool_call>{"name": "f", "arguments": {"a": 1}\n</tool_call>ok',
        message("ok", ("f", '{"a": 1}')),
    ),
    "a forgotten mark": ('<tool_call>{"name": "f"}ok', message("ok", ("f", "{}"))),
    "one end too many": ('<tool_call>{"name": "f"}}</tool_call>', message("}</tool_call>", ("f", "{}"))),
    "arguments that break off": (
        '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> and <tool_call>{"name": "ü"}</tool_call>',
        message(" and ", ("f", '{"a": 1'), ("ü", "{}")),
    ),
    "an unfinished call": ('<tool_call>{"name": "f", "arguments": {"a": "b', message("", ("f", '{"a": "b'))),
    "an unknown tool": (
        'a<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>b',
        message('a<tool_call>{"name": "g", "arguments": {"a": 1}}</tool_call>b'),
    ),
    "a stray mark": ("Write <tool_call> and </tool_call>.", message("Write <tool_call> and </tool_call>.")),
    "a stray mark before a call": (
        '<tool_call>\n<tool_call>{"name": "f"}</tool_call>',
        message("<tool_call>\n", ("f", "{}")),
    ),
    "a part of a mark": ("a < b <tool_c", message("a < b <tool_c")),
    "marks that overlap": ('<tool_<tool_call>{"name": "f"}</tool_call>', message("<tool_", ("f", "{}"))),
    "arguments that are none": (
        '<tool_call>{"name": "f", "arguments": "a"}</tool_call>',
        message('<tool_call>{"name": "f", "arguments": "a"}</tool_call>'),
    ),
    "other JSON": ('<tool_call>{"city": "x"}</tool_call>', message('<tool_call>{"city": "x"}</tool_call>')),
    "another key first": (
        '<tool_call>{"for": 1, "name": "f"}</tool_call>',
        message('<tool_call>{"for": 1, "name": "f"}</tool_call>'),
    ),
    "a list": ('<tool_call>[{"name": "f"}]</tool_call>', message('<tool_call>[{"name": "f"}]</tool_call>')),
    "bare JSON": ('{"name": "f", "arguments": {}}', message('{"name": "f", "arguments": {}}')),
    "spaces alone": (" \n ", message(" \n ")),
    "nothing": ("", message("")),
}
LLAMA3: dict[str, tuple[str, Message]] = {
    "a call": ('{"name": "f", "parameters": {"a": 1}}', message("", ("f", '{"a": 1}'))),
    "spaces around": (' \n{"name": "f", "parameters": {}}\n', message("", ("f", "{}"))),
    "after the mark": ('<|python_tag|>{"name": "f", "parameters": {}}', message("", ("f", "{}"))),
    "words before the mark": ('So <|python_tag|>{"name": "f"}', message("So ", ("f", "{}"))),
    "two calls": (
        '{"name": "f", "parameters": {"a": ";"}}; {"name": "ü", "parameters": {}}',
        message("", ("f", '{"a": ";"}'), ("ü", "{}")),
    ),
    "two calls on two lines": (
        '{"type": "function", "name": "f"}\n{"name": "ü", "arguments": {}}',
        message("", ("f", "{}"), ("ü", "{}")),
    ),
    "words after a call": ('{"name": "f"} Done; {"name": "f"}', message(' Done; {"name": "f"}', ("f", "{}"))),
    "an unknown tool after a call": (
        '{"name": "f"}; {"name": "g"}',
        message('; {"name": "g"}', ("f", "{}")),
    ),
    "an answer in JSON": ('{"name": "Bob", "age": 3}', message('{"name": "Bob", "age": 3}')),
    "another answer in JSON": (' {"answer": {"name": "f"}}', message(' {"answer": {"name": "f"}}')),
    "words first": ('Call {"name": "f"}', message('Call {"name": "f"}')),
    "code": ("<|python_tag|>print({})", message("<|python_tag|>print({})")),
    "a mark in a string": (
        '{"name": "f", "parameters": {"a": "<|python_tag|>{}"}}',
        message("", ("f", '{"a": "<|python_tag|>{}"}')),
    ),
    "an unfinished call": ('{"name": "f", "parameters": {"a": [1, ', message("", ("f", '{"a": [1, '))),
    "Hermes": ('<tool_call>{"name": "f"}</tool_call>', message('<tool_call>{"name": "f"}</tool_call>')),
    "nothing": ("", message("")),
}
CASES = [(form, name) for form, cases in zip(FORMATS, (HERMES, LLAMA3)) for name in cases]


@pytest.mark.parametrize(("form", "name"), CASES, ids=[f"{form}: {name}" for form, name in CASES])
def test_a_text_has_its_message_however_it_is_parted(form: str, name: str) -> None:
    """Claim: each text has the message written beside it, whole, in any two parts, and character by character."""
    text, expected = (HERMES if form == "hermes" else LLAMA3)[name]
    assert read(form, list(text)) == expected
    for at in range(len(text) + 1):
        assert read(form, [text[:at], text[at:]]) == expected, at


PLAIN = [
    "Hello",
    " ",
    "\n",
    "{",
    "}",
    '"',
    "<",
    "<tool",
    "</tool_call>",
    ";",
    "ü 日本",
    '{"name": "g"}',
    "<|python",
    "\\",
]
BROKEN = [
    '{"name": "f", "arguments": {"a": tru',
    '{"name": "f" "x"',
    '{"name": 1}',
    '{"name": "f", "arguments": [',
    "{]",
]
VALUES = [
    1,
    -0.5e10,
    True,
    None,
    "}",
    '"\\',
    "</tool_call>",
    "<tool_call>",
    "\u2028ü\n",
    [],
    {},
    [1, {"a": "]"}],
    {"": 0},
]


def random_call(draw: random.Random) -> tuple[str, tuple[str, str]]:
    """The text of a call, and its name and arguments."""
    name = draw.choice(TOOLS)
    value = {draw.choice(["a", "b", "ü", '"']): draw.choice(VALUES) for _ in range(draw.randrange(3))}
    arguments = json.dumps(value, ensure_ascii=draw.random() < 0.5, indent=draw.choice([None, None, 1]))
    named, key = f'"name": {json.dumps(name)}', draw.choice(["arguments", "parameters"])
    members = [named, f'"{key}": {arguments}']
    if not value and draw.random() < 0.5:
        members = [named]
        arguments = "{}"
    if draw.random() < 0.3:
        members.reverse()
    if draw.random() < 0.2:
        members.insert(draw.randrange(len(members)), '"type": "function"')
    space = draw.choice(["", " ", "\n"])
    return f"{{{space}{f',{space}'.join(members)}{space}}}", (name, arguments)


def random_text(form: str, draw: random.Random) -> tuple[str, Message]:
    """A text without broken calls, and its message, which is known by how the text is made."""
    text, content, calls, gap, is_bare = "", "", [], "", True
    for _ in range(draw.randrange(1, 4)):
        if form == "hermes" and draw.random() < 0.5:  # content, which ends in a letter: spaces before a call are others
            words = "".join(draw.choices(PLAIN, k=draw.randrange(3))) + "x"
            if not calls or is_bare or not words.startswith("</tool_call>"):
                text, content, is_bare = text + words, content + gap * is_bare + words, False
                gap = ""
                continue
        body, call = random_call(draw)
        calls.append(call)
        if form == "hermes":
            inner, gap = draw.choice(["", "\n"]), draw.choice(["", "\n", " \n"])
            text += f"<tool_call>{inner}{body}{inner}</tool_call>{gap}"
        else:
            gap = draw.choice(["; ", ";", "\n", " ;\n"])
            text += f"{body}{gap}"
        is_bare = True
    if form == "llama3":
        text = text.removesuffix(gap)
    return text, message(content, *calls)


def random_partition(text: str, draw: random.Random) -> list[str]:
    """The text in parts of one to some characters."""
    parts = []
    while text:
        length = draw.randrange(1, 12)
        parts.append(text[:length])
        text = text[length:]
    return parts


@pytest.mark.parametrize("form", FORMATS)
def test_random_texts_of_calls_have_their_messages(form: str) -> None:
    """Claim: 250 texts of content and calls of random order, keys, spaces, escapes and values have the message that
    they were made of: whole, in every two parts, in random parts. Conclusive: nothing that reads them knows how they
    were made, and the arguments are compared as text."""
    draw = random.Random(form)
    for _ in range(250):
        text, expected = random_text(form, draw)
        whole = read(form, [text])
        assert whole == expected, text
        for at in range(1, len(text)):
            assert read(form, [text[:at], text[at:]]) == expected, (text, at)
        assert read(form, random_partition(text, draw)) == expected
        assert all(json.loads(arguments) is not None for _, _, arguments in whole[1])


@pytest.mark.parametrize("form", FORMATS)
def test_random_pieces_have_one_message_however_they_are_parted(form: str) -> None:
    """Claim: 250 random sequences of words, marks, whole calls, broken and cut ones have one message each, for every
    partition into two, random ones and single characters, whatever ended them. Every call has a given tool's name and
    the beginning of a JSON object."""
    draw = random.Random(f"pieces {form}")
    pieces: list[Callable[[], str]] = [
        lambda: draw.choice(PLAIN),
        lambda: draw.choice(BROKEN),
        lambda: draw.choice(["<tool_call>", "</tool_call>", "<|python_tag|>"]),
        lambda: random_call(draw)[0],
        lambda: f"<tool_call>{random_call(draw)[0]}</tool_call>",
    ]
    for _ in range(250):
        text = "".join(draw.choice(pieces)() for _ in range(draw.randrange(1, 5)))[: draw.choice([40, 80, 120])]
        reason = draw.choice(["stop", "length"])
        expected = read(form, [text], reason)
        for at in range(1, len(text)):
            assert read(form, [text[:at], text[at:]], reason) == expected, (text, at)
        for parts in (list(text), random_partition(text, draw), random_partition(text, draw)):
            assert read(form, parts, reason) == expected, (text, parts)
        for _, name, arguments in expected[1]:
            assert name in TOOLS
            reading = JsonObject()
            for character in arguments:
                reading.take(character)


def test_what_ends_a_text_in_mid_call() -> None:
    """Claim: a stop string before the arguments begin gives back all that was held; `length` there leaves a call with
    its name, and before the name content; after the arguments began both leave them as far as they came."""
    for text in ("a <tool_c", 'a <tool_call>{"name": "get_wea', 'a <tool_call>{"arguments": {"a": 1}, "na'):
        assert read("hermes", list(text), "stop") == read("hermes", list(text), "length") == message(text)
    named = 'a <tool_call>{"name": "f", "argu'
    assert read("hermes", list(named), "stop") == message(named)
    assert read("hermes", list(named), "length") == message("a ", ("f", ""))
    begun = 'a <tool_call>{"name": "f", "arguments": {"b": "c\\'
    for reason in ("stop", "length"):
        assert read("hermes", list(begun), reason) == message("a ", ("f", '{"b": "c\\'))
    assert read("llama3", list('{"name": "f", "par'), "stop") == message('{"name": "f", "par')


def test_parts_come_as_soon_as_they_are_certain() -> None:
    """Claim: content is held only where a mark may have begun, a call begins with the first character of its arguments,
    which then come delta by delta; a call is complete with its arguments; two calls may come in one delta."""
    parser = ToolCallParser("hermes", TOOLS, "id")
    assert parser.feed("So <tool") == [Content("So ")]
    assert parser.feed("s> <tool_call>") == [Content("<tools> ")]
    assert parser.feed('{"name": "f", "arguments": ') == []
    assert parser.feed('{"a') == [CallStart(0, "id_0", "f"), CallArguments(0, '{"a')]
    assert parser.feed('": 1') == [CallArguments(0, '": 1')] and parser.complete_count == 0
    assert parser.feed("}}") == [CallArguments(0, "}")] and parser.complete_count == 1
    two = '</tool_call>\n<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "ü", "arguments": {}}</tool_call> ok'
    assert parser.feed(two) == [
        CallStart(1, "id_1", "f"),
        CallArguments(1, "{}"),
        CallStart(2, "id_2", "ü"),
        CallArguments(2, "{}"),
        Content(" ok"),
    ]
    assert parser.end("stop") == [] and (parser.call_count, parser.complete_count) == (3, 3)


def test_ids_are_unique() -> None:
    """Claim: without a given prefix, no two calls of 100 texts have one id."""
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>'
    ids = set()
    for _ in range(100):
        ids |= {event.id for event in ToolCallParser("hermes", TOOLS).feed(text) if isinstance(event, CallStart)}
    assert len(ids) == 200 and all(id.startswith("call_") for id in ids)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
JSON_TEXTS = st.builds(
    lambda value, indent, is_ascii: json.dumps(value, indent=indent, ensure_ascii=is_ascii),
    st.dictionaries(st.text(max_size=3), JSON_VALUES, max_size=3),
    st.sampled_from([None, 1]),
    st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(JSON_TEXTS, st.data())
def test_an_object_is_one_where_the_json_module_reads_one(text: str, data: st.DataObject) -> None:
    """Claim: a text is taken to its end exactly where the standard library reads an object, also with a character
    changed, doubled or left out. Source: the library, without its NaN and infinities."""
    at = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from(list('{}[],:"\\ \n\t0159-+.eEutrfalsn/\x00ü')))
    texts = [text, text[:at] + other + text[at + 1 :], text[:at] + text[at + 1 :], text[:at] + other + text[at:]]
    for changed in texts:
        try:
            value = json.loads(changed, parse_constant=lambda name: [][0])
            is_object = isinstance(value, dict)
        except (ValueError, IndexError):
            is_object = False
        assert is_read_to_its_end(changed) == is_object, changed


def is_read_to_its_end(text: str) -> bool:
    """Whether the text is one object."""
    reading = JsonObject()
    try:
        for character in text:
            reading.take(character)
    except NotJson:
        return False
    return reading.place == "end"


def test_a_format_is_found_in_the_template() -> None:
    """Claim: templates of models that write calls in one of the two forms are told from those with other forms,
    including the ones that use Hermes' marks around something else; a template without tools asks for Hermes' form."""
    found = {
        file.stem: format_of(ChatTemplate(Path("folder"), file.read_text(encoding="utf-8"), {}))
        for file in TEMPLATES.glob("*.jinja")
    }
    with_tools = {"qwen2_5": "hermes", "qwen3": "hermes", "qwen3_instruct_2507": "hermes"}
    with_tools |= {"llama3_1": "llama3", "llama3_2": "llama3"}
    others = dict.fromkeys(("qwen3_5_think", "glm4moe", "gptoss", "lfm2_v2", "mistral_v3_tekken"))
    without = dict.fromkeys(("deepseekv3", "gemma", "gemma3", "llama3", "phi3_5"), "hermes")
    assert found == with_tools | others | without


@pytest.mark.parametrize("name", ["qwen2_5", "llama3_2"])
def test_calls_come_back_as_the_template_wrote_them(name: str) -> None:
    """Claim: what a template of each form writes for an earlier call is read as that very call. Conclusive: the
    template is the model's own, so its model writes calls so."""
    template = ChatTemplate(Path("folder"), (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), {})
    arguments = {"place": 'Zürich "{}"', "days": [1, {"a": None}]}
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": {}}}]
    before = template.render(chat[:1], tools)
    written = template.render(chat, tools, add_generation_prompt=False).removeprefix(before)
    text = written.removesuffix("\n").removesuffix("<|im_end|>").removesuffix("<|eot_id|>")
    form = format_of(template)
    assert form is not None
    content, ((_, called, given_arguments),) = read(form, list(text))
    assert (content, called, json.loads(given_arguments)) == ("", "get_weather", arguments)
