"""Messages as a template takes them, from the form in which programs send them (OpenAI's).

Tools and calls for a template that knows none are written in the form of Hermes 2 Pro, as Qwen 2.5's template does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from specdec.errors import ConfigError

BYTES_MAX, DEPTH_MAX = 1 << 22, 64  # of messages, tools and arguments; levels of lists and objects in them
REASONING = ("reasoning_content", "thinking", "reasoning")  # names that `transformers` takes for one another
CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "  # as in `transformers`: its space shows whether a template keeps spaces
HERMES_TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
Message = Mapping[str, Any]  # role, content, tool_calls and what else a template names


def size_of(value: Any) -> int:
    """Returns the bytes of a JSON value: those of its texts and names, and one for each value. Raises ConfigError, as
    soon as it is known, for more than BYTES_MAX of them or DEPTH_MAX levels."""
    size, waiting = 1, [(value, 1)]
    while waiting:
        value, depth = waiting.pop()
        if isinstance(value, str):
            size += len(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, Mapping | list | tuple):
            if depth > DEPTH_MAX:
                raise ConfigError(f"messages, tools and arguments have more than {DEPTH_MAX} levels")
            size += len(value)
            if isinstance(value, Mapping):
                size += sum(len(str(name).encode("utf-8", "surrogatepass")) for name in value)
            if size <= BYTES_MAX:
                waiting.extend(
                    (inner, depth + 1) for inner in (value.values() if isinstance(value, Mapping) else value)
                )
        if size > BYTES_MAX:
            raise ConfigError(f"messages, tools and arguments have more than {BYTES_MAX} bytes")
    return size


def for_template(
    messages: Sequence[Message], names_developer: bool, takes_parts: Callable[[], bool]
) -> list[dict[str, Any]]:
    """Returns the messages for a template. Content is a text, or a list of parts if the message has one and the
    template takes it; absent content is empty; the arguments of a call are an object. Raises ConfigError, which names
    the place."""
    found = []
    for number, message in enumerate(messages):
        place, own = f"messages[{number}]", dict(message)
        if own.get("role") == "developer" and not names_developer:
            own["role"] = "system"
        own["content"] = content_of(f"{place}.content", own.get("content"), takes_parts)
        reasoning = next((own[name] for name in REASONING if own.get(name) is not None), None)
        if reasoning is not None:
            own = {"thinking": reasoning, **own, "reasoning_content": reasoning}
        calls = own.pop("tool_calls", None)
        if calls:
            own["tool_calls"] = [call_of(f"{place}.tool_calls[{at}].function", call) for at, call in enumerate(calls)]
        found.append(own)
    return found


def content_of(place: str, content: Any, takes_parts: Callable[[], bool]) -> str | list[Any]:
    """Returns the content of a message; several parts are joined by line ends, as vLLM and llama.cpp do."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    for number, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else part
            raise ConfigError(f"{place}[{number}]: its type is {kind!r}; it must be 'text', with a text")
    return list(content) if takes_parts() else "\n".join(part["text"] for part in content)


def call_of(place: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an earlier call with its arguments as an object; empty ones are {}."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ConfigError(f"{place} has no name")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise ConfigError(f"{place}.arguments is not the text of a JSON object")
    size_of(arguments)
    return {**call, "function": {**function, "arguments": arguments}}


def refuse_constant(name: str) -> NoReturn:
    """Refuses NaN and infinities, which JSON has not."""
    raise ValueError(name)


def in_hermes_form(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """Returns the messages for a template without tools: these in the system message, calls in the assistant's words,
    their results in those of the user."""
    found: list[dict[str, Any]] = []
    follows_result = False
    for message in messages:
        own, is_result = dict(message), message.get("role") == "tool"
        if calls := own.pop("tool_calls", None):
            words = [text_of(own["content"])] * bool(own["content"])
            own["content"] = "\n".join(words + [hermes_call(call["function"]) for call in calls])
        if is_result:
            own = {"role": "user", "content": f"<tool_response>\n{text_of(own['content'])}\n</tool_response>"}
            if follows_result:
                own["content"] = f"{found.pop()['content']}\n{own['content']}"
        found.append(own)
        follows_result = is_result
    if tools:
        lines = HERMES_TOOLS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if found and found[0].get("role") == "system":
            found[0]["content"] = f"{text_of(found[0]['content'])}\n\n{lines}"
        else:
            found.insert(0, {"role": "system", "content": lines})
    return found


def hermes_call(function: Mapping[str, Any]) -> str:
    """Returns a call as a model of this form writes it."""
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def text_of(content: str | list[Any]) -> str:
    """Returns the text of a content."""
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def marked_to_continue(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with a mark at the end of the last one's text, where the prompt is to end. Raises
    ConfigError without such a text."""
    if not messages or not (content := messages[-1]["content"]):
        raise ConfigError("continue_final_message needs a text in the last message")
    if isinstance(content, str):
        marked: str | list[Any] = content + CONTINUED
    else:
        marked = [*content[:-1], {**content[-1], "text": content[-1]["text"] + CONTINUED}]
    return [*messages[:-1], {**messages[-1], "content": marked}]


def cut_to_continue(text: str, messages: Sequence[dict[str, Any]]) -> str:
    """Returns a prompt up to its mark, without the spaces there if the template keeps none. Raises ConfigError if the
    template leaves out the last message or a part of it."""
    content = messages[-1]["content"]
    last = content if isinstance(content, str) else content[-1]["text"]
    at = text.rfind(CONTINUED.strip())
    if at < 0 or last.strip() not in text:
        raise ConfigError("continue_final_message: the chat template leaves out words of the last message")
    return text[:at] if text.startswith(CONTINUED, at) else text[:at].rstrip()
