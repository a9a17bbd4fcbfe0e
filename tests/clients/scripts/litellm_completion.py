"""litellm: an answer, whole and streamed, and the calls in it."""

import json
import sys
from importlib.metadata import version

import litellm

job = json.load(sys.stdin)
own = {"model": f"openai/{job['model']}", "api_key": "none", "num_retries": 0}
asked = {"messages": [{"role": "user", "content": job["question"]}], "api_base": job["base_url"], **job["sampling"]}
whole = litellm.completion(**own, **asked)
chunks = list(litellm.completion(**own, **asked, stream=True, stream_options={"include_usage": True}))
tooled = {"messages": [{"role": "user", "content": "x"}], "api_base": job["tools_url"], "temperature": 0}
called = litellm.completion(**own, **tooled, tools=job["tools"]).choices[0].message.tool_calls
(used,) = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
answers = {
    "whole": whole.choices[0].message.content,
    "streamed": "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices),
    "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
    "streamed usage": [used.prompt_tokens, used.completion_tokens],
    "calls": [[call.function.name, json.loads(call.function.arguments)] for call in called],
}
print(json.dumps({"version": version("litellm"), "answers": answers}))
