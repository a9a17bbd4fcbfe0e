"""Prompts of the benchmarks on the chat model, written for them: answers that copy from the prompt, and others.

A copying prompt asks for a code edit, a quotation or a JSON repair; most of its answer stands in the prompt. Prose
prompts ask for explanations, stories and advice. Settings are found on the tuning prompts, which are never measured.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
COPYING_KINDS, PROSE_KIND = ("code edit", "quoting", "json repair"), "prose"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One message of a user. `name` is its own within all files; `kind` is of COPYING_KINDS, or PROSE_KIND."""

    name: str
    kind: str
    prompt: str


def copying_prompts() -> list[Prompt]:
    """The measured prompts whose answers copy, those of each kind in turns."""
    return in_turns(read("copying_prompts.jsonl"))


def copying_prompts_for_tuning() -> list[Prompt]:
    """Prompts of the same kinds to find settings with, in turns."""
    return in_turns(read("copying_prompts_tuning.jsonl"))


def prose_prompts() -> list[Prompt]:
    """The measured prompts whose answers do not copy."""
    return read("prose_prompts.jsonl")


def in_turns(prompts: Sequence[Prompt]) -> list[Prompt]:
    """One prompt of each kind after the other, so that the first few are of all kinds."""
    kinds: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        kinds.setdefault(prompt.kind, []).append(prompt)
    return [prompt for turn in itertools.zip_longest(*kinds.values()) for prompt in turn if prompt is not None]


def read(file_name: str) -> list[Prompt]:
    """The prompts of a file in this folder, one JSON object a line."""
    lines = (FOLDER / file_name).read_text(encoding="utf-8").splitlines()
    return [Prompt(**json.loads(line)) for line in lines]
