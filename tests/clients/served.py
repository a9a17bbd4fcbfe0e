"""What clients are run against: three `specdec serve --http-port`, the embedded pair with a ChatML template, a model
that writes two tool calls, and a chat model; and what their answers must be, by gRPC."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.folders import CHAT_MODEL
from tests.support.gateways import chat_folder, scripted_models
from tests.support.pages import read_page
from tests.support.ports import free_port
from tests.support.services import MODELS, Client

MODEL = "embedded"
QUESTION = "Name three colours."
REQUEST_COUNT = 6  # of a benchmark
TASK, OBJECT_COUNT = "Describe a person with name, age and moods.", 5  # of each way to get an object
OBJECTS = ("schema objects", "tool objects", "strict tool objects", "json objects", "streamed tool objects")
COUNTERS = {  # of the coordinator's page, by the names of answers
    "prompt tokens": "vllm:prompt_tokens_total",
    "output tokens": "vllm:generation_tokens_total",
    "drafts": "vllm:spec_decode_num_drafts_total",
    "draft tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted draft tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
TEXTS = [json.loads(line)["prompt"] for line in (MODELS / "heldout_prompts.jsonl").read_text().splitlines()[:40]]
SCORES = {"log-likelihoods": 5 * len(TEXTS), "within 1e-3 nats": True, "other picks": 0, "other greedy ones": 0}
CASES = {"coverage": "success", "fuzzing": "success", "untested": 0, "server errors": [], "errors": []}
SAMPLING: dict[str, Any] = {"seed": 11, "max_tokens": 24, "temperature": 1.0}
PROMPT = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"  # the template's text of QUESTION
PIECES = [
    "Let me look. ",
    "<tool",
    '_call>\n{"name": "lo',
    'ok", "arguments": {"where": "a } b", "n',
    '": [1, {"x": 2}]',
    "}",
    "}\n</tool_call>\n<tool_call>",
    '{"name": "stop", "arguments": {}}',
    "\n</tool_call>",
]
CALLS = [["look", {"where": "a } b", "n": [1, {"x": 2}]}], ["stop", {}]]
TOOLS = [
    {
        "type": "function",
        "function": {"name": name, "description": f"To {name}.", "parameters": {"type": "object", "properties": {}}},
    }
    for name, _ in CALLS
]


@dataclass(frozen=True, slots=True)
class Served:
    """Addresses of the pair's gateway and its coordinator's metrics, of the model with calls and of the chat model; the
    pair's folder, and the expected answers by their names: texts, [prompt tokens, output tokens], calls, requests of a
    benchmark, numbers of objects."""

    chat: str
    metrics: str
    tools: str
    objects: str
    folder: Path
    expected: dict[str, Any]

    @property
    def job(self) -> dict[str, Any]:
        """What the program of a client reads."""
        urls = {"base_url": f"http://{self.chat}/v1", "tools_url": f"http://{self.tools}/v1"}
        urls |= {"chat_url": f"http://{self.objects}/v1", "task": TASK, "object_count": OBJECT_COUNT}
        benchmark = {"folder": str(self.folder), "request_count": REQUEST_COUNT}
        return (
            urls
            | benchmark
            | {"model": MODEL, "question": QUESTION, "sampling": SAMPLING, "tools": TOOLS, "texts": TEXTS}
        )

    def counts(self) -> dict[str, float]:
        """What the pair's coordinator has counted. Raises URLError."""
        page = read_page(self.metrics)
        return {name: page.value(counter) for name, counter in COUNTERS.items()}


@contextlib.contextmanager
def serve(*flags: str) -> Iterator[tuple[str, str]]:
    """The addresses of coordinator and gateway of a `specdec serve`, stopped at the end."""
    command = [sys.executable, "-m", "specdec.cli", "serve", "--port=0", "--http-port=0", "--threads=1", *flags]
    command += [f"--served-model-name={MODEL}", "--log-level=error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            text = ""
            while (found := re.search(r"specdec serves \S+ on (\S+)\n.*base URL http://(\S+)/v1", text, re.S)) is None:
                line = process.stdout.readline()
                assert line, f"specdec serve ended: {text}"
                text += line
            yield found[1], found[2]
        finally:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Served]:
    """Both, with files in `folder`."""
    chat = chat_folder(folder / "chat")
    shutil.copy(MODELS / "target" / "model.safetensors", chat)
    scripted = scripted_models(folder / "scripted", PIECES)
    metrics = f"127.0.0.1:{free_port()}"
    pair = f"--model={chat}", f"--draft-model={MODELS / 'draft'}", "--dtype=float32", f"--metrics-address={metrics}"
    calling = f"--model={scripted}", f"--draft-model={scripted}"
    chatting = f"--model={CHAT_MODEL}", f"--draft-model={MODELS / 'smollm2-draft'}"
    with (
        serve(*pair) as (coordinator, gateway),
        serve(*calling) as (_, tools),
        serve(*chatting) as (_, objects),
    ):
        client = Client(coordinator)
        try:
            outcome = client.generate(PROMPT, **SAMPLING)
        finally:
            client.close()
        usage = [outcome.started.prompt_length, len(outcome.token_ids)]
        expected = {"whole": outcome.text, "streamed": outcome.text, "usage": usage, "streamed usage": usage}
        expected |= {"calls": CALLS, "streamed calls": CALLS, "answered": REQUEST_COUNT, "failed": 0, **CASES, **SCORES}
        expected |= dict.fromkeys(OBJECTS, OBJECT_COUNT)
        yield Served(gateway, metrics, tools, objects, chat, expected)
