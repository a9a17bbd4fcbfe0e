"""Not-a-number in one sequence: an error for that sequence, no change for any other."""

from __future__ import annotations

import queue
from pathlib import Path

import torch

from specdec.engine.cache.kv_cache import BlockTable
from specdec.engine.loading.model import load_model
from specdec.engine.scheduling.scheduler import Engine, Feed
from specdec.errors import NumericsError
from tests.support.engine_models import Driver, make_tiny_model, random_tokens

TIMEOUT_S = 20.0


def test_not_a_number_costs_one_request_and_leaves_no_trace(tmp_path: Path) -> None:
    """Claim: not-a-number in one sequence fails it with NumericsError; neighbours and later owners see the same bits.

    Source: design section 8; masked positions are multiplied by zero weights, and zero times not-a-number is not zero,
    so a block must be clean for its next owner. Conclusive: one token's embedding is not-a-number; the answers
    beside it, and then in its own blocks, equal those of a run without it.
    """
    model = load_model(str(make_tiny_model(tmp_path, "llama")))
    model._base.embed_tokens.weight.data[7] = torch.nan
    driver = Driver(model, 24, 16)
    clean = [token_id for token_id in random_tokens(60, 8) if token_id != 7][:50]
    table = driver.open(60)
    expected = driver.feed(table, clean)
    driver.cache.release(table)
    collected: dict[object, torch.Tensor] = {}

    def keep(payloads: list[object], row_counts: list[int], logits: torch.Tensor, _: object) -> list[object]:
        collected.update(zip(payloads, logits.clone().split(row_counts)))
        return list(payloads)

    engine = Engine(model, 24, 16, keep, chunk_size=16)
    engine.start()
    arrived: queue.SimpleQueue[object] = queue.SimpleQueue()
    tables: list[BlockTable] = []

    def submit(name: str, token_ids: list[int], capacity: int) -> None:
        tables.append(engine.cache.reserve(capacity))
        settle = arrived.put
        engine.submit(Feed(tables[-1], 0, token_ids, 5, name, lambda result, timing: settle(result), settle))

    def release_all() -> None:
        for table in tables:
            engine.cache.release(table)

    engine.post(lambda: submit("poisoned", [*clean[:20], 7, *clean[20:]], 200))
    engine.post(lambda: submit("beside", clean, 60))
    outcomes = [arrived.get(timeout=TIMEOUT_S) for _ in range(2)]
    assert isinstance(outcomes[0], NumericsError) and outcomes[1] == "beside"
    engine.post(release_all)
    engine.post(lambda: submit("after", clean, 360))  # every block of the cache
    assert arrived.get(timeout=TIMEOUT_S) == "after"
    engine.stop()
    assert torch.equal(collected["beside"], expected[-5:])
    assert torch.equal(collected["after"], expected[-5:])
