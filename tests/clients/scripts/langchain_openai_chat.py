"""langchain-openai: a chat model's answer, whole and streamed, the calls of bound tools, and answers as objects."""

import json
import sys
from functools import reduce
from importlib.metadata import version
from operator import add
from typing import Literal

from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    moods: list[Literal["happy", "sad", "calm"]]


def objects_of(method: str) -> int:
    """How many answers of a chat model are objects of the type."""
    made = [
        ChatOpenAI(base_url=job["chat_url"], seed=number, **own).with_structured_output(Person, method=method)
        for number in range(job["object_count"])
    ]
    return sum(isinstance(one.invoke(job["task"]), Person) for one in made)


job = json.load(sys.stdin)
own = {"model": job["model"], "api_key": "none", "max_retries": 0}
chat = ChatOpenAI(base_url=job["base_url"], stream_usage=True, **own, **job["sampling"])
whole, streamed = chat.invoke(job["question"]), reduce(add, chat.stream(job["question"]))
tooled = ChatOpenAI(base_url=job["tools_url"], temperature=0, **own).bind_tools(job["tools"])
answers = {
    "whole": whole.content,
    "streamed": streamed.content,
    "usage": [whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]],
    "streamed usage": [streamed.usage_metadata["input_tokens"], streamed.usage_metadata["output_tokens"]],
    "calls": [[call["name"], call["args"]] for call in tooled.invoke("x").tool_calls],
    "streamed calls": [[call["name"], call["args"]] for call in reduce(add, tooled.stream("x")).tool_calls],
    "schema objects": objects_of("json_schema"),
    "tool objects": objects_of("function_calling"),
}
print(json.dumps({"version": version("langchain-openai"), "answers": answers}))
