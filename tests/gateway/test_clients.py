"""Clients of others, unmodified, in this environment: curl and langchain-openai. `python -m tests.clients` has more."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import pytest

from tests.clients.served import MODEL, PROMPT, QUESTION, SAMPLING
from tests.support.gateways import events_of, streamed_texts
from tests.support.services import Services

LANGCHAIN = """
import json, sys
from functools import reduce
from operator import add
from langchain_openai import ChatOpenAI
url, question, sampling = json.loads(sys.argv[1])
chat = ChatOpenAI(base_url=url, api_key="none", model="embedded", max_retries=0, stream_usage=True, **sampling)
answers = chat.invoke(question), reduce(add, chat.stream(question))
used = [(answer.usage_metadata["input_tokens"], answer.usage_metadata["output_tokens"]) for answer in answers]
print(json.dumps([[answer.content for answer in answers], used]))
"""


@pytest.fixture(scope="module")
def expected(services: Services) -> tuple[str, list[int]]:
    """The text of `Generate` for the template's prompt, with its numbers of prompt and output tokens."""
    outcome = services.client.generate(PROMPT, **SAMPLING)
    return outcome.text, [outcome.started.prompt_length, len(outcome.token_ids)]


def test_curl_gets_the_text(address: str, expected: tuple[str, list[int]]) -> None:
    """Claim: curl gets the text and the usage of `Generate`, whole and as events, and an error as a status that its
    --fail sees."""
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")

    def curl(body: dict[str, Any], *flags: str) -> subprocess.CompletedProcess[bytes]:
        command = ["curl", "-sSN", *flags, f"http://{address}/v1/chat/completions", "-H"]
        command += ["Content-Type: application/json", "-d", json.dumps(body)]
        return subprocess.run(command, capture_output=True, timeout=60, check=False)

    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], **SAMPLING}
    whole = json.loads(curl(body, "--fail").stdout)
    chunks = events_of(curl(body | {"stream": True, "stream_options": {"include_usage": True}}, "--fail").stdout)
    (text,) = streamed_texts(chunks)
    assert whole["choices"][0]["message"]["content"] == text.text == expected[0]
    for usage in (whole["usage"], chunks[-1]["usage"]):
        assert [usage["prompt_tokens"], usage["completion_tokens"]] == expected[1]
    assert curl(body | {"nonsense": 1}, "--fail").returncode == 22


def test_langchain_gets_the_text(address: str, expected: tuple[str, list[int]]) -> None:
    """Claim: langchain-openai's chat model gets the text and the usage of `Generate`, whole and streamed. It runs in a
    process of its own: its imports take seconds of every other test's process."""
    if find_spec("langchain_openai") is None:
        pytest.skip("langchain-openai is not installed")
    asked = json.dumps([f"http://{address}/v1", QUESTION, SAMPLING])
    command = [sys.executable, "-c", LANGCHAIN, asked]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[expected[0]] * 2, [expected[1]] * 2]
