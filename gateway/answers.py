"""What comes of a text as OpenAI's objects: the parts of one choice, and their chunks or one whole answer.

A choice turns messages of gRPC into parts; both kinds of answer are made of the same parts, so that they say the same.
The text of a common chunk is put between constant bytes: no object is made for it.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any

from specdec.gateway.calls import SPECIAL_MARK, CallArguments, CallStart, Content, Event, ToolCallParser
from specdec.gateway.prompt_logprobs import LOGPROB_MIN, Given, as_json, echoed_entries, echoes
from specdec.gateway.prompts import Prompts
from specdec.gateway.reports import rounds_of, speculative_decoding, statistics_of
from specdec.gateway.requests import ChatRequest, CompletionRequest
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import types_pb2 as types_pb

REASONS = {coordinator_pb.FINISH_REASON_STOP: "stop", coordinator_pb.FINISH_REASON_LENGTH: "length"}
CALLS = "tool_calls"
DONE = b"data: [DONE]\n\n"
quoted = json.encoder.encode_basestring  # a text as JSON, other alphabets as they are


def to_json(value: Any) -> str:
    """Returns a value as JSON in one line, other alphabets as they are. Raises ValueError for what JSON lacks."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


@dataclass(slots=True)
class Part:
    """What came with one message of gRPC. `reason`: the end of the text, with its last part."""

    events: list[Event] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    speculative: dict[str, Any] | None = None
    reason: str | None = None
    stop_reason: str | int | None = None


class Choice:
    """One text on its way. `started` and `finished` are gRPC's; `output_count`: tokens so far; `given`: its prompt, if
    the answer has anything of it."""

    def __init__(
        self,
        index: int,
        body: ChatRequest | CompletionRequest,
        prompts: Prompts,
        parser: ToolCallParser | None,
        given: Given | None = None,
    ) -> None:
        self.index, self.given = index, given
        self.output_count = 0
        self.started: coordinator_pb.Started | None = None
        self.finished: coordinator_pb.Finished | None = None
        self.has_ended = False
        self._body, self._prompts, self._parser = body, prompts, parser
        self._is_chat = isinstance(body, ChatRequest)
        self._has_logprobs = body.logprobs is not None and body.logprobs is not False
        self._is_echo_due = echoes(body)
        self._prompt_parts: list[types_pb.PromptLogprobs] = []
        own = self._has_logprobs or self._is_echo_due or body.return_token_ids or body.speculative.rounds
        self._is_plain = not (own or parser)
        self._ends_after_call = parser is not None and isinstance(body, ChatRequest) and not body.parallel_tool_calls
        self._has_call = False
        self._text_length = 0
        self._round_count = 0

    def take_prompt(self, part: types_pb.PromptLogprobs) -> None:
        """Keeps a part of the prompt's log-probabilities."""
        self._prompt_parts.append(part)

    @property
    def prompt_logprobs(self) -> str | None:
        """The log-probabilities of the prompt in vLLM's form, as JSON; None if the body does not ask for them."""
        count = self._body.prompt_logprobs
        return None if count is None else as_json(self._prompt_parts, count, self._prompts)

    def _begun(self) -> Part:
        """Returns a part to add to: empty, or the answer's first with the prompt that it repeats."""
        part, given, body = Part(), self.given, self._body
        if self._is_echo_due and given is not None:
            self._is_echo_due = False
            part.events = [Content(given.text)]
            self._text_length = len(given.text)
            if self._has_logprobs:
                shown = self._prompts, body.return_tokens_as_token_ids
                part.logprobs = echoed_entries(given, self._prompt_parts, int(body.logprobs or 0), *shown)
        return part

    def take(self, delta: coordinator_pb.Delta) -> Part | None:
        """Returns what a delta says to the client; None if nothing."""
        self.output_count += len(delta.token_ids)
        if self._is_plain:
            return Part([Content(delta.text)]) if delta.text else None
        part = self._begun()
        if self._parser is not None:
            part.events += self._events(self._parser.feed(marked_text(delta, self._parser.mark_id)))
        elif delta.text:
            part.events.append(Content(delta.text))
        if self._has_logprobs:
            part.logprobs += self._logprobs(delta)
        if self._body.return_token_ids:
            part.token_ids = list(delta.token_ids)
        if self._body.speculative.rounds:
            part.speculative = rounds_of(delta, self._prompts, self._round_count)
            self._round_count += len(delta.rounds)
        if self._ends_after_call and self._parser is not None and self._parser.complete_count:
            part.reason, self.has_ended = CALLS, True
        has_something = part.events or part.logprobs or part.token_ids or part.speculative or part.reason
        return part if has_something else None

    def end(self, finished: coordinator_pb.Finished) -> Part:
        """Returns the last part."""
        self.finished, self.has_ended = finished, True
        part = self._begun()
        part.reason = REASONS.get(finished.reason, "stop")
        if self._parser is not None:
            part.events = self._events(self._parser.end(part.reason or "stop"))
            if self._parser.call_count and part.reason == "stop":
                part.reason = CALLS
        if finished.stop_string:
            part.stop_reason = finished.stop_string
        elif finished.HasField("stop_token_id") and finished.stop_token_id in (self._asked_stop_ids()):
            part.stop_reason = finished.stop_token_id
        if self._body.speculative.statistics:
            part.speculative = {"statistics": statistics_of(finished.statistics)}
        return part

    def _asked_stop_ids(self) -> list[int]:
        own = [self._prompts.special_id(stop) for stop in self._body.stops]
        return [*(self._body.stop_token_ids or ()), *(token_id for token_id in own if token_id is not None)]

    def _events(self, found: list[Event]) -> list[Event]:
        """Returns the parser's events, parts of one call's arguments as one; where the answer ends after its first
        call, without those that follow it."""
        kept: list[Event] = []
        for event in found:
            last = kept[-1] if kept else None
            if self._ends_after_call and (self._has_call if isinstance(event, Content) else event.index > 0):
                break
            self._has_call = self._has_call or isinstance(event, CallStart)
            if isinstance(event, CallArguments) and isinstance(last, CallArguments) and event.index == last.index:
                kept[-1] = CallArguments(event.index, last.text + event.text)
            else:
                kept.append(event)
        return kept

    def _logprobs(self, delta: coordinator_pb.Delta) -> list[dict[str, Any]]:
        entries = []
        for token_id, entry, length in zip(delta.token_ids, delta.logprobs, delta.text_lengths, strict=True):
            own = self._token(token_id, entry.logprob)
            own["top_logprobs"] = [
                self._token(top_id, value) for top_id, value in zip(entry.top_token_ids, entry.top_logprobs)
            ]
            if not self._is_chat:
                own["text_offset"] = self._text_length
                self._text_length += length
            entries.append(own)
        return entries

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, data = self._prompts.piece(token_id)
        if self._body.return_tokens_as_token_ids:
            text = f"token_id:{token_id}"
        return {"token": text, "logprob": max(LOGPROB_MIN, logprob), "bytes": list(data)}


def marked_text(delta: coordinator_pb.Delta, mark_id: int | None) -> str:
    """Returns a delta's text, with SPECIAL_MARK in the place of a special token that is a mark of calls."""
    if mark_id is None or mark_id not in delta.token_ids:
        return delta.text
    text, at = "", 0
    for token_id, length in zip(delta.token_ids, delta.text_lengths, strict=True):
        text += delta.text[at : at + length] + (SPECIAL_MARK if token_id == mark_id else "")
        at += length
    return text


def chat_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns log-probabilities in the form of chat."""
    return {"content": entries, "refusal": None}


def completion_logprobs(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns log-probabilities in the older form; the dictionary of the likeliest has the token itself too."""
    return {
        "text_offset": [own["text_offset"] for own in entries],
        "token_logprobs": [own["logprob"] for own in entries],
        "tokens": [own["token"] for own in entries],
        "top_logprobs": [
            None
            if own["logprob"] is None
            else {one["token"]: one["logprob"] for one in (*reversed(own["top_logprobs"]), own)}
            for own in entries
        ],
    }


class Answer:
    """The answer to one request, of all its choices: chunks of a stream, or one object."""

    def __init__(
        self,
        body: ChatRequest | CompletionRequest,
        choices: list[Choice],
        model: str,
        draft_length_max: int,
    ) -> None:
        """`draft_length_max`: of this server."""
        self._body, self.choices = body, choices
        self._is_chat = isinstance(body, ChatRequest)
        self._draft_length_max = draft_length_max
        started = choices[0].started
        assert started is not None
        self.request_id = started.request_id
        name = "chatcmpl" if self._is_chat else "cmpl"
        kind = "chat.completion" if self._is_chat else "text_completion"
        self._head = {"id": f"{name}-{started.request_id}", "object": kind, "created": int(time.time()), "model": model}
        chunk = self._head | {"object": "chat.completion.chunk" if self._is_chat else kind}
        self._chunk_head = "data: " + to_json(chunk)[:-1]
        self._constant_tail = (',"usage":null' if body.has_usage else "") + "}\n\n"

    # --- a stream

    def first_chunks(self) -> bytes:
        """Returns the chunks before any text: in chat the role of each choice."""
        if not self._is_chat:
            return b""
        chunks = [self._chunk(own, {"delta": {"role": "assistant", "content": ""}}) for own in self.choices]
        if self._body.return_token_ids:
            more = f',"prompt_token_ids":{to_json(prompt_ids_of(self.choices[0]))}}}\n\n'
            chunks[0] = chunks[0].removesuffix(b"}\n\n") + more.encode()
        return b"".join(chunks)

    def chunks(self, choice: Choice, part: Part) -> bytes:
        """Returns the chunks of a part."""
        if part.reason is None and not (part.logprobs or part.token_ids or part.speculative):
            if len(part.events) == 1 and isinstance(part.events[0], Content):
                return self._text_chunk(choice, part.events[0].text)
        more: dict[str, Any] = {}
        if part.logprobs:
            form = chat_logprobs if self._is_chat else completion_logprobs
            more["logprobs"] = form(part.logprobs)
        if part.token_ids:
            more["token_ids"] = part.token_ids
            if not self._is_chat and choice.output_count == len(part.token_ids):
                more["prompt_token_ids"] = prompt_ids_of(choice)
        beside = part.speculative if part.reason is None else None
        texts: list[dict[str, Any]]
        if self._is_chat:
            texts = [{"delta": delta_of(event)} for event in part.events]
        else:
            texts = [{"text": event.text} for event in part.events if isinstance(event, Content)]
        nothing: dict[str, Any] = {"delta": {"content": ""}} if self._is_chat else {"text": ""}
        if not texts and (more or beside):
            texts = [nothing]
        chunks = []
        for at, text in enumerate(texts):
            own = text if at else text | more
            chunks.append(self._chunk(choice, own, beside if at == 0 else None))
        if part.reason is not None:
            end: dict[str, Any] = {"delta": {}} if self._is_chat else {"text": ""}
            end |= {"finish_reason": part.reason, "stop_reason": part.stop_reason}
            chunks.append(self._chunk(choice, end, part.speculative))
        return b"".join(chunks)

    def last_chunks(self) -> bytes:
        """Returns what follows the last choice's end."""
        if not self._body.has_usage:
            return DONE
        own = {"choices": [], **self._ending()}
        return f"{self._chunk_head},{to_json(own)[1:]}\n\n".encode() + DONE

    def _text_chunk(self, choice: Choice, text: str) -> bytes:
        body = f'"delta":{{"content":{quoted(text)}}}' if self._is_chat else f'"text":{quoted(text)}'
        rest = '"logprobs":null,"finish_reason":null}]'
        return f'{self._chunk_head},"choices":[{{"index":{choice.index},{body},{rest}{self._tail()}'.encode()

    def _chunk(self, choice: Choice, own: dict[str, Any], speculative: dict[str, Any] | None = None) -> bytes:
        described = {"index": choice.index, "logprobs": None, "finish_reason": None} | own
        beside = f',"speculative":{to_json(speculative)}' if speculative else ""
        text = f'{self._chunk_head},"choices":[{to_json(described)}]{beside}{self._tail()}'
        return text.encode()

    def _tail(self) -> str:
        """Returns the end of a chunk, with the usage so far if the body asks for it on each."""
        if not self._body.has_usage_so_far:
            return self._constant_tail
        return f',"usage":{to_json(self._usage())}}}\n\n'

    # --- one object

    def whole(self, parts: list[list[Part]]) -> bytes:
        """Returns the whole answer; `parts`: of each choice, all of them."""
        choices = []
        for choice, own in zip(self.choices, parts, strict=True):
            text = to_json(self._whole_choice(choice, own))
            choices.append(text if self._is_chat else with_prompt_logprobs(text, choice))
        whole: dict[str, Any] = {}
        if self._is_chat and self._body.return_token_ids:
            whole["prompt_token_ids"] = prompt_ids_of(self.choices[0])
        whole |= self._ending()
        speculative: dict[str, Any] = {}
        for part in parts[0]:
            for name, value in (part.speculative or {}).items():
                speculative[name] = speculative[name] + value if name in speculative else value
        if speculative:
            whole["speculative"] = speculative
        text = f'{to_json(self._head)[:-1]},"choices":[{",".join(choices)}],{to_json(whole)[1:]}'
        return (with_prompt_logprobs(text, self.choices[0]) if self._is_chat else text).encode()

    def _whole_choice(self, choice: Choice, parts: list[Part]) -> dict[str, Any]:
        events = [event for part in parts for event in part.events]
        text = "".join(event.text for event in events if isinstance(event, Content))
        entries = [entry for part in parts for entry in part.logprobs]
        has_logprobs = self._body.logprobs is not None and self._body.logprobs is not False
        form = chat_logprobs if self._is_chat else completion_logprobs
        own: dict[str, Any] = {"index": choice.index}
        if self._is_chat:
            calls = whole_calls(events)
            message = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
            own["message"] = message | ({"tool_calls": calls} if calls else {})
        else:
            own["text"] = text
        own["logprobs"] = form(entries) if has_logprobs else None
        own["finish_reason"], own["stop_reason"] = parts[-1].reason, parts[-1].stop_reason
        if self._body.return_token_ids:
            own["token_ids"] = [token_id for part in parts for token_id in part.token_ids]
            if not self._is_chat:
                own["prompt_token_ids"] = prompt_ids_of(choice)
        return own

    def _usage(self) -> dict[str, Any]:
        """Returns the token counts so far."""
        prompt_count = sum(own.started.prompt_length for own in self.choices if own.started)
        output_count = sum(own.output_count for own in self.choices)
        total = prompt_count + output_count
        return {"prompt_tokens": prompt_count, "completion_tokens": output_count, "total_tokens": total}

    def _ending(self) -> dict[str, Any]:
        """Returns usage, and the metrics of a single text."""
        finished = [own.finished for own in self.choices if own.finished is not None]
        firsts = [own.finished for own in self.choices[:: self._body.n] if own.finished is not None]  # read the prompt
        cached_count = sum(own.statistics.cached_prompt_tokens for own in firsts)
        usage = self._usage() | {"prompt_tokens_details": {"cached_tokens": cached_count}}
        if self._body.prediction is not None:
            accepted = sum(own.statistics.num_prediction_accepted_tokens for own in finished)
            offered = sum(own.statistics.num_prediction_draft_tokens for own in finished)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": offered - accepted,
            }
        if len(self.choices) > 1 or not finished:
            return {"usage": usage}
        metrics = speculative_decoding(finished[0].statistics, self._draft_length_max)
        return {"usage": usage, "metrics": {"speculative_decoding": metrics}}


def prompt_ids_of(choice: Choice) -> list[int]:
    """Returns the tokens of a choice's prompt, of a body that asks for them."""
    return [] if choice.given is None else choice.given.token_ids


def with_prompt_logprobs(text: str, choice: Choice) -> str:
    """Returns an object of JSON with the log-probabilities of a choice's prompt, if its body asks for them."""
    own = choice.prompt_logprobs
    return text if own is None else f'{text[:-1]},"prompt_logprobs":{own}}}'


def delta_of(event: Event) -> dict[str, Any]:
    """Returns the delta of chat for an event."""
    if isinstance(event, Content):
        return {"content": event.text}
    if isinstance(event, CallStart):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}


def whole_calls(events: list[Event]) -> list[dict[str, Any]]:
    """Returns the calls that events make up."""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        if isinstance(event, CallStart):
            function = {"name": event.name, "arguments": ""}
            calls[event.index] = {"id": event.id, "type": "function", "function": function}
        elif isinstance(event, CallArguments):
            calls[event.index]["function"]["arguments"] += event.text
    return list(calls.values())
