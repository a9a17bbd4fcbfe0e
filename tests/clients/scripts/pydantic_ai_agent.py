"""pydantic-ai: an agent's answer, whole and streamed, the calls of a model's response, and answers as objects."""

import asyncio
import json
import sys
from importlib.metadata import version
from typing import Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.direct import model_request_sync
from pydantic_ai.messages import ModelRequest, ToolCallPart
from pydantic_ai.models import ModelRequestParameters
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition

job = json.load(sys.stdin)


class Person(BaseModel):
    """A person."""

    name: str = Field(max_length=40)  # a small model may write on without an end
    age: int = Field(ge=0, le=150)
    moods: list[Literal["happy", "sad", "calm"]] = Field(max_length=4)


def objects_of(output: Any) -> int:
    """How many answers of a chat model are objects of the type, without a second try."""
    asking = Agent(model_at(job["chat_url"]), output_type=output, retries=0)
    made = [asking.run_sync(job["task"], model_settings={"seed": number}) for number in range(job["object_count"])]
    return sum(isinstance(one.output, Person) for one in made)


def model_at(url: str) -> OpenAIChatModel:
    return OpenAIChatModel(job["model"], provider=OpenAIProvider(base_url=url, api_key="none"))


async def streamed() -> tuple[str, list[int]]:
    async with agent.run_stream(job["question"], model_settings=job["sampling"]) as result:
        text = "".join([part async for part in result.stream_text(delta=True, debounce_by=None)])
        used = result.usage
        used = used() if callable(used) else used
        return text, [used.input_tokens, used.output_tokens]


agent = Agent(model_at(job["base_url"]))
whole = agent.run_sync(job["question"], model_settings=job["sampling"])
usage = whole.usage() if callable(whole.usage) else whole.usage
text, streamed_usage = asyncio.run(streamed())
tools = [
    ToolDefinition(name=tool["function"]["name"], parameters_json_schema=tool["function"]["parameters"])
    for tool in job["tools"]
]
response = model_request_sync(
    model_at(job["tools_url"]),
    [ModelRequest.user_text_prompt("x")],
    model_settings={"temperature": 0},
    model_request_parameters=ModelRequestParameters(function_tools=tools, allow_text_output=True),
)
answers = {
    "whole": whole.output,
    "streamed": text,
    "usage": [usage.input_tokens, usage.output_tokens],
    "streamed usage": streamed_usage,
    "calls": [[part.tool_name, part.args_as_dict()] for part in response.parts if isinstance(part, ToolCallPart)],
    "tool objects": objects_of(ToolOutput(Person)),
    "schema objects": objects_of(NativeOutput(Person)),
}
print(json.dumps({"version": version("pydantic-ai-slim"), "answers": answers}))
