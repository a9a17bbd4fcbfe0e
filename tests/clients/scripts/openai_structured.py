"""openai: answers as objects, by `parse()` and by the arguments of streamed tools."""

import json
import sys
from importlib.metadata import version
from typing import Literal

import openai
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int
    moods: list[Literal["happy", "sad", "calm"]]


job = json.load(sys.stdin)
chat = openai.OpenAI(base_url=job["chat_url"], api_key="none", max_retries=0).chat.completions
parsed, streamed = [], []
for number in range(job["object_count"]):
    asked = {"model": job["model"], "messages": [{"role": "user", "content": job["task"]}], "seed": number}
    parsed.append(chat.parse(**asked, response_format=Person).choices[0].message.parsed)
    tools = [openai.pydantic_function_tool(Person)]
    with chat.stream(**asked, tools=tools, tool_choice="required", parallel_tool_calls=False) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    streamed.append(call.function.parsed_arguments)
answers = {
    "schema objects": sum(isinstance(one, Person) for one in parsed),
    "streamed tool objects": sum(isinstance(one, Person) for one in streamed),
}
print(json.dumps({"version": version("openai"), "answers": answers}))
