"""The facts a replica determines while it loads: its description, its cache size and its step times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from specdec.config import ModelSettings
from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.interface import CausalModel
from specdec.engine.loading.devices import find_device, free_memory_bytes
from specdec.engine.loading.model_folder import open_model_folder, tokenizer_facts
from specdec.engine.scheduling.feed import Answer, Feed, Payload
from specdec.engine.scheduling.runner import HiddenReader
from specdec.engine.scheduling.scheduler import Engine
from specdec.errors import CacheExhausted, ConfigError
from specdec.folders import CHAT_PROMPTS, PROMPTS, heldout_prompts
from specdec.protocol.types import CacheSize, Description, DraftVocabulary

FULL_SESSION_COUNT_DEFAULT = 16  # sessions of full length the default cache holds
MEMORY_SHARE_DEFAULT = 0.25  # of free memory, at most, if not configured

ROW_COUNTS = (1, 2, 4, 8, 16)  # of the steps that are timed
SESSION_COUNTS = (1, 2, 4, 8, 16)  # of those in which the reading of hidden states is timed
CONTEXT_LENGTH = 64
REPEATS = 3  # the minimum counts: other work of the machine only makes a step longer
BUDGET_S = 0.25  # spent, a row count has one repeat

Times = tuple[tuple[int, float], ...]  # (rows or sessions, seconds), ascending
# (table, context length, rows); no rows: the context itself
SampleFeed = Callable[[BlockTable, int, int], Feed[Payload, Answer]]


@dataclass(frozen=True, slots=True)
class HiddenReading(Generic[Payload, Answer]):
    """A model as it is served, and the reader of its hidden states, if there is one: `num_heads` that each guess one
    position, or a feature head of at most `head_passes_max` passes, whose times `measure_passes` returns for a
    vocabulary of a size, on the engine thread."""

    model: CausalModel
    read: HiddenReader[Payload, Answer] | None = None
    num_heads: int = 0
    head_passes_max: int = 0
    measure_passes: Callable[[int], Times] = lambda vocabulary_size: ()


def describe(model: CausalModel, settings: ModelSettings, extra_positions: int = 0) -> Description:
    """Returns the description of this replica without step times. Raises ConfigError if the cache is too small.
    `extra_positions`: of a session in the cache, beyond its tokens."""
    own = model.description
    tokenizer = open_model_folder(settings.model).path / "tokenizer.json"
    vocabulary, kind = own.vocabulary, DraftVocabulary.EQUAL
    if vocabulary and vocabulary.retokenizer:
        tokenizer, kind = vocabulary.retokenizer.target, DraftVocabulary.MAPPED
    elif vocabulary:
        kind = DraftVocabulary.SUBSET
    return Description(
        model_digest=own.model_digest,
        tokenizer_fingerprint=tokenizer_facts(tokenizer).fingerprint,
        model_name=settings.served_model_name or own.model_name,
        vocabulary_size=own.vocabulary_size,
        positions_max=own.positions_max,
        end_token_ids=tuple(sorted(set(own.end_token_ids))),
        dtype=own.dtype,
        device=own.device,
        libraries=f"{own.libraries}, blocks of {settings.block_size}",
        tensor_parallel_size=own.tensor_parallel_size,
        draft_vocabulary_size=vocabulary.own_size if vocabulary else 0,
        draft_vocabulary=kind,
        draft_vocabulary_share=vocabulary.share(tokenizer, sample_text()) if vocabulary else 1.0,
        cache=choose_cache_size(model, own.positions_max + extra_positions, settings),
        encoder_positions_max=own.encoder_positions_max,
        beginning_token_ids=own.beginning_token_ids,
    )


def sample_text() -> str:
    """Code and questions, to measure the share of a target's tokens that a draft has."""
    return "\n".join(prompt for file in (PROMPTS, CHAT_PROMPTS) for prompt in heldout_prompts(file).values())


def choose_cache_size(model: CausalModel, positions_max: int, settings: ModelSettings) -> CacheSize:
    """Returns the cache size by `--kv-cache-bytes` or `--kv-cache-memory-share` once the weights are loaded; by default
    that of a few sessions of `positions_max` positions. Raises ConfigError for less than one usable block.

    One more block is allocated: the zero block, which no session uses.
    """
    block_bytes = model.cache_bytes_per_position * settings.block_size
    if settings.kv_cache_bytes is not None:
        flag, allowed = f"--kv-cache-bytes is {settings.kv_cache_bytes}", settings.kv_cache_bytes
    else:
        share = settings.kv_cache_memory_share
        free_bytes = free_memory_bytes(find_device(settings.device))
        flag, allowed = f"{free_bytes} bytes are free", int(free_bytes * (share or MEMORY_SHARE_DEFAULT))
        if share is None:
            session_count = min(settings.max_num_seqs, FULL_SESSION_COUNT_DEFAULT)
            wanted = 1 + session_count * -(-positions_max // settings.block_size)
            allowed = min(allowed, wanted * block_bytes)
    count = allowed // block_bytes - 1
    if count < 1:
        raise ConfigError(f"{flag}: too little for a cache; two blocks take {2 * block_bytes} bytes")
    return CacheSize(count, settings.block_size, count * block_bytes)


def measure_step_times(
    engine: Engine[Payload, Answer], positions_max: int, sample: SampleFeed[Payload, Answer]
) -> tuple[tuple[int, float], ...]:
    """Returns (rows, seconds) of steps for one session, ascending, without the reading of hidden states; none if the
    cache is too small. Engine thread only.

    Measured once, so that estimates exist before the first request.
    """
    context_length = min(CONTEXT_LENGTH, positions_max // 2)
    input_length = min(max(1, context_length // 2), engine.model.description.encoder_positions_max)
    try:
        table = engine.cache.reserve(context_length + ROW_COUNTS[-1], [0] * input_length)
    except CacheExhausted:
        return ()
    began_s = time.perf_counter()
    found: list[tuple[int, float]] = []
    try:
        engine.run([sample(table, context_length, 0)])
        for row_count in [count for count in ROW_COUNTS if context_length + count <= positions_max]:
            times_s: list[float] = []
            while len(times_s) < REPEATS and not (times_s and time.perf_counter() - began_s > BUDGET_S):
                started_s = time.perf_counter()
                report = engine.run([sample(table, context_length, row_count)])
                times_s.append(time.perf_counter() - started_s - report.hidden_s)
                if table.length > context_length:
                    engine.cache.truncate(table, context_length)
            found.append((row_count, max(min(times_s), found[-1][1] if found else 0.0)))
    finally:
        engine.cache.release(table)
    return tuple(found)


def measure_hidden_times(
    engine: Engine[Payload, Answer], sample: SampleFeed[Payload, Answer]
) -> tuple[tuple[int, float], ...]:
    """Returns (sessions, seconds) of the reading of hidden states in steps of as many sessions, ascending; none if
    nothing reads them. Engine thread only."""
    began_s = time.perf_counter()
    input_length = int(engine.model.description.has_encoder)
    found: list[tuple[int, float]] = []
    for session_count in SESSION_COUNTS:
        times_s: list[float] = []
        while len(times_s) < REPEATS and not (times_s and time.perf_counter() - began_s > BUDGET_S):
            tables: list[BlockTable] = []
            try:
                while len(tables) < session_count:
                    tables.append(engine.cache.reserve(input_length + 1, [0] * input_length))
                if input_length:
                    engine.run([sample(table, input_length, 0) for table in tables])
                times_s.append(engine.run([sample(table, input_length, 1) for table in tables]).hidden_s)
            except CacheExhausted:
                return tuple(found)
            finally:
                for table in tables:
                    engine.cache.release(table)
        if not min(times_s):
            return ()
        found.append((session_count, max(min(times_s), found[-1][1] if found else 0.0)))
    return tuple(found)
