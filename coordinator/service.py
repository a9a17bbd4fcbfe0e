"""The coordinator: what users call, and what `specdec coordinator` runs.

It admits a request, tokenises its prompt beside the event loop, runs one generation for it and ends all work for it
when the reader is gone. It is SERVING while a target that fits is connected.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
import sys
from collections.abc import AsyncGenerator, Callable

from coordinator.decode_loop import Generation
from coordinator.figures import Figures, RequestFigures
from coordinator.metrics import families
from coordinator.output import Ending, OutputWalker
from coordinator.replicas import DRAFT, TARGET, Replica
from coordinator.speculation import Speculation
from coordinator.tokenizer import Tokenizer
from coordinator.tracing import open_request
from specdec.config import CoordinatorSettings
from specdec.errors import CacheExhausted, InvalidRequest, ReplicaUnavailable, SpecdecError
from specdec.protocol.report import Event, Finished, Started
from specdec.protocol.request import Ask
from specdec.protocol.session import Session
from specdec.protocol.types import Description
from specdec.rpc.convert_generate import ask_from_message, coordinator_description_to_message, event_to_message
from specdec.rpc.process import set_startup_objects_aside, until_told_to_stop
from specdec.rpc.server import Context, Server, message_bytes_max, unary, unary_stream
from specdec.telemetry.logs import bind, configure_logs, get_logger
from specdec.telemetry.metrics_page import MetricsPage
from specdec.telemetry.tracing import Tracing, caller_trace
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import types_pb2 as types_pb

SERVICE = "specdec.v1.CoordinatorService"
SWITCH_INTERVAL_S = 0.0005
READY_POLL_S = 0.02
DRAFT_GRACE_S = 2.0
POSITIONS_MAX_ASSUMED = 1 << 18  # of the target, for the message cap: it is not connected yet when the port opens


class Coordinator:
    """All generations of one coordinator process."""

    def __init__(
        self, settings: CoordinatorSettings, tokenizer: Tokenizer, tracing: Tracing, changed: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._tracing = tracing
        self._tokenizer = tokenizer
        self._speculation = Speculation(settings)
        self.figures = Figures()
        self._changed = changed
        arguments = settings.link_tls, tokenizer.fingerprint, self._on_changed
        self.target = Replica(TARGET, settings.target, *arguments)
        self.draft = None if settings.draft is None else Replica(DRAFT, settings.draft, *arguments)
        self.replicas = [self.target] if self.draft is None else [self.target, self.draft]
        self._numbers = itertools.count(1)
        self._places = asyncio.Semaphore(settings.max_num_seqs)
        self._generations: set[Generation] = set()
        self._known: tuple[Description | None, Description | None] = None, None  # the replicas', at the last change

    def _on_changed(self) -> None:
        """A replica is up, or gone: what it measured when it had loaded is where the policy begins."""
        known_target, known_draft = self._known
        target, draft = self._known = self.target.description, None if self.draft is None else self.draft.description
        if target is not None and target is not known_target:
            self._speculation.on_target(target)
        if draft is not None and draft is not known_draft:
            self._speculation.on_draft(draft)
        self._changed()

    async def generate(
        self, request: coordinator_pb.GenerateRequest, context: Context
    ) -> AsyncGenerator[coordinator_pb.GenerateResponse, None]:
        """One generation; its work ends when this generator is closed."""
        told = open_request(self.figures, self._tracing, caller_trace(context.invocation_metadata()))
        bind(trace_id=told.context.trace_id.hex())
        try:
            ask = ask_from_message(request)
            target = self.target.usable()
            if self._places.locked():
                raise CacheExhausted(f"all {self._settings.max_num_seqs} places for generations are taken")
            async with self._places:
                generation, ending = await self._admit(ask, target, told)
                self._generations.add(generation)
                try:
                    generation.begin(ending)
                    event: Event | None = None
                    while not isinstance(event, Finished):
                        event = await generation.next_event()
                        yield event_to_message(event, target)
                finally:
                    self._generations.discard(generation)
                    generation.close()
        except Exception as error:
            told.failed(error if isinstance(error, SpecdecError) else SpecdecError(type(error).__name__))
            raise
        finally:
            told.closed()
            count = told.statistics.output_tokens
            get_logger().info("generation ended", outcome=told.outcome, output_tokens=count)

    def give_up(self) -> None:
        """The service stops and waits no longer: every generation ends, and says how it is resumed."""
        for generation in self._generations:
            generation.give_up()

    def _prepare(self, ask: Ask, target: Description) -> tuple[tuple[int, ...], OutputWalker, Ending | None]:
        """The prompt's tokens, the walker after the resumed ones and the end they led to; beside the event loop. Raises
        InvalidRequest."""
        prompt = ask.token_ids if ask.text is None else self._tokenizer.encode(ask.text, target.positions_max)
        if not prompt:
            raise InvalidRequest("prompt.text", ask.text, "text that makes at least one token")
        ask.check_model(prompt, target)
        max_tokens = ask.max_tokens(len(prompt), target.positions_max)
        sampling, stop_ids = ask.sampling, ask.stop_token_ids(target.end_token_ids)
        walker = OutputWalker(self._tokenizer.stream(prompt), sampling.stop, stop_ids, sampling.min_tokens, max_tokens)
        resumed = walker.walk(ask.resumed_token_ids)
        if resumed.kept_count < len(ask.resumed_token_ids):
            limit = f"at most {resumed.kept_count} tokens: the text ended there"
            raise InvalidRequest("resume.output_token_ids", len(ask.resumed_token_ids), limit)
        return prompt, walker, resumed.ending

    async def _admit(self, ask: Ask, target: Description, told: RequestFigures) -> tuple[Generation, Ending | None]:
        """The generation, not yet begun, and its end where resumed tokens led to it. Raises SpecdecError."""
        prompt, walker, ending = await asyncio.to_thread(self._prepare, ask, target)
        if self.target.usable() != target:
            raise ReplicaUnavailable("the target changed while the prompt was tokenised; send the request again")
        rule, rule_reason = self._speculation.rule(ask)
        law = ask.law(rule, len(prompt), secrets.randbits(64), target.end_token_ids)
        policy, committed = self._speculation.policy(ask, rule), [*prompt, *ask.resumed_token_ids]
        sizes = len(prompt) + walker.max_tokens, target.vocabulary_size
        session = Session(next(self._numbers), law, *sizes, policy, committed, ask.cache_salt)
        started = Started(told.request_id, law.seed, rule, len(prompt), walker.max_tokens, rule_reason)
        bind(session=session.number, **({"label": ask.label} if ask.label else {}))
        get_logger().info("generation", request_id=started.request_id, rule=law.rule.name)
        told.admitted(ask, started, target)
        return Generation(session, walker, started, self.target, self.draft, self._speculation, told), ending

    async def describe(
        self, _request: types_pb.DescribeRequest, _context: Context
    ) -> coordinator_pb.CoordinatorDescribeResponse:
        """What this coordinator serves and uses."""
        draft = self.draft
        is_up, reason = (False, "none was configured") if draft is None else (draft.is_up, draft.absent_reason)
        return coordinator_description_to_message(
            self.target.description,
            draft.description if draft is not None and is_up else None,
            "" if is_up else reason,
            self._settings.num_speculative_tokens,
            self._settings.num_speculative_tokens_max,
        )


async def run(settings: CoordinatorSettings, on_ready: Callable[[str], None]) -> None:
    """Serves until told to stop; `on_ready` is given the address once a target is connected."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure_logs(settings.log_level, "coordinator")
    changed = asyncio.Event()
    tracing = Tracing.open("coordinator", settings.otlp_traces_endpoint)
    coordinator = Coordinator(settings, Tokenizer(settings.tokenizer), tracing, changed.set)
    methods = {
        "Generate": unary_stream(coordinator_pb.GenerateRequest, coordinator.generate),
        "Describe": unary(types_pb.DescribeRequest, coordinator.describe),
    }
    server = Server(settings, {SERVICE: methods}, message_bytes_max(POSITIONS_MAX_ASSUMED))
    page = MetricsPage(lambda: families(coordinator, settings, server.is_serving))
    page.open(settings.metrics_address)
    address = await server.start()
    set_startup_objects_aside()
    links = [asyncio.create_task(replica.link.run()) for replica in coordinator.replicas]
    following = asyncio.create_task(_follow_health(coordinator, server, changed))
    announcing = asyncio.create_task(_announce(coordinator, lambda: on_ready(address)))
    try:
        await until_told_to_stop()
    finally:
        following.cancel()
        announcing.cancel()
        await server.stop(settings.drain_grace_s, give_up=coordinator.give_up)
        for link in links:
            link.cancel()
        await asyncio.gather(*links, following, announcing, return_exceptions=True)
        page.close()
        await asyncio.to_thread(tracing.close)


async def _follow_health(coordinator: Coordinator, server: Server, changed: asyncio.Event) -> None:
    """SERVING while a target that fits is connected."""
    while True:
        await changed.wait()
        changed.clear()
        await server.set_serving(coordinator.target.is_up)


async def _announce(coordinator: Coordinator, on_ready: Callable[[], None]) -> None:
    """Calls `on_ready` once a target is connected; a draft gets a moment to be there too, but is not needed."""
    while not coordinator.target.is_up:
        await asyncio.sleep(READY_POLL_S)
    for _ in range(round(DRAFT_GRACE_S / READY_POLL_S)):
        if coordinator.draft is None or coordinator.draft.is_up:
            break
        await asyncio.sleep(READY_POLL_S)
    on_ready()
