"""Plain decoding by the engine in this process, without services and messages: the baseline of the services' `off`."""

from __future__ import annotations

import queue
import time
from pathlib import Path

from bench.engine.steps import BLOCK_SIZE
from specdec.decoding.verification import VerificationRequest, verify
from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.feed import Feed
from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import SpecdecError
from specdec.protocol.types import ResolvedSamplingParams, SamplerOutput

POSITIONS_MAX = 2048


class EngineAlone:
    """An engine and one sequence at a time. Its thread runs where the thread that made it may."""

    def __init__(self, folder: Path, dtype: str) -> None:
        model = load_model(str(folder), dtype)
        self._engine = Engine(model, 1 + POSITIONS_MAX // BLOCK_SIZE, BLOCK_SIZE, verify)
        self._engine.start()

    def stop(self) -> None:
        self._engine.stop()

    def generate(
        self, params: ResolvedSamplingParams, prompt: tuple[int, ...], max_tokens: int
    ) -> tuple[list[int], float]:
        """(output tokens, tokens per second after the first). Raises the engine's error."""
        came: queue.SimpleQueue[tuple[float, int] | SpecdecError] = queue.SimpleQueue()
        committed = list(prompt)

        def submit(table: BlockTable) -> None:
            start = table.length
            request = VerificationRequest(params, len(committed) - len(prompt), tuple(committed))
            self._engine.submit(
                Feed(
                    table=table,
                    start_position=start,
                    token_ids=committed[start:],
                    logit_count=1,
                    payload=request,
                    done=lambda answer, _timing: commit(table, answer),
                    failed=came.put,
                )
            )

        def commit(table: BlockTable, answer: SamplerOutput) -> None:
            committed.append(answer.recovered_token_ids[0])
            if len(committed) < len(prompt) + max_tokens:
                submit(table)
            else:
                self._engine.cache.release(table)
            came.put((time.perf_counter(), committed[-1]))

        self._engine.post(lambda: submit(self._engine.cache.reserve(len(prompt) + max_tokens)))
        tokens: list[int] = []
        moments_s: list[float] = []
        while len(tokens) < max_tokens:
            item = came.get()
            if isinstance(item, SpecdecError):
                raise item
            moments_s.append(item[0])
            tokens.append(item[1])
        return tokens, (max_tokens - 1) / (moments_s[-1] - moments_s[0])
