"""langchain-openai: a chat model's answer, whole and streamed, and the calls of bound tools."""

import json
import sys
from functools import reduce
from importlib.metadata import version
from operator import add

from langchain_openai import ChatOpenAI

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
}
print(json.dumps({"version": version("langchain-openai"), "answers": answers}))
