"""A gateway as a real process in front of real services, and a plain client of it over real sockets."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from specdec.engine.table_model import write_table_model
from specdec.gateway_settings import GatewaySettings
from specdec.launch.children import Child, start
from tests.support.services import MODELS

CHATML = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def chat_folder(folder: Path, template: str = CHATML) -> Path:
    """Makes a model folder with the embedded pair's tokenizer and a chat template, and returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json"):
        shutil.copy(MODELS / "target" / name, folder / name)
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


@contextlib.contextmanager
def gateway(*coordinators: str, model: Path = MODELS / "target", **own: Any) -> Iterator[Child]:
    """A gateway on a free port in front of coordinators, stopped at the end."""
    told = {"port": 0, "log_level": "error", "drain_grace_s": 1.0, "served_model_name": "embedded", "model": str(model)}
    with start("gateway", GatewaySettings(**{**told, "address": coordinators, **own})) as child:
        child.wait_ready()
        yield child


@dataclass
class Answer:
    """An answer of HTTP."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        """The object in the body."""
        return json.loads(self.body, parse_constant=refuse_constant)

    @property
    def error(self) -> dict[str, Any]:
        """The error in the body, in OpenAI's form."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}, error
        assert isinstance(error["message"], str) and isinstance(error["type"], str), error
        return error


def refuse_constant(name: str) -> None:
    """NaN and Infinity are not JSON."""
    raise AssertionError(f"{name} is not JSON")


def ask(
    address: str,
    path: str,
    body: Any = None,
    method: str = "",
    headers: dict[str, str] | None = None,
    timeout_s: float = 60.0,
) -> Answer:
    """Sends one request, of JSON unless `body` is bytes; returns the whole answer."""
    connection = http.client.HTTPConnection(address, timeout=timeout_s)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = {} if data is None else {"Content-Type": "application/json"}
        connection.request(method or ("GET" if data is None else "POST"), path, data, {**kind, **(headers or {})})
        response = connection.getresponse()
        return Answer(response.status, {key.lower(): value for key, value in response.getheaders()}, response.read())
    finally:
        connection.close()


def metric(address: str, name: str) -> float:
    """The value of a metric without labels on a gateway's page."""
    lines = ask(address, "/metrics").body.decode().splitlines()
    (value,) = [line.removeprefix(f"{name} ") for line in lines if line.startswith(f"{name} ")]
    return float(value)


def events_of(body: bytes) -> list[Any]:
    """Returns the objects of a stream of events. Fails unless every event is one line of data and the last is the
    end."""
    *events, rest = body.decode().split("\n\n")
    assert rest == "", rest
    events = [event for event in events if not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events), events
    assert events[-1] == "data: [DONE]", events[-1]
    return [json.loads(event.removeprefix("data: "), parse_constant=refuse_constant) for event in events[:-1]]


@dataclass
class Text:
    """One choice of an answer, of either kind."""

    text: str = ""
    role: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    reason: str | None = None


LEGACY = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def logprobs_in(logprobs: Any) -> list[Any]:
    """One entry a token, of either form of log-probabilities."""
    if logprobs is None:
        return []
    if "content" in logprobs:
        return logprobs["content"]
    return list(zip(*(logprobs[name] for name in LEGACY), strict=True))


def whole_text(choice: dict[str, Any]) -> Text:
    """The text of a choice of a whole answer."""
    message = choice.get("message", {})
    text = message.get("content") if message else choice["text"]
    return Text(
        text or "",
        message.get("role", ""),
        choice.get("token_ids", []),
        logprobs_in(choice["logprobs"]),
        message.get("tool_calls", []),
        choice["finish_reason"],
    )


def streamed_texts(chunks: list[dict[str, Any]], count: int = 1) -> list[Text]:
    """The texts that chunks make up. Fails for chunks after a text's end."""
    texts = [Text() for _ in range(count)]
    for chunk in chunks:
        for choice in chunk["choices"]:
            own, delta = texts[choice["index"]], choice.get("delta", {})
            assert own.reason is None, "a chunk after the end"
            own.text += delta.get("content") or choice.get("text", "")
            own.role += delta.get("role", "")
            own.token_ids += choice.get("token_ids", [])
            own.logprobs += logprobs_in(choice["logprobs"])
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(own.calls) and call["function"]["arguments"] == "", call
                    own.calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
                else:
                    own.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            own.reason = choice["finish_reason"]
    return texts


class Streaming:
    """A stream that a thread reads. `body`: what has come; `failed`: the error of the connection, if any."""

    def __init__(self, address: str, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self._connection = http.client.HTTPConnection(address, timeout=300.0)
        told = {"Content-Type": "application/json", **(headers or {})}
        self._connection.request("POST", path, json.dumps(body | {"stream": True}).encode(), told)
        self._response = self._connection.getresponse()
        self.status = self._response.status
        self.body = b""
        self.times_s: list[float] = []
        self.failed: Exception | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            while line := self._response.readline():
                self.times_s.append(time.monotonic())
                self.body += line
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as error:
            self.failed = error

    @property
    def event_count(self) -> int:
        """Events that have come."""
        return self.body.count(b"\n\n")

    @property
    def has_ended(self) -> bool:
        """Whether the answer has ended."""
        return not self._thread.is_alive()

    def result(self, timeout_s: float = 300.0) -> bytes:
        """Waits for the end and returns the whole body. Fails if the connection broke."""
        self._thread.join(timeout_s)
        assert self.has_ended, "the stream did not end"
        assert self.failed is None, self.failed
        return self.body

    def leave(self) -> None:
        """Closes the connection in mid-stream."""
        sock = self._connection.sock
        assert sock is not None
        sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(10.0)
        self._connection.close()


def scripted_models(folder: Path, pieces: Sequence[str], special: Sequence[str] = ()) -> Path:
    """Makes a table model that answers every prompt, at temperature 0, with these pieces, which must differ, a token
    each, and then ends; returns its folder. `special`: those that are special tokens."""
    size = len(pieces) + 2
    logits = torch.zeros(size + 1, size + 1, size)
    logits[:, -2:, 1] = 30.0  # after the last token of any prompt comes the first piece
    for token_id in range(1, size - 1):
        logits[:, token_id, (token_id + 1) % (size - 1)] = 30.0
    write_table_model(folder, size, 2048, logits=logits)
    words = {"<|end|>": 0, "<|prompt|>": size - 1} | {piece: at for at, piece in enumerate(pieces, 1)}
    assert len(words) == size
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<|prompt|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<|end|>", *special)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHATML, encoding="utf-8")
    return folder
