"""Placeholder until merged."""

from __future__ import annotations
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    index: int
    text: str


class ToolCallParser:
    def __init__(self, format: str, tools: frozenset[str]) -> None: ...
    def feed(self, text: str) -> list[Content | CallStart | CallArguments]:
        return [Content(text)] if text else []

    def end(self, finish_reason: str) -> list[Content | CallStart | CallArguments]:
        return []


def format_of(template: str) -> str | None:
    return "hermes" if "<tool_call>" in template else None
