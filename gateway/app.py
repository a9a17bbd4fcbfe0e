"""The paths of OpenAI's interface: each request to its texts, each text to its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from specdec import __version__
from specdec.errors import ReplicaUnavailable, SpecdecError
from specdec.gateway import openapi
from specdec.gateway.answers import Answer, Choice, Part
from specdec.gateway.calls import MARKS, ToolCallParser, format_of
from specdec.gateway.errors import CONTEXT_LENGTH, HttpError, error_from, too_long
from specdec.gateway.event_stream import EventStream, parts_of, start_all
from specdec.gateway.gate import CLIENT_GONE, IDENTITY, Gate, Watched, read_whole
from specdec.gateway.keys import Keys
from specdec.gateway.metrics import OTHER, GatewayMetrics
from specdec.gateway.page import page_routes
from specdec.gateway.parameters import COMPLETION_TOKENS_DEFAULT, make_requests, salt_of
from specdec.gateway.prompt_logprobs import check_encoder, given_prompts
from specdec.gateway.prompts import Prompts, check_length
from specdec.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
)
from specdec.gateway.stream import Coordinators
from specdec.gateway.strict import Strict, read_body
from specdec.gateway.tools import Tool
from specdec.gateway_settings import GatewaySettings
from specdec.telemetry.metrics_page import MetricsPage

THREAD_BODY_BYTES = 64 << 10  # a longer body is read beside the event loop
Body = TypeVar("Body", bound=Strict)


class Gateway:
    """All handlers, and what they share."""

    def __init__(
        self, settings: GatewaySettings, prompts: Prompts, coordinators: Coordinators, metrics: GatewayMetrics
    ) -> None:
        self._settings, self._prompts, self._coordinators = settings, prompts, coordinators
        self._defaults = prompts.sampling_defaults() if settings.generation_config == "model" else {}
        self.metrics = metrics
        self.page = MetricsPage(metrics.page)
        self.running: set[Watched] = set()
        self.is_draining = False
        self._created = int(time.time())
        found = None if prompts.template is None else format_of(prompts.template)
        self._call_format = found if settings.tool_call_format == "auto" else settings.tool_call_format

    def application(self, keys: Keys | None, is_local: bool) -> ASGIApp:
        """Returns the whole application; arguments as for `Gate`."""
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/tokenizer_info", self._tokenizer_info),
            Route("/health", self._health),
            Route("/ping", self._health),
            Route("/version", self._version),
            Route("/metrics", self._metrics),
            Route("/openapi.json", self._openapi),
            *page_routes(),
        ]
        refused: Any = dict.fromkeys((HttpError, HTTPException), self._refused)
        failed: Any = dict.fromkeys((SpecdecError, TimeoutError, Exception), self._failed)
        gate = Gate(Starlette(routes=routes, exception_handlers=refused | failed), keys, is_local, self.metrics)
        origins = self._settings.allowed_origins
        if not origins:
            return gate
        exposed = ("x-request-id", "retry-after")
        return CORSMiddleware(gate, origins, ("GET", "POST"), ("*",), expose_headers=exposed)

    # --- generation

    async def _chat(self, request: HttpRequest) -> Response:
        body = await self._read(request, ChatRequest)
        positions_max = self._coordinators.description.target.positions_max
        async with Watched(request.receive, self.running):
            kwargs = dict(body.chat_template_kwargs or {})
            if body.reasoning_effort is not None:
                kwargs.setdefault("reasoning_effort", body.reasoning_effort)
            tools = body.offered_tools
            grammar = body.call_grammar(self._call_format, self._prompts.special_id)
            begins = (
                not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
            )
            prompt_ids = await self._prompts.encode_chat(
                plain(body.messages), positions_max, plain(tools) or None, kwargs, begins, body.continue_final_message
            )
            return await self._generate(request, body, [prompt_ids], grammar, tools)

    def _parser(self, tools: Sequence[Tool]) -> ToolCallParser | None:
        if not tools or self._call_format is None:
            return None
        mark_id = self._prompts.special_id(MARKS[self._call_format])
        return ToolCallParser(self._call_format, {tool.function.name for tool in tools}, mark_id=mark_id)

    async def _complete(self, request: HttpRequest) -> Response:
        body = await self._read(request, CompletionRequest)
        for prompt in body.prompt:
            if isinstance(prompt, str):
                check_length(prompt, self._coordinators.description.target.positions_max, "prompt")
        async with Watched(request.receive, self.running):
            return await self._generate(request, body, body.prompt, body.grammar)

    async def _generate(
        self,
        request: HttpRequest,
        body: ChatRequest | CompletionRequest,
        given: Sequence[str | list[int]],
        grammar: dict[str, Any] | None,
        tools: Sequence[Tool] = (),
    ) -> Response:
        """Starts all texts, then returns their stream, or their whole answer."""
        if len(given) * body.n > 1 and (body.speculative.statistics or body.speculative.rounds):
            sentence = "speculative.statistics and speculative.rounds are of a single choice"
            raise HttpError(400, sentence, "invalid_value", "speculative")
        described = self._coordinators.description
        positions_max = described.target.positions_max
        if described.target.encoder_positions_max:
            check_encoder(body)
        whole = await given_prompts(body, given, self._prompts, positions_max)
        salt = salt_of(request.scope.get(IDENTITY), body.cache_salt)
        requests = make_requests(body, given, self._prompts, positions_max, salt, self._defaults, grammar)
        trace = request.headers.get("traceparent")
        metadata = [("traceparent", trace)] if trace and trace.isascii() else []
        streams = [self._coordinators.messages(own, body.has_statistics, metadata) for own in requests]
        count = len(streams) * body.n
        choices = [
            Choice(index, body, self._prompts, self._parser(tools), whole[index // body.n] if whole else None)
            for index in range(count)
        ]
        try:
            await start_all(streams, choices)
        except SpecdecError as error:
            raise await self._explained(error, given, body) from error
        answer = Answer(body, choices, self.model, described.num_speculative_tokens_max)
        headers = {"x-request-id": answer.request_id}
        if body.stream:
            return EventStream(answer, streams, headers, self.running, self.count)
        parts: list[list[Part]] = [[] for _ in choices]
        async with aclosing(parts_of(streams, choices)) as found:
            async for choice, part in found:
                parts[choice.index].append(part)
        return Response(answer.whole(parts), media_type="application/json", headers=headers)

    async def _explained(
        self, error: SpecdecError, given: Sequence[str | list[int]], body: ChatRequest | CompletionRequest
    ) -> HttpError:
        """Returns the error of a text that did not start; of one that is too long with its number of tokens."""
        found = error_from(error, "messages" if isinstance(body, ChatRequest) else "prompt")
        target = self._coordinators.description.target
        is_counted = found.code == CONTEXT_LENGTH and not target.encoder_positions_max
        if not is_counted or len(given) > 1 or not isinstance(given[0], str):
            return found
        positions_max = target.positions_max
        count = len(await self._prompts.encode(given[0], positions_max))
        return too_long(positions_max, count, body.output_count_max or COMPLETION_TOKENS_DEFAULT, "prompt")

    # --- the rest of the interface

    @property
    def model(self) -> str:
        """The served name. Raises ReplicaUnavailable while it is the target's, and no target is known."""
        if self._settings.served_model_name is not None:
            return self._settings.served_model_name
        if not self.metrics.model:
            self.metrics.model = self._coordinators.description.target.model_name
        return self.metrics.model

    async def _read(self, request: HttpRequest, kind: type[Body]) -> Body:
        """Returns the body. Raises HttpError for one that is refused, and for another model."""
        data = await read_whole(request.scope, request.receive)
        try:
            positions_max = self._coordinators.description.target.positions_max
        except ReplicaUnavailable as error:
            raise error_from(error) from None
        if len(data) > THREAD_BODY_BYTES:
            body = await asyncio.to_thread(read_body, kind, data, positions_max)
        else:
            body = read_body(kind, data, positions_max)
        named = getattr(body, "model", None)
        if named is not None and named != self.model:
            raise self._unknown_model(named)
        return body

    def _unknown_model(self, name: str) -> HttpError:
        return HttpError(404, f"the model {name[:200]!r} is not served; {self.model!r} is", "model_not_found", "model")

    def _described_model(self) -> dict[str, Any]:
        target = self._coordinators.description.target
        own = {
            "id": self.model,
            "object": "model",
            "created": self._created,
            "owned_by": "specdec",
            "root": target.model_name,
            "parent": None,
            "max_model_len": target.positions_max,
        }
        return own | ({"sampling_defaults": self._defaults} if self._defaults else {})

    async def _models(self, _: HttpRequest) -> Response:
        return JSONResponse({"object": "list", "data": [self._described_model()]})

    async def _model(self, request: HttpRequest) -> Response:
        name = request.path_params["name"]
        if name.lstrip("/") != self.model.lstrip("/"):
            raise self._unknown_model(name)
        return JSONResponse(self._described_model())

    async def _tokenize(self, request: HttpRequest) -> Response:
        body = await self._read(request, TokenizeRequest)
        positions_max = self._coordinators.description.target.positions_max
        if body.prompt is not None:
            found = await self._prompts.encode(body.prompt, positions_max, body.add_special_tokens)
        else:
            begins = body.add_generation_prompt and not body.continue_final_message
            arguments = plain(body.tools), body.chat_template_kwargs, begins, body.continue_final_message
            found = await self._prompts.encode_chat(plain(body.messages), positions_max, *arguments)
        answer: dict[str, Any] = {"count": len(found), "max_model_len": positions_max, "tokens": found}
        if body.return_token_strs:
            answer["token_strs"] = [self._prompts.piece(token_id)[0] for token_id in found]
        return JSONResponse(answer)

    async def _detokenize(self, request: HttpRequest) -> Response:
        body = await self._read(request, DetokenizeRequest)
        return JSONResponse({"prompt": await self._prompts.decode(body.tokens)})

    async def _tokenizer_info(self, _: HttpRequest) -> Response:
        return JSONResponse(self._prompts.info())

    async def _health(self, _: HttpRequest) -> Response:
        if self.is_draining:
            raise HttpError(503, "the gateway stops", "stopping")
        self._coordinators.description  # noqa: B018  # raises while no coordinator takes requests
        return JSONResponse({})

    async def _version(self, _: HttpRequest) -> Response:
        return JSONResponse({"version": __version__})

    async def _metrics(self, _: HttpRequest) -> Response:
        body = await asyncio.to_thread(generate_latest, self.page, openmetrics.ALLOWUTF8)
        return Response(body, media_type=CONTENT_TYPE_PLAIN_0_0_4)

    async def _openapi(self, _: HttpRequest) -> Response:
        return Response(openapi.FILE.read_bytes(), media_type="application/json")

    # --- errors

    async def _refused(self, _: HttpRequest, error: Exception) -> Response:
        if isinstance(error, HTTPException):
            words = {404: "there is no such path", 405: "this path has other methods"}
            error = HttpError(error.status_code, words.get(error.status_code, error.detail), "not_found")
        assert isinstance(error, HttpError)
        self.count(error)
        return Response(error.body, error.status, error.headers, "application/json")

    async def _failed(self, request: HttpRequest, error: Exception) -> Response:
        return await self._refused(request, error_from(error))

    def count(self, error: HttpError) -> None:
        """Counts an error in the metrics."""
        if error.status == CLIENT_GONE:
            self.metrics.gone_count += 1
        elif error.param is not None:
            known = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
            name = error.param.partition(".")[0]
            self.metrics.refusals[(name if name in known else OTHER,)] += 1

    def stop(self) -> None:
        """Ends all requests under way with an error."""
        for watched in list(self.running):
            watched.stop(HttpError(503, "the gateway stops; send the request again", "stopping"))


def plain(values: Sequence[Message] | Sequence[Tool] | None) -> Any:
    """Returns messages or tools as the objects that a template takes: as they were sent, without absent fields."""
    return None if values is None else [value.model_dump(exclude_unset=True, exclude_none=True) for value in values]
