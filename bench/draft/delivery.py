"""Draft tokens per second as they arrive at a coordinator: a draft service of its own process, a link over loopback.

The coordinator's part is played by a link and a reader of each session.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.draft.reader import Reader
from bench.event_loop import new_event_loop
from specdec.config import DraftSettings, TlsSettings
from specdec.coordinator.replicas import Draft
from specdec.errors import SpecdecError
from specdec.launch.children import start
from specdec.protocol.items import DraftItem, Nodes
from specdec.protocol.types import ResolvedSamplingParams
from specdec.rpc.client import open_channel
from specdec.rpc.convert_items import item_from_message, item_to_bytes
from specdec.rpc.link import Link

STARTED_S_MAX, SILENCE_S = 60.0, 0.02


class Delivery:
    """A draft process and a link to it. Use it in a `with` statement; `rate` may be called again and again."""

    def __init__(self, folder: Path, dtype: str, vocabulary_size: int) -> None:
        own: dict[str, Any] = {"dtype": dtype, "threads": 1, "port": 0, "log_level": "error"}
        self._child = start("draft", DraftSettings(model=str(folder), **own))
        self._child.wait_ready()
        self._vocabulary_size = vocabulary_size
        self._loop = new_event_loop()
        self._numbers = itertools.count(1)
        self._readers: dict[int, Reader] = {}

    def __enter__(self) -> Delivery:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.close()
        self._child.stop()

    def rate(
        self, params: ResolvedSamplingParams, texts: Sequence[Sequence[int]], nodes_per_step: int, seconds: float
    ) -> float:
        """Nodes a second, of all texts together, from when each has had some. SpecdecError where the draft refuses."""
        return self._loop.run_until_complete(self._measure(params, texts, nodes_per_step, seconds))

    async def _measure(
        self, params: ResolvedSamplingParams, texts: Sequence[Sequence[int]], nodes_per_step: int, seconds: float
    ) -> float:
        self._came, self._failure = asyncio.Event(), None
        self._link = Link(
            "the draft",
            lambda: open_channel(self._child.address, TlsSettings()),
            f"/{Draft.service}/{Draft.stream_method}",
            Draft.request,
            Draft.response,
            self._came.set,
            self._on_items,
            lambda reason: None,
        )
        running = asyncio.create_task(self._link.run())
        try:
            await self._until(lambda: self._link.is_up)
            return await self._nodes_per_s(params, texts, nodes_per_step, seconds)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    async def _nodes_per_s(
        self, params: ResolvedSamplingParams, texts: Sequence[Sequence[int]], nodes_per_step: int, seconds: float
    ) -> float:
        context = params.prompt_length
        self._readers = {
            number: Reader(number, text, context, nodes_per_step) for text, number in zip(texts, self._numbers)
        }
        for reader in self._readers.values():
            for item in reader.opening(params, self._vocabulary_size):
                self._send(item)
        await self._until(lambda: all(reader.node_count > 1 for reader in self._readers.values()))
        began_s, before = time.perf_counter(), self._node_count()
        await self._until(lambda: time.perf_counter() - began_s >= seconds)
        return (self._node_count() - before) / (time.perf_counter() - began_s)

    def _node_count(self) -> int:
        return sum(reader.node_count for reader in self._readers.values())

    async def _until(self, is_done: Callable[[], bool]) -> None:
        """Waits, and commits wherever the draft has nothing left to do. SpecdecError where it refused or takes long."""
        deadline_s = time.perf_counter() + STARTED_S_MAX
        while not is_done():
            if self._failure is not None or time.perf_counter() > deadline_s:
                raise SpecdecError(f"the draft answered {self._failure}")
            self._came.clear()
            try:
                await asyncio.wait_for(self._came.wait(), SILENCE_S)
            except TimeoutError:
                for reader in self._readers.values():
                    if reader.node_count:
                        self._send(reader.commit())

    def _on_items(self, messages: Sequence[Any], _byte_count: int) -> None:
        for message in messages:
            item = item_from_message(message)
            if not isinstance(item, Nodes):
                self._failure = item
            elif (reader := self._readers.get(item.session)) is not None:
                reader.take(item)
                if reader.is_grown:
                    self._send(reader.commit())
        self._came.set()

    def _send(self, item: DraftItem) -> None:
        self._link.send(item_to_bytes(Draft.request, item))
