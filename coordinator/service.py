"""The coordinator: the public API, and the service of `specdec coordinator`.

It admits a request, reads it and tokenises its prompt in a thread, runs one generation for it and ends all work for it
when the client disconnects. It is SERVING while a compatible target is connected.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from itertools import takewhile
from typing import NamedTuple

from specdec.config import CoordinatorSettings
from specdec.coordinator.bad_words import bad_word_tokens
from specdec.coordinator.fleet import Fleet
from specdec.coordinator.generation import Generation
from specdec.coordinator.metrics import page_metrics
from specdec.coordinator.output import Ending, OutputProcessor
from specdec.coordinator.recording import Recorder
from specdec.coordinator.statistics import CoordinatorMetrics, RequestStatistics
from specdec.coordinator.tokenizer import BYTES_PER_TOKEN_MAX, Tokenizer
from specdec.coordinator.tracing import open_request
from specdec.errors import CacheExhausted, InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.process_watch import ProcessWatch
from specdec.protocol.calibration import Calibration
from specdec.protocol.report import Delta, Event, Finished, Started
from specdec.protocol.request import GenerationRequest
from specdec.protocol.session import Session
from specdec.protocol.tree_shape import path_count_max
from specdec.protocol.types import Description, FinishReason, Proposer
from specdec.rpc.convert_generate import (
    check_counts,
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
    """A request, the tokens of its prompt, its output after the resumed tokens and the end that these reached, if any;
    the tokens that it predicts, and those of its bad words."""

    request: GenerationRequest
    prompt: tuple[int, ...]
    output: OutputProcessor
    ending: Ending | None
    predicted: tuple[int, ...]
    bad_words: tuple[tuple[int, ...], ...]


class Coordinator:
    """All generations of one coordinator process."""

    def __init__(
        self, settings: CoordinatorSettings, tokenizer: Tokenizer, tracing: Tracing, changed: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._tracing = tracing
        self._tokenizer = tokenizer
        self.metrics = CoordinatorMetrics()
        self.fleet = Fleet(settings, tokenizer.fingerprint, changed)
        self._numbers = itertools.count(1)
        self._slots = asyncio.Semaphore(settings.max_num_seqs)
        self._generations: set[Generation] = set()
        record_bytes_max = settings.record_mb_max << 20
        self.recorder = Recorder(settings.record, record_bytes_max) if settings.record is not None else None

    def text_bytes_max(self) -> dict[str, float]:
        """Returns the size of the longest text that is tokenised for the connected targets, checked before parsing."""
        served = self.fleet.served()
        if served is None:
            return {}
        return dict.fromkeys(("GenerateRequest.text", "Prediction.text"), served.positions_max * BYTES_PER_TOKEN_MAX)

    async def generate(
        self, message: coordinator_pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[coordinator_pb.GenerateResponse, None]:
        """Runs one generation and yields its events; its work ends when this generator is closed."""
        caller, follows_caller = caller_trace(context.invocation_metadata()), self._settings.trace_parent_sampling
        statistics = open_request(self.metrics, self._tracing, caller, follows_caller)
        bind(trace_id=statistics.context.trace_id.hex())
        try:
            model = self.fleet.served()
            if model is None:
                raise ReplicaUnavailable(f"no target: {self.fleet.targets.absent_reason}")
            if self._slots.locked():
                raise CacheExhausted(f"all {self._settings.max_num_seqs} places for generations are taken")
            async with self._slots:
                check_counts(message, model.positions_max)  # now, for what waits for a thread keeps its memory
                generation, ending, model = await self._admit(message, model, statistics)
                self._generations.add(generation)
                deltas: list[Delta] = []
                event: Event | None = None
                try:
                    generation.begin(ending)
                    while not isinstance(event, Finished):
                        event = await generation.next_event()
                        if self.recorder is not None and isinstance(event, Delta):
                            deltas.append(event)
                        for part in event.parts() if isinstance(event, Delta) else (event,):
                            yield event_to_message(part, model)
                finally:
                    self._generations.discard(generation)
                    generation.close()
                    if self.recorder is not None:
                        generation.record(self.recorder, deltas)
        except Exception as error:
            statistics.failed(error if isinstance(error, SpecdecError) else SpecdecError(type(error).__name__))
            raise
        finally:
            statistics.closed()
            count = statistics.statistics.output_tokens
            get_logger().info("generation ended", outcome=statistics.outcome, output_tokens=count)

    def give_up(self) -> None:
        """Ends every generation because the service stops; the error of each contains how to resume it."""
        for generation in self._generations:
            generation.give_up()

    def _read(self, message: coordinator_pb.GenerateRequest, target: Description) -> Prompted:
        """Returns the request with its tokens. Runs in a thread, once the request has its slot. Raises
        InvalidRequest."""
        request = request_from_message(message, target.positions_max)
        if request.sampling.max_tokens == 0:
            request = replace(request, speculative=replace(request.speculative, enabled=False))
        prompt = (
            request.token_ids if request.text is None else self._tokenizer.encode(request.text, target.positions_max)
        )
        if not prompt:
            raise InvalidRequest("prompt.text", request.text, "text of at least one token")
        request.check_model(prompt, target)
        max_tokens = request.max_tokens(len(prompt), target.positions_max)
        sampling, stop_ids = request.sampling, request.stop_token_ids(target.end_token_ids)
        stream = self._tokenizer.stream(prompt)
        output = OutputProcessor(stream, sampling.stop, stop_ids, sampling.min_tokens, max_tokens)
        resumed = output.append(request.resumed_token_ids)
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
        ending = Ending(FinishReason.LENGTH) if not max_tokens and len(prompt) == 1 else resumed.ending
        bad_words = bad_word_tokens(sampling, self._tokenizer, target.vocabulary_size)
        return Prompted(request, prompt, output, ending, predicted, bad_words)

    async def _admit(
        self, message: coordinator_pb.GenerateRequest, model: Description, statistics: RequestStatistics
    ) -> tuple[Generation, Ending | None, Description]:
        """Returns the generation, not yet begun, its end if the resumed tokens reached it, and the model of its target,
        whose numerics may be others than those of `model`. Raises SpecdecError."""
        request, prompt, output, ending, predicted, bad_words = await asyncio.to_thread(self._read, message, model)
        number, fleet = next(self._numbers), self.fleet
        length_max = len(prompt) + max(1, output.max_tokens)
        committed = [*prompt, *request.resumed_token_ids]
        choice = fleet.choose(request, number, model, committed, length_max)
        target = choice.model
        params = request.params(choice.rule, len(prompt), secrets.randbits(64), target.end_token_ids, bad_words)
        has_trees, cap = self._settings.draft_siblings_max > 0, choice.policy.draft_length_cap
        session = Session(
            number,
            params,
            length_max,
            target.vocabulary_size,
            choice.policy,
            committed,
            request.cache_salt,
            fleet.local_proposers(choice, request, committed, predicted),
            path_count_max(target.cache, length_max, cap) if has_trees else 1,
            Calibration(fleet.calibration, SESSION_OUTCOMES),
            Proposer.HEADS in choice.proposers,
            scored_index=int(request.scores_prompt and len(prompt) > 1),
        )
        reason = choice.rule_reason
        started = Started(statistics.request_id, params.seed, choice.rule, len(prompt), output.max_tokens, reason)
        bind(session=session.number, **({"label": request.label} if request.label else {}))
        statistics.admitted(request, started, choice)
        get_logger().info("generation", request_id=started.request_id, rule=params.rule.name)
        reported = request.speculative.report_rounds, request.speculative.report_statistics
        generation = Generation(
            session, output, started, choice, fleet, statistics, *reported, self._settings.target_wait_s
        )
        return generation, ending, choice.model

    async def describe(
        self, _request: types_pb.DescribeRequest, _context: Context
    ) -> coordinator_pb.CoordinatorDescribeResponse:
        """Returns the descriptions of the target and the draft, and the limits of speculation."""
        fleet = self.fleet
        drafts = fleet.drafts.up()
        reason = "" if drafts else fleet.drafts.absent_reason if self._settings.draft else "none was configured"
        return coordinator_description_to_message(fleet.targets.groups(), fleet.drafts.groups(), reason, self._settings)


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
