"""llm: a model of its file extra-openai-models.yaml, whole and streamed, and the calls of given tools."""

import json
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

job = json.load(sys.stdin)
folder = tempfile.TemporaryDirectory()
os.environ["LLM_USER_PATH"] = folder.name
models = [
    {"model_id": name, "model_name": job["model"], "api_base": job[url], "supports_tools": True}
    for name, url in (("chat", "base_url"), ("tools", "tools_url"))
]
(Path(folder.name) / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML

import llm  # noqa: E402 (it reads the variable)

chat = llm.get_model("chat")
chat.key = "none"
whole = chat.prompt(job["question"], stream=False, **job["sampling"])
streamed = chat.prompt(job["question"], stream=True, **job["sampling"])
tooled = llm.get_model("tools")
tooled.key = "none"
tools = [llm.Tool(name=t["function"]["name"], input_schema=t["function"]["parameters"]) for t in job["tools"]]
answers = {
    "whole": whole.text(),
    "streamed": "".join(streamed),
    "usage": [whole.usage().input, whole.usage().output],
    "streamed usage": [streamed.usage().input, streamed.usage().output],
    "calls": [
        [call.name, call.arguments]
        for call in tooled.prompt("x", tools=tools, temperature=0, stream=False).tool_calls()
    ],
    "streamed calls": [
        [call.name, call.arguments] for call in tooled.prompt("x", tools=tools, temperature=0).tool_calls()
    ],
}
print(json.dumps({"version": version("llm"), "answers": answers}))
