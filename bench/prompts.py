"""Targets by name, held-out prompts, and two kinds of prompts for the chat model that were written for the benchmarks.

A copying prompt asks for a code edit, a quotation or a JSON repair; most of its answer stands in the prompt. Prose
prompts ask for explanations, stories and advice. Settings are found on the tuning prompts, which are never measured.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.chat.template import ChatTemplate
from specdec.engine.loading.model_folder import open_model_folder
from specdec.folders import CHAT_PROMPTS, heldout_prompts
from tests.support.deepened import write_deepened, write_widened

FOLDER = Path(__file__).resolve().parent
COPYING_KINDS, PROSE_KIND = ("code edit", "quoting", "json repair"), "prose"
WRITTEN = {"deepened": write_deepened, "widened": write_widened}  # the embedded target made larger


@dataclass(frozen=True, slots=True)
class Prompt:
    """One message of a user. `name` is its own within all files; `kind` is of COPYING_KINDS, PROSE_KIND, or the class
    of a question."""

    name: str
    kind: str
    prompt: str

    def ids(self, template: ChatTemplate) -> tuple[int, ...]:
        """The token ids of the message as the only one of a conversation."""
        return template.encode([{"role": "user", "content": self.prompt}])


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


def target_folder(name: str, scratch: Path) -> Path:
    """Returns the folder of a target: of WRITTEN, written to `scratch`, or one that is there. Raises ModelRefused."""
    return WRITTEN[name](scratch) if name in WRITTEN else open_model_folder(name).path


def sent_prompts(file: Path, target: Path) -> list[str] | list[tuple[int, ...]]:
    """Returns the prompts of a file as they are sent to a target: of CHAT_PROMPTS, those of each class in turns, the
    token ids of a conversation."""
    template = ChatTemplate.read(target) if file == CHAT_PROMPTS else None
    if template is None:
        return list(heldout_prompts(file).values())
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    questions = in_turns([Prompt(str(row["id"]), row["class"], row["prompt"]) for row in rows])
    return [question.ids(template) for question in questions]
