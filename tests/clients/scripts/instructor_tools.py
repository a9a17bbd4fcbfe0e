"""instructor: answers as objects, by tools that a model may call as it likes, and in four modes of one object."""

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version
from typing import Literal

import instructor
import openai
from pydantic import BaseModel


class look(BaseModel):
    """Looks."""

    where: str
    n: list[object]


class stop(BaseModel):
    """Stops."""


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    moods: list[Literal["happy", "sad", "calm"]]


def objects_of(mode: instructor.Mode) -> int:
    """How many answers of a chat model are objects of the type, without a second try."""
    own = openai.OpenAI(base_url=job["chat_url"], api_key="none", max_retries=0)
    asking = instructor.from_openai(own, mode=mode).chat.completions.create
    asked = {"model": job["model"], "messages": [{"role": "user", "content": job["task"]}], "max_retries": 0}
    made = [asking(**asked, response_model=Person, seed=number) for number in range(job["object_count"])]
    return sum(isinstance(one, Person) for one in made)


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
    "json objects": objects_of(instructor.Mode.JSON),
}
print(json.dumps({"version": version("instructor"), "answers": answers}))
