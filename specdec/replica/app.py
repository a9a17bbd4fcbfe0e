"""The life of a replica process: listen, load, warm up, serve, drain, stop.

The port is taken first, so that a busy one is told before a model is loaded; health says NOT_SERVING until one warm-up
step has run. What the process serves, draft or target, is given to it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specdec.config import ModelSettings
from specdec.engine.interface import CausalModel
from specdec.engine.model import load_model
from specdec.engine.model_folder import open_model_folder, read_json
from specdec.engine.runner import Evidence
from specdec.engine.scheduler import Engine
from specdec.errors import ConfigError, ReplicaUnavailable
from specdec.protocol.fingerprint import tokenizer_fingerprint
from specdec.protocol.types import Description
from specdec.replica.handler import ItemHandler
from specdec.replica.sessions import HeldSessions
from specdec.replica.stream import ReplicaStream, StreamMessages
from specdec.rpc.convert import description_to_message
from specdec.rpc.process import set_startup_objects_aside, until_told_to_stop
from specdec.rpc.server import Context, Server, message_bytes_max, stream_stream, unary
from specdec.telemetry.logs import configure_logs, get_logger
from specdec.telemetry.progress import loading_bar
from specdec.v1 import types_pb2 as types_pb

SWITCH_INTERVAL_S = 0.0005  # a forward in one thread must not keep the event loop in another from answering
FULL_SESSION_COUNT_DEFAULT = 16  # sessions of full length the default cache holds
MEMORY_SHARE_MAX = 0.25

OnReady = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ReplicaKind:
    """What tells a draft from a target: its name, its service, its stream, its evidence and its handler of items."""

    name: str
    service: str
    stream_method: str
    messages: StreamMessages
    evidence: Evidence
    make_handler: Callable[[HeldSessions], ItemHandler]


class ReplicaApp:
    """One replica process."""

    def __init__(self, kind: ReplicaKind, settings: ModelSettings) -> None:
        self._kind = kind
        self._settings = settings
        self._engine: Engine | None = None
        self._handler: ItemHandler | None = None
        self._description: Description | None = None

    async def run(self, on_ready: OnReady | None = None) -> None:
        """Serves until told to stop. Raises ConfigError for what the operator can mend."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        configure_logs(self._settings.log_level, self._kind.name)
        methods = {
            "Describe": unary(types_pb.DescribeRequest, self._describe),
            self._kind.stream_method: stream_stream(self._converse),
        }
        server = Server(self._settings, {self._kind.service: methods}, message_bytes_max(0))
        address = await server.start()
        try:
            await asyncio.to_thread(self._load)
            set_startup_objects_aside()
            await server.set_serving(True)
            get_logger().info("serving", address=address, model=self._description.model_name)
            if on_ready:
                on_ready(address)
            await until_told_to_stop()
        finally:
            await server.stop(self._settings.drain_grace_s)
            if self._engine is not None:
                self._engine.stop()

    def _load(self) -> None:
        settings = self._settings
        torch.set_num_threads(settings.threads or os.cpu_count() or 1)
        with loading_bar(f"{self._kind.name} {settings.model}") as progress:
            model = load_model(settings.model, settings.dtype, device(settings.device), progress)
        description = describe(model, settings)
        block_count = cache_block_count(model, description, settings)
        engine = Engine(
            model, block_count, settings.block_size, self._kind.evidence, rows_max=settings.max_num_batched_tokens
        )
        handler = self._kind.make_handler(HeldSessions(engine, description, settings.max_num_seqs))
        engine.start(handler.before_step)
        self._engine, self._description, self._handler = engine, description, handler

    async def _describe(self, _request: types_pb.DescribeRequest, _context: Context) -> types_pb.DescribeResponse:
        if self._description is None:
            raise ReplicaUnavailable("the model is still loading")
        return description_to_message(self._description)

    async def _converse(self, requests, write, _context: Context) -> None:
        if self._engine is None or self._handler is None:
            raise ReplicaUnavailable("the model is still loading")
        await ReplicaStream(self._engine, self._handler, self._kind.messages).run(requests, write)


def device(asked: str) -> str:
    """`auto` is a GPU where there is one."""
    if asked != "auto":
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe(model: CausalModel, settings: ModelSettings) -> Description:
    """What this replica says of itself. Raises ConfigError when --max-model-len is more than the model has."""
    own = model.description
    positions_max = settings.max_model_len or own.positions_max
    if positions_max > own.positions_max:
        raise ConfigError(f"--max-model-len is {positions_max}; {settings.model} has {own.positions_max} positions")
    folder = open_model_folder(settings.model).path
    return Description(
        model_digest=own.model_digest,
        tokenizer_fingerprint=tokenizer_fingerprint(read_json(folder / "tokenizer.json")),
        model_name=settings.served_model_name or own.model_name,
        vocabulary_size=own.vocabulary_size,
        positions_max=positions_max,
        end_token_ids=tuple(sorted(set(own.end_token_ids))),
        dtype=own.dtype,
        device=own.device,
        libraries=f"{own.libraries}, {torch.get_num_threads()} threads, blocks of {settings.block_size}",
    )


def cache_block_count(model: CausalModel, description: Description, settings: ModelSettings) -> int:
    """Blocks of the cache, the zero block included: as --kv-cache-bytes says, or for a few sessions of full length."""
    block_bytes = model.cache_bytes_per_position * settings.block_size
    if settings.kv_cache_bytes is not None:
        count = settings.kv_cache_bytes // block_bytes
        if count < 2:
            raise ConfigError(f"--kv-cache-bytes is {settings.kv_cache_bytes}; two blocks take {2 * block_bytes}")
        return count
    session_count = min(settings.max_num_seqs, FULL_SESSION_COUNT_DEFAULT)
    wanted = 1 + session_count * -(-description.positions_max // settings.block_size)
    fitting = int(free_memory_bytes() * MEMORY_SHARE_MAX) // block_bytes
    return max(2, min(wanted, fitting))


def free_memory_bytes() -> int:
    """Memory of this machine that is free, in bytes."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
