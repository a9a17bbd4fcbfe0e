"""The life of a replica process: listen, load, warm up, serve, drain, stop.

The port is taken first, so that a busy one is reported before a model is loaded; health is NOT_SERVING until one
warm-up step has run. The kind, draft or target, is an argument.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic

import torch
from prometheus_client.core import Metric

from specdec.config import DraftSettings, ModelSettings, TargetSettings
from specdec.engine.interface import CausalModel
from specdec.engine.loading.devices import default_block_size, find_device, prepare_libraries
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import Progress
from specdec.engine.parallel.rank_config import RankPlace
from specdec.engine.scheduling.feed import Answer, Payload
from specdec.engine.scheduling.runner import Sampler
from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import ENGINE_LOST_EXIT_CODE, RANK_LOST_EXIT_CODE, CacheExhausted, ReplicaUnavailable
from specdec.protocol.types import Description
from specdec.replica.handler import ABANDONED_S, ItemHandler, ReplicaService
from specdec.replica.loading import HiddenReading, SampleFeed, describe, measure_hidden_times, measure_step_times
from specdec.replica.metrics import ReplicaMetrics, page_metrics
from specdec.replica.startup import StartupTimes
from specdec.replica.stream import ReplicaStream
from specdec.replica.watch import EngineWatch
from specdec.rpc.convert import description_to_message
from specdec.rpc.limits import STREAM_COUNT_MAX, STREAM_REQUEST_BYTES_MAX
from specdec.rpc.process import set_startup_objects_aside, until_stop_requested
from specdec.rpc.server import Context, Server, Write, stream_stream, unary
from specdec.telemetry.logs import configure_logs, get_logger
from specdec.telemetry.metrics import common_metrics
from specdec.telemetry.metrics_page import MetricsPage
from specdec.telemetry.open_tracing import open_tracing
from specdec.telemetry.progress import loading_bar
from specdec.telemetry.tracing import Tracing
from specdec.v1 import types_pb2 as types_pb

SWITCH_INTERVAL_S = 0.0005  # a forward in one thread must not keep the event loop in another from answering
CPU_PROMPT_ROWS_MAX: int | None = 128  # two chunks: a new prompt waits for the step, unless it can be abandoned
LOST_GRACE_S = 0.7  # from the loss of a rank to the end of this process; streams are notified in half of it

OnReady = Callable[[str], None]


MakeReader = Callable[[CausalModel, Any], HiddenReading[Payload, Answer]]


def no_hidden_reader(model: CausalModel, _settings: Any) -> HiddenReading[Any, Any]:
    """Nothing reads the hidden states of the model."""
    return HiddenReading(model)


@dataclass(frozen=True, slots=True)
class ReplicaKind(Generic[Payload, Answer]):
    """The differences between draft and target: name, service, stream, sampler, and the service for its sessions.

    `messages`: the stream's request and response. `sample_feed`: a feed of a step to be timed. `has_stable_rows`: the
    model's rows must not depend on their neighbours. `extra_positions`: of a session in the cache, beyond its tokens.
    `make_hidden_reader`: called with a loaded model and the settings; raises SpecdecError.
    """

    name: str
    service: str
    stream_method: str
    messages: tuple[type, type]
    sampler: Sampler[Payload, Answer]
    # Called with an engine, its description, the settings of its own kind and the tracing.
    make_service: Callable[[Engine[Payload, Answer], Description, Any, Tracing], ReplicaService]
    sample_feed: SampleFeed[Payload, Answer]
    has_stable_rows: bool = True
    extra_positions: int = 0
    make_hidden_reader: MakeReader[Payload, Answer] = no_hidden_reader


class ReplicaApp(Generic[Payload, Answer]):
    """One replica process; with a `place`, rank 0 of a replica of several processes."""

    def __init__(
        self, kind: ReplicaKind[Payload, Answer], settings: ModelSettings, place: RankPlace | None = None
    ) -> None:
        self._kind = kind
        self._settings = settings
        self._place = place
        self._model: CausalModel | None = None
        self._send_ranks_home: Callable[[], None] | None = None  # of a leader's
        self._engine: Engine[Payload, Answer]
        self._watch: EngineWatch | None = None
        self._handler: ItemHandler
        self._description: Description | None = None  # set last: engine and handler are there then
        self._metrics = ReplicaMetrics()
        self._streams: set[ReplicaStream] = set()

    async def run(self, on_ready: OnReady | None = None) -> None:
        """Serves until a stop is requested. Raises ConfigError for an error of configuration, ReplicaUnavailable
        when another rank or the engine is lost; a hung engine ends the process."""
        self._startup = StartupTimes()
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        configure_logs(self._settings.log_level, self._kind.name)
        self._tracing = open_tracing(self._kind.name, self._settings.otlp_traces_endpoint)
        methods = {
            "Describe": unary(types_pb.DescribeRequest, self._describe),
            self._kind.stream_method: stream_stream(self._converse),
        }
        services = {self._kind.service: methods}
        server = Server(self._settings, services, STREAM_REQUEST_BYTES_MAX, self._settings.allow_peer)
        page = MetricsPage(lambda: self._page_metrics(server.is_serving))
        page.open(self._settings.metrics_address)
        address = await server.start()
        self._lost: asyncio.Future[ReplicaUnavailable] = asyncio.get_running_loop().create_future()
        self._stop_requested = asyncio.Event()
        self._is_listening = False
        try:
            await self._unless_lost(asyncio.to_thread(self._load))
            on_lost = partial(self._lose, ENGINE_LOST_EXIT_CODE)
            self._watch = EngineWatch(self._engine, on_lost, asyncio.get_running_loop())
            set_startup_objects_aside()
            stopping = asyncio.ensure_future(until_stop_requested(self._stop_requested))
            await asyncio.sleep(0)  # signal handlers are set before the process is announced
            self._is_listening = True
            await server.set_serving(True)
            self._log_serving(address)
            if on_ready:
                on_ready(address)
            await self._unless_lost(stopping)
        finally:
            if self._lost.done():
                await server.stop(0.0)
            else:
                await server.stop(self._settings.drain_grace_s, self._drain())
            if self._watch is not None:
                self._watch.stop()
            if self._description is not None:
                of_device: dict[str, float] = getattr(self._model, "counters", dict)()
                self._engine.stop()
                get_logger().info("stopped", **self._handler.service.counters(), **of_device)
            page.close()
            await asyncio.to_thread(self._tracing.close)
            if self._send_ranks_home is not None and not self._lost.done():
                self._send_ranks_home()

    async def _drain(self) -> None:
        """Accepts no more sessions, tells all streams, and returns when the last session has ended."""
        if self._description is None:
            return
        loop, is_empty = asyncio.get_running_loop(), asyncio.Event()
        self._engine.post(lambda: self._handler.drain(lambda: loop.call_soon_threadsafe(is_empty.set)))
        for stream in self._streams:
            stream.say_farewell()
        await is_empty.wait()

    def _lose(self, exit_code: int, reason: str) -> None:
        """Ends serving because this replica cannot go on; from any thread."""

        def lose() -> None:
            if not self._lost.done():
                error = ReplicaUnavailable(reason)
                error.exit_code = exit_code
                self._lost.set_result(error)

        self._lost.get_loop().call_soon_threadsafe(lose)

    def _request_stop(self) -> None:
        """Stops this process because another rank was asked to stop; called repeatedly."""
        if self._is_listening:
            self._lost.get_loop().call_soon_threadsafe(self._stop_requested.set)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    def _page_metrics(self, is_serving: bool) -> Iterator[Metric]:
        name, description = self._kind.name, self._description
        if description is None:
            return common_metrics(name, False, {"model": ""})
        kernels = "" if self._model is None else self._model.description.kernels
        return page_metrics(name, is_serving, description, kernels, self._engine, self._metrics, self._handler)

    def _log_serving(self, address: str) -> None:
        description = self._description
        assert description is not None and description.cache is not None
        assert self._model is not None
        log, size, positions_max = get_logger(), description.cache, description.positions_max
        cache, kernels = size.sentence(positions_max), self._model.description.kernels or "none"
        seconds = {phase: round(own_s, 3) for phase, own_s in self._startup.seconds.items()}
        log.debug("startup", seconds=seconds, total_s=round(sum(seconds.values()), 3))
        log.info("serving", address=address, model=description.model_name, cache=cache, kernels=kernels)
        if size.position_count < positions_max:
            log.warning("the cache holds less than one session of full length", cache=cache)

    async def _unless_lost(self, work: Awaitable[None]) -> None:
        """Waits for `work`; raises ReplicaUnavailable as soon as a rank or the engine is lost, whatever the work's
        thread does."""
        doing = asyncio.ensure_future(work)
        both: set[asyncio.Future[Any]] = {doing, self._lost}
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if self._lost.done():
            raise self._lost.result()
        await doing

    def _load_model(self, progress: Progress) -> CausalModel:
        own = self._settings
        if self._place is None:
            is_stable = self._kind.has_stable_rows
            target = own.target_tokenizer if isinstance(own, DraftSettings) else ""
            return load_model(
                own.model,
                own.dtype,
                own.device,
                progress,
                own.enforce_eager,
                is_stable,
                target,
                own.max_model_len,
                own.dependent_launch,
            )
        from specdec.engine.parallel.group import Ending
        from specdec.engine.parallel.rank import ModelSource, load_leader

        ending = Ending(
            on_lost=lambda loss: self._lose(RANK_LOST_EXIT_CODE, loss.reason),
            exit_grace_s=LOST_GRACE_S,
            on_stop_requested=self._request_stop,
        )
        is_symmetric = isinstance(own, TargetSettings) and own.symmetric_memory
        source = ModelSource(own.model, own.dtype, device(own.device), own.max_model_len, is_symmetric)
        leader = load_leader(source, self._place, ending, progress)
        self._send_ranks_home = leader.close
        return leader

    def _load(self) -> None:
        settings = self._settings
        prepare_libraries(settings.threads)
        with loading_bar(f"{self._kind.name} {settings.model}") as bar:

            def progress(phase: str, share: float) -> None:
                self._startup.begin(phase)
                bar(phase, share)

            model = self._model = self._load_model(progress)
            self._serve_model(model, progress)
        self._startup.end()

    def _serve_model(self, model: CausalModel, progress: Progress) -> None:
        """Makes engine, service and handler of a loaded model, and times its steps."""
        settings = self._settings
        block_size = settings.block_size or default_block_size(find_device(settings.device))
        settings = settings.model_copy(update={"block_size": block_size})
        reading = self._kind.make_hidden_reader(model, settings)
        model = reading.model
        description = describe(model, settings, self._kind.extra_positions)
        assert description.cache is not None
        self._engine = engine = Engine(
            model,
            description.cache.block_count + 1,
            block_size,
            self._kind.sampler,
            rows_max=settings.max_num_batched_tokens,
            prompt_rows_max=CPU_PROMPT_ROWS_MAX if description.device == "cpu" else None,
            abandons_steps=self._place is None,  # ranks are in the same layer only while they compute
            stepped=self._metrics.stepped,
            read_hidden=reading.read,
        )
        service = self._kind.make_service(engine, description, settings, self._tracing)
        self._handler = ItemHandler(service, settings.max_num_seqs)
        progress("warming up", 1.0)
        engine.start(service.next_step)
        progress("timing steps", 1.0)
        sample = self._kind.sample_feed
        times = engine.call(lambda: measure_step_times(engine, description.positions_max, sample))
        head_times = engine.call(lambda: measure_hidden_times(engine, sample)) if reading.num_heads else ()
        pass_times = engine.call(lambda: reading.measure_passes(description.vocabulary_size))
        self._description = replace(
            description,
            step_times=times,
            head_times=head_times,
            trace_service=self._tracing.service,
            num_heads=reading.num_heads,
            head_passes_max=reading.head_passes_max,
            head_pass_times=pass_times,
            instance=secrets.token_hex(16),
        )

    async def _describe(self, _request: types_pb.DescribeRequest, _context: Context) -> types_pb.DescribeResponse:
        if self._description is None:
            raise ReplicaUnavailable("the model is still loading")
        return description_to_message(self._description)

    async def _converse(self, requests: AsyncIterator[bytes], write: Write, _context: Context) -> None:
        if self._description is None:
            raise ReplicaUnavailable("the model is still loading")
        if len(self._streams) >= STREAM_COUNT_MAX:
            self._end_idle_stream()
        stream = ReplicaStream(self._engine, self._handler, self._kind.messages, self._metrics.failed, self._streams)
        self._streams.add(stream)
        try:
            await stream.run(requests, write)
        finally:
            self._streams.discard(stream)

    def _end_idle_stream(self) -> None:
        """Ends the oldest stream that never brought work for a session. Raises CacheExhausted if there is none, or none
        ABANDONED_S old: coordinators that have worked keep their places."""
        idle = [stream for stream in self._streams if stream not in self._handler.worked]
        oldest = min(idle, key=lambda stream: stream.began_s, default=None)
        if oldest is None or time.monotonic() - oldest.began_s < ABANDONED_S:
            raise CacheExhausted(f"all {STREAM_COUNT_MAX} places for streams of coordinators are taken")
        self._streams.discard(oldest)
        oldest.give_place()


def device(asked: str, local_rank: int = 0) -> str:
    """Returns the device; `auto` is a GPU if there is one; several ranks of one machine each take their own."""
    if asked == "auto":
        asked = "cuda" if torch.cuda.is_available() else "cpu"
    return f"cuda:{local_rank}" if asked == "cuda" and local_rank else asked
