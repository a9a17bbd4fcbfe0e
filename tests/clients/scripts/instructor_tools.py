"""instructor: answers as objects, by tools that a model may call as it likes, and in four modes of one object."""

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field


class look(BaseModel):
    """Looks."""

    where: str
    n: list[object]


class stop(BaseModel):
    """Stops."""


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=40)  # a small model may write on without an end
    age: int = Field(ge=0, le=150)
    moods: list[Literal["happy", "sad", "calm"]] = Field(max_length=4)


class Anything(BaseModel, extra="allow"):
    """Any object."""


def objects_of(mode: instructor.Mode, kind: type[BaseModel] = Person, task: str = "") -> int:
    """How many answers of a chat model are objects of the type, without a second try."""
    own = openai.OpenAI(base_url=job["chat_url"], api_key="none", max_retries=0)
    asking = instructor.from_openai(own, mode=mode).chat.completions.create
    messages = [{"role": "user", "content": task or job["task"]}]
    asked = {"model": job["model"], "messages": messages, "max_retries": 0}
    made = [asking(**asked, response_model=kind, seed=number) for number in range(job["object_count"])]
    return sum(isinstance(one, kind) for one in made)


job = json.load(sys.stdin)
client = openai.OpenAI(base_url=job["tools_url"], api_key="none", max_retries=0)
asking = instructor.from_openai(client, mode=instructor.Mode.PARALLEL_TOOLS)
objects = asking.chat.completions.create(
    model=job["model"],
    messages=[{"role": "user", "content": "x"}],
    temperature=0,
    response_model=Iterable[look | stop],
    max_retries=0,
)
answers = {"calls": [[type(one).__name__, one.model_dump()] for one in objects]} | {
    "tool objects": objects_of(instructor.Mode.TOOLS),
    "strict tool objects": objects_of(instructor.Mode.TOOLS_STRICT),
    "schema objects": objects_of(instructor.Mode.JSON_SCHEMA),
    # Their schema is in the prompt alone, so any object conforms; a short one, since a small model may write on.
    "json objects": objects_of(instructor.Mode.JSON, Anything, 'Say exactly {"name": "Ada"}'),
}
print(json.dumps({"version": version("instructor"), "answers": answers}))
