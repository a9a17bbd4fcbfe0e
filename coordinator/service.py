"""The coordinator: the public API, and the service of `specdec coordinator`.

It admits a request, reads it and tokenises its prompt in a thread, runs one generation for it and ends all work for it
when the client disconnects. It is SERVING while a compatible target is connected.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from specdec.config import CoordinatorSettings
from specdec.coordinator.bad_words import bad_word_tokens
from specdec.coordinator.choices import Choices
from specdec.coordinator.fleet import Choice, Fleet
from specdec.coordinator.generation import Generation, Reader
from specdec.coordinator.grammars import Grammars, LegalRuns
from specdec.coordinator.metrics import page_metrics
from specdec.coordinator.output import Ending, OutputProcessor
from specdec.coordinator.recording import Recorder
from specdec.coordinator.statistics import CoordinatorMetrics, RequestStatistics
from specdec.coordinator.tokenizer import BYTES_PER_TOKEN_MAX, Tokenizer
from specdec.coordinator.tracing import open_request
from specdec.errors import CacheExhausted, InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.process_watch import ProcessWatch
from specdec.protocol.calibration import Calibration
from specdec.protocol.limits import UINT64_MAX, check_token_ids
from specdec.protocol.report import Delta, Finished, Started
from specdec.protocol.request import GenerationRequest
from specdec.protocol.session import Session
from specdec.protocol.tree_shape import path_count_max
from specdec.protocol.types import Description, FinishReason, Proposer, ResolvedSamplingParams
from specdec.rpc.convert_generate import (
    check_counts,
    choice_count,
    coordinator_description_to_message,
    event_to_message,
    request_from_message,
)
from specdec.rpc.process import set_startup_objects_aside, start_workers, until_stop_requested
from specdec.rpc.server import Context, Server, message_bytes_max, unary, unary_stream
from specdec.telemetry.logs import bind, configure_logs, get_logger
from specdec.telemetry.metrics_page import MetricsPage
from specdec.telemetry.open_tracing import open_tracing
from specdec.telemetry.tracing import Tracing, caller_trace
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import types_pb2 as types_pb

SERVICE = "specdec.v1.CoordinatorService"
SWITCH_INTERVAL_S = 0.0005
READY_POLL_S = 0.02
DRAFT_GRACE_S = 2.0
SESSION_OUTCOMES = 256.0  # that a generation's own calibration keeps: it follows its text
POSITIONS_MAX_ASSUMED = 1 << 18  # of the target, for the message cap: the port opens before it is connected


class Prompted(NamedTuple):
    """A request, the tokens of its prompt, the output of each choice after the resumed tokens and the end that these
    reached, if any; the tokens that it predicts, those of its bad words, and how many of its prompt's are an encoder's
    input: then the others begin the output."""

    request: GenerationRequest
    prompt: tuple[int, ...]
    outputs: list[OutputProcessor]
    ending: Ending | None
    predicted: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]
    encoder_length: int


class Coordinator:
    """All generations of one coordinator process."""

    def __init__(
        self, settings: CoordinatorSettings, tokenizer: Tokenizer, tracing: Tracing, changed: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._tracing = tracing
        self._tokenizer = tokenizer
        self._grammars = Grammars(settings.tokenizer)
        self.metrics = CoordinatorMetrics()
        self.fleet = Fleet(settings, tokenizer.fingerprint, changed)
        self._numbers = itertools.count(1)
        self._free_count = settings.max_num_seqs  # places for generations
        self._generations: set[Generation] = set()
        record_bytes_max = settings.record_mb_max << 20
        self.recorder = Recorder(settings.record, record_bytes_max) if settings.record is not None else None

    def text_bytes_max(self) -> dict[str, float]:
        """Returns the size of the longest text that is tokenised for the connected targets, checked before parsing."""
        served = self.fleet.served()
        if served is None:
            return {}
        names = "GenerateRequest.text", "DecoderPrompt.text", "Prediction.text"
        return dict.fromkeys(names, served.positions_max * BYTES_PER_TOKEN_MAX)

    async def generate(
        self, message: coordinator_pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[coordinator_pb.GenerateResponse, None]:
        """Runs the generations of a request, one of each choice, and yields their events; their work ends when this
        generator is closed."""
        caller, follows_caller = caller_trace(context.invocation_metadata()), self._settings.trace_parent_sampling
        request = open_request(self.metrics, self._tracing, caller, follows_caller)
        requests: Sequence[RequestStatistics] = (request,)
        bind(trace_id=request.context.trace_id.hex())
        taken_count = 0
        legal_runs: Sequence[LegalRuns | None] = ()
        try:
            model = self.fleet.served()
            if model is None:
                raise ReplicaUnavailable(f"no target: {self.fleet.targets.absent_reason}")
            count = choice_count(message)
            self._take_places(count)
            taken_count = count
            check_counts(message, model.positions_max)  # now, for what waits for a thread keeps its memory
            prompted = await asyncio.to_thread(self._read, message, model)
            legal_runs = await self._grammars.admit(
                prompted.request, prompted.prompt, model, prompted.ending is not None
            )
            if not all(own is None or own.is_of_use for own in legal_runs):  # a draft leaves such a text
                prompted = prompted._replace(request=plain(prompted.request))
            requests = request.choices(count)
            choices, model = self._admit(prompted, legal_runs, model, requests)
            deltas: list[list[Delta]] = [[] for _ in requests]
            self._generations.update(choices.generations)
            try:
                choices.begin()
                async with aclosing(choices.events()) as events:
                    async for choice, event in events:
                        if self.recorder is not None and isinstance(event, Delta):
                            deltas[choice].append(event)
                        for part in event.parts() if isinstance(event, Delta) else (event,):
                            yield event_to_message(part, model, choice)
                        if isinstance(event, Finished) and taken_count > 1:  # the last place, when all is delivered
                            taken_count -= 1
                            self._free_count += 1
            finally:
                self._end(choices, deltas)
        except Exception as error:
            known = error if isinstance(error, SpecdecError) else SpecdecError(type(error).__name__)
            for own in requests:
                if not own.outcome:
                    own.failed(known)
            raise
        finally:
            self._free_count += taken_count
            for one in legal_runs:
                if one is not None:
                    one.close()
            for own in dict.fromkeys((*requests, request)):
                own.closed()
            for own in requests:
                output_count = own.statistics.output_tokens
                get_logger().info("generation ended", outcome=own.outcome, output_tokens=output_count)

    def _take_places(self, count: int) -> None:
        """Takes the places of a request's choices, all or none. Raises InvalidRequest for more than there are,
        CacheExhausted for more than are free."""
        most = self._settings.max_num_seqs
        if count > most:
            raise InvalidRequest("sampling.n", count, f"at most this server's places for generations, {most}")
        if count > self._free_count:
            if not self._free_count:
                raise CacheExhausted(f"all {most} places for generations are taken")
            raise CacheExhausted(f"{self._free_count} of {most} places for generations are free, {count} are needed")
        self._free_count -= count

    def _end(self, choices: Choices, deltas: list[list[Delta]]) -> None:
        """Ends the generations of a request, and records what came of them."""
        self._generations.difference_update(choices.generations)
        choices.close()
        if self.recorder is not None:
            for generation, own in zip(choices.generations, deltas):
                generation.record(self.recorder, own)

    def give_up(self) -> None:
        """Ends every generation because the service stops; the error of each contains how to resume it."""
        for generation in self._generations:
            generation.give_up()

    def _read(self, message: coordinator_pb.GenerateRequest, target: Description) -> Prompted:
        """Returns the request with its tokens. Runs in a thread, once the request has its slot. Raises
        InvalidRequest."""
        request = request_from_message(message, target.positions_max)
        if request.sampling.max_tokens == 0:
            request = plain(request)
        prompt = (
            request.token_ids if request.text is None else self._tokenizer.encode(request.text, target.positions_max)
        )
        if not prompt:
            raise InvalidRequest("prompt.text", request.text, "text of at least one token")
        request.check_model(prompt, target)
        encoder_length = len(prompt) if target.has_encoder else 0
        prompt = (*prompt, *self._beginning(request, target))
        max_tokens = request.max_tokens(len(prompt), target.positions_max)
        sampling, stop_ids = request.sampling, request.stop_token_ids(target.end_token_ids)
        sure_ends = () if sampling.grammar is None else target.end_token_ids
        ends = sampling.stop, stop_ids, sampling.min_tokens, max_tokens, sure_ends
        outputs = [OutputProcessor(self._tokenizer.stream(prompt[encoder_length:]), *ends) for _ in range(sampling.n)]
        resumed = outputs[0].append(request.resumed_token_ids)
        if resumed.kept_count < len(request.resumed_token_ids):
            limit = f"at most {resumed.kept_count} tokens: the text ended there"
            raise InvalidRequest("resume.output_token_ids", len(request.resumed_token_ids), limit)
        predicted = request.predicted_token_ids
        if request.predicted_text is not None:
            encoded = self._tokenizer.encode(request.predicted_text, target.positions_max, "prediction.text")
            predicted = tuple(takewhile(lambda token_id: token_id < target.vocabulary_size, encoded))
            if len(predicted) > target.positions_max:
                limit = f"at most {target.positions_max} tokens, the target's positions"
                raise InvalidRequest("prediction.text", f"text of {len(predicted)} tokens", limit)
        has_scored = len(prompt) > encoder_length + 1
        ending = Ending(FinishReason.LENGTH) if not (max_tokens or has_scored) else resumed.ending
        bad_words = bad_word_tokens(sampling, self._tokenizer, target.vocabulary_size)
        return Prompted(request, prompt, outputs, ending, predicted, bad_words, encoder_length)

    def _beginning(self, request: GenerationRequest, target: Description) -> tuple[int, ...]:
        """Returns the tokens that begin the output of an encoder-decoder model, none for a decoder alone. Raises
        InvalidRequest."""
        text = request.decoder_text
        if request.decoder_token_ids is not None or text is None:
            return request.decoder_token_ids or target.beginning_token_ids
        tokens = self._tokenizer.encode(text, target.positions_max, "decoder_prompt.text")
        if not tokens:
            raise InvalidRequest("decoder_prompt.text", text, "text of at least one token")
        check_token_ids("decoder_prompt.text", tokens, target.vocabulary_size)
        return (*target.beginning_token_ids, *tokens)

    def _admit(
        self,
        prompted: Prompted,
        legal_runs: Sequence[LegalRuns | None],
        model: Description,
        requests: Sequence[RequestStatistics],
    ) -> tuple[Choices, Description]:
        """Returns the generations, not yet begun, and the model of their target, whose numerics may be others than
        those of `model`. Raises SpecdecError."""
        request, prompt, outputs, ending, _, bad_words, encoder_length = prompted
        length_max = len(prompt) + max(1, outputs[0].max_tokens)
        tokens = [*prompt, *request.resumed_token_ids]
        number = next(self._numbers)
        choice = self.fleet.choose(request, number, model, tokens, length_max, encoder_length)
        drawn_seed, ends = secrets.randbits(64), choice.model.end_token_ids
        params = request.params(choice.rule, len(prompt), drawn_seed, ends, bad_words, encoder_length)
        bind(session=number, **({"label": request.label} if request.label else {}))
        generations: list[Generation] = []
        reader = Reader()
        for index, (output, statistics) in enumerate(zip(outputs, requests, strict=True)):
            if index:
                number, choice = next(self._numbers), self.fleet.again(choice, request)
            own = replace(params, seed=(params.seed + index) & UINT64_MAX)
            scores_prompt = request.scores_prompt and not index
            session = self._session(number, own, length_max, choice, prompted, legal_runs[index], scores_prompt)
            counts, reason = (len(prompt), output.max_tokens), choice.rule_reason
            started = Started(statistics.request_id, own.seed, choice.rule, *counts, reason, encoder_length)
            statistics.admitted(request, started, choice)
            get_logger().info("generation", request_id=started.request_id, rule=own.rule.name)
            reported = request.speculative.report_rounds, request.speculative.report_statistics
            observed = self.fleet, statistics, *reported, self._settings.target_wait_s, reader
            generations.append(Generation(session, output, started, choice, *observed))
        return Choices(generations, ending), choice.model

    def _session(
        self,
        number: int,
        params: ResolvedSamplingParams,
        length_max: int,
        choice: Choice,
        prompted: Prompted,
        legal_runs: LegalRuns | None,
        scores_prompt: bool,
    ) -> Session:
        request, fleet, target = prompted.request, self.fleet, choice.model
        committed = [*prompted.prompt, *request.resumed_token_ids]
        scored_index = prompted.encoder_length + 1  # the first token, of an output with an encoder, follows nothing
        has_trees, cap = self._settings.draft_siblings_max > 0, choice.policy.draft_length_cap
        local = fleet.local_proposers(choice, request, committed, prompted.predicted)
        if legal_runs is not None and Proposer.GRAMMAR in choice.proposers:
            local.append(legal_runs)
        return Session(
            number,
            params,
            length_max,
            target.vocabulary_size,
            choice.policy,
            committed,
            request.cache_salt,
            local,
            path_count_max(target.cache, length_max, cap) if has_trees else 1,
            Calibration(fleet.calibration, SESSION_OUTCOMES),
            Proposer.HEADS in choice.proposers,
            legal_runs,
            scored_index if scores_prompt and len(prompted.prompt) > scored_index else 0,
            choice.head_drafts,
        )

    async def describe(
        self, _request: types_pb.DescribeRequest, _context: Context
    ) -> coordinator_pb.CoordinatorDescribeResponse:
        """Returns the descriptions of the target and the draft, and the limits of speculation."""
        fleet = self.fleet
        drafts = fleet.drafts.up()
        reason = "" if drafts else fleet.drafts.absent_reason if self._settings.draft else "none was configured"
        return coordinator_description_to_message(fleet.targets.groups(), fleet.drafts.groups(), reason, self._settings)


def plain(request: GenerationRequest) -> GenerationRequest:
    """Returns the request without speculation."""
    return replace(request, speculative=replace(request.speculative, enabled=False))


async def run(settings: CoordinatorSettings, on_ready: Callable[[str], None]) -> None:
    """Serves until a stop is requested; `on_ready` receives the address once a target is connected."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    start_workers(asyncio.get_running_loop())
    configure_logs(settings.log_level, "coordinator")
    changed = asyncio.Event()
    tracing = open_tracing("coordinator", settings.otlp_traces_endpoint)
    coordinator = Coordinator(settings, Tokenizer(settings.tokenizer), tracing, changed.set)
    methods = {
        "Generate": unary_stream(coordinator_pb.GenerateRequest, coordinator.generate, coordinator.text_bytes_max),
        "Describe": unary(types_pb.DescribeRequest, coordinator.describe),
    }
    server = Server(settings, {SERVICE: methods}, message_bytes_max(POSITIONS_MAX_ASSUMED))
    fleet = coordinator.fleet
    page = MetricsPage(lambda: page_metrics(coordinator.metrics, fleet, settings, server.is_serving))
    page.open(settings.metrics_address)
    address = await server.start()
    set_startup_objects_aside()
    fleet.start()
    following = asyncio.create_task(_follow_health(fleet, server, changed))
    announcing = asyncio.create_task(_announce(fleet, bool(settings.draft), lambda: on_ready(address)))
    with ProcessWatch(asyncio.get_running_loop()):
        try:
            await until_stop_requested()
        finally:
            following.cancel()
            announcing.cancel()
            await server.stop(settings.drain_grace_s, give_up=coordinator.give_up)
            await asyncio.gather(fleet.stop(), following, announcing, return_exceptions=True)
            page.close()
            recorder = coordinator.recorder
            last = (tracing.close,) if recorder is None else (tracing.close, recorder.close)
            await asyncio.gather(*map(asyncio.to_thread, last))  # together: each may take its whole time


async def _follow_health(fleet: Fleet, server: Server, changed: asyncio.Event) -> None:
    """Sets the health to SERVING while a compatible target is connected."""
    while True:
        await changed.wait()
        changed.clear()
        await server.set_serving(bool(fleet.targets.up()))


async def _announce(fleet: Fleet, has_drafts: bool, on_ready: Callable[[], None]) -> None:
    """Calls `on_ready` once a target is connected, and a draft too if it connects within DRAFT_GRACE_S."""
    while not fleet.targets.up():
        await asyncio.sleep(READY_POLL_S)
    for _ in range(round(DRAFT_GRACE_S / READY_POLL_S)):
        if not has_drafts or fleet.drafts.up():
            break
        await asyncio.sleep(READY_POLL_S)
    on_ready()
