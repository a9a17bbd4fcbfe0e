"""The systems on one model, plain and with their own speculation, each at its best settings, found on other prompts."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.clients import Ask, measured, over_grpc, over_http, over_pipe
from bench.peers.servers import Server, llama_server, transformers_server, vllm_server
from specdec.errors import ConfigError
from tests.support.harness import running

SLOTS = 32
TUNED_TOKENS = 48
LLAMA_GREEDY = {"samplers": ["top_k"], "top_k": 1}  # its fastest sampler that takes the likeliest token
NGRAM = {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}

Serving = tuple[Server, Ask]
Start = Callable[..., AbstractContextManager[Serving]]  # starts a system with the settings of a grid


@dataclass(frozen=True, slots=True)
class Model:
    """What is served. `folder` is what specdec and, in bfloat16, vLLM and `transformers` read; `dense`: for these, if
    another; `gguf`: for llama.cpp. The draft likewise, where peers can use one; `heads`: ours."""

    name: str
    folder: str
    gguf: Path
    dense: Path | None
    draft: Path | None = None
    draft_gguf: Path | None = None
    heads: Path | None = None


@contextlib.contextmanager
def specdec(model: Model, policy: Mapping[str, Any], target: int, draft: int = 0) -> Iterator[Serving]:
    """Our services with their own defaults. `target`, `draft`: threads; 0: no draft service."""
    own: dict[str, Any] = {"target": {"threads": target, "heads": str(model.heads or "none")}}
    own["draft"] = {"threads": draft}
    with running(Path(model.folder), model.draft if draft else None, **own) as services:
        children = [services.target, services.coordinator, *([services.draft] if services.draft else [])]
        pids = tuple(child.process.pid for child in children)
        address = services.coordinator.address
        yield Server(pids, address, is_paused=False), over_grpc(address, **policy)


@contextlib.contextmanager
def vllm(model: Model, threads: int, speculation: dict[str, Any] | None = None) -> Iterator[Serving]:
    assert model.dense is not None
    with vllm_server(model.dense, threads, SLOTS, speculation) as server:
        yield server, over_http(server)


@contextlib.contextmanager
def llama_cpp(model: Model, threads: int, **speculation: Any) -> Iterator[Serving]:
    with llama_server(model.gguf, threads, SLOTS, **speculation) as server:
        yield server, over_http(server, **LLAMA_GREEDY)


@contextlib.contextmanager
def library(model: Model, threads: int, **generation: Any) -> Iterator[Serving]:
    assert model.dense is not None
    with transformers_server(model.dense, threads, **generation) as server:
        yield server, over_pipe(server)


Grid = Sequence[dict[str, Any]]


def grids(model: Model) -> dict[str, tuple[Start, Grid]]:
    """Returns by name each system's way to start, and the settings that are tried. In order of the tables."""
    each = [{"threads": threads} for threads in (1, 2)]
    two = {"threads": 2}
    found: dict[str, tuple[Start, Grid]] = {}

    def add(name: str, start: Start, grid: Grid) -> None:
        found[name] = start, grid

    add("specdec, auto", specdec, [{"policy": {}, "target": a, "draft": b} for a, b in auto_threads(model)])
    add("specdec, off", specdec, [{"policy": {"policy": "off"}, "target": threads} for threads in (1, 2)])
    add("llama.cpp", llama_cpp, each)
    kinds = ("NGRAM_SIMPLE", "NGRAM_MAP_K", "NGRAM_MOD", "NGRAM_CACHE")
    add("llama.cpp, n-gram", llama_cpp, [{**two, "speculation": kind, "n_max": n} for kind in kinds for n in (4, 12)])
    if model.draft_gguf:
        own = {**two, "speculation": "DRAFT_SIMPLE", "draft": model.draft_gguf}
        add("llama.cpp, draft", llama_cpp, [{**own, "n_max": n} for n in (2, 3, 5, 8)])
    if model.dense:
        add("vLLM", vllm, each)
        add("vLLM, n-gram", vllm, [{**two, "speculation": {**NGRAM, "num_speculative_tokens": n}} for n in (3, 6)])
        if model.draft:
            spec = {"model": str(model.draft), "method": "draft_model"}
            add("vLLM, draft", vllm, [{**two, "speculation": {**spec, "num_speculative_tokens": n}} for n in (2, 3, 5)])
        if model.heads:
            spec = {"model": str(model.heads), "method": "eagle3"}
            add("vLLM, EAGLE-3", vllm, [{**two, "speculation": {**spec, "num_speculative_tokens": n}} for n in (2, 3)])
        add("transformers", library, each)
        add("transformers, prompt lookup", library, [{**two, "prompt_lookup_num_tokens": n} for n in (3, 10)])
        if model.draft:
            own = {**two, "draft": model.draft, "num_assistant_tokens_schedule": "constant"}
            add("transformers, assisted", library, [{**own, "num_assistant_tokens": n} for n in (2, 3, 5)])
    return found


def auto_threads(model: Model) -> Sequence[tuple[int, int]]:
    """Splits of two cores between target and draft; without a draft model the target has both, or one."""
    return ((1, 1), (2, 1), (2, 2)) if model.draft else ((1, 0), (2, 0))


def tuned(start: Start, grid: Grid, model: Model, prompts: Sequence[Sequence[int]]) -> tuple[dict[str, Any], list[str]]:
    """Returns the fastest settings by the median over prompts, greedy; and what could not be started, with the reason.

    Raises ConfigError where none starts.
    """
    rates: list[tuple[float, int]] = []
    failed = []
    for place, settings in enumerate(grid):
        try:
            with start(model, **settings) as (server, ask):
                rows = [measured(server, ask, [ids], TUNED_TOKENS, 0.0) for ids in (prompts[0], *prompts)]
        except (ConfigError, OSError) as error:
            failed.append(f"{settings}: {error}")
            continue
        rates.append((statistics.median(row["tokens_per_s"] for row in rows[1:]), -place))
    if not rates:
        raise ConfigError("; ".join(failed))
    return grid[-max(rates)[1]], failed
