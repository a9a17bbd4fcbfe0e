"""instructor: a model's answer as objects, by tools that the model may call as it likes; no grammar is asked for."""

import json
import sys
from collections.abc import Iterable
from importlib.metadata import version

import instructor
import openai
from pydantic import BaseModel


class look(BaseModel):
    """Looks."""

    where: str
    n: list[object]


class stop(BaseModel):
    """Stops."""


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
answers = {"calls": [[type(one).__name__, one.model_dump()] for one in objects]}
print(json.dumps({"version": version("instructor"), "answers": answers}))
