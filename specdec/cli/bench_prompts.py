"""The prompts of `specdec bench`: a line each of a text file, or of a JSONL file with texts or chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.cli.chat import template_of
from specdec.errors import ConfigError
from specdec.folders import heldout_prompts, shown

Prompt = str | tuple[int, ...]  # a text, or its token ids
BYTES_MAX = 256 << 20  # a million prompts of a page
JSONL_SUFFIX = ".jsonl"


def read_prompts(file: Path | None, model: str) -> list[Prompt]:
    """Returns the prompts of a file, by default those shipped, on which the embedded pair was not trained; messages as
    the chat template of `model` writes them. Raises ConfigError, which names the line."""
    if file is None:
        return list(heldout_prompts().values())
    try:
        with file.open("rb") as opened:
            data = opened.read(BYTES_MAX + 1)
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--prompts {file} is not UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ConfigError(f"--prompts {file} cannot be read: {error.strerror}") from None
    if len(data) > BYTES_MAX:
        raise ConfigError(f"--prompts {file} has more than {BYTES_MAX} bytes; at most these are read")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise ConfigError(f"--prompts {file} has 0 prompts; it must have at least 1, one a line")
    if file.suffix != JSONL_SUFFIX:
        return [line.rstrip("\r") for _, line in lines]
    entries = [_entry(f"--prompts {file}, line {number}", line) for number, line in lines]
    if all(isinstance(entry, str) for entry in entries):
        return entries
    if not model:
        raise ConfigError(f"--prompts {file} has messages: give --model, whose chat template writes them")
    _, template = template_of(model)
    return [entry if isinstance(entry, str) else template.encode(entry) for entry in entries]


def _entry(where: str, line: str) -> Any:
    """Returns the prompt or the messages of a line. Raises ConfigError for any other."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not valid JSON: {error}") from None
    given = {name: value[name] for name in ("prompt", "messages") if name in value} if isinstance(value, dict) else {}
    if len(given) != 1:
        raise ConfigError(f"{where} is {shown(value)}; it must be an object with prompt or messages, one of the two")
    if "prompt" in given:
        if not isinstance(given["prompt"], str) or not given["prompt"]:
            raise ConfigError(f"{where}: prompt is {shown(given['prompt'])}; it must be a text that is not empty")
        return given["prompt"]
    messages = given["messages"]
    if not (isinstance(messages, list) and messages and all(_is_message(own) for own in messages)):
        limit = "a list of at least one object with role and content"
        raise ConfigError(f"{where}: messages is {shown(messages)}; it must be {limit}")
    return messages


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and "content" in value
