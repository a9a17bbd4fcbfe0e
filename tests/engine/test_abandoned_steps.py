"""Large steps of prompts, abandoned between two layers for newer work, on a real model of three layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from specdec.engine.loading.model import load_model
from specdec.engine.scheduling import scheduler
from specdec.engine.scheduling.feed import StepTiming
from specdec.engine.scheduling.scheduler import KEPT, SMALL_STEPS_FACTORS, PromptSpeed, small_steps_factor
from tests.support.engine_bench import Bench

PROMPTS = {name: [1 + (7 * place + len(name)) % 50 for place in range(100)] for name in ("a", "bb", "ccc")}
SHORT = [3, 4, 5]
CHUNK, SMALL, LARGE = 8, 16, 24  # rows
LAYER_COUNT = 3


def all_logits(payloads: list[object], row_counts: list[int], logits: torch.Tensor, _: object) -> list[torch.Tensor]:
    return [rows.clone() for rows in logits.split(row_counts)]


@pytest.fixture
def large(folder_of: Callable[[str], Path]) -> Iterator[Bench]:
    """A running engine with large steps, whose results are logits; its cache is sound at the end."""
    limits = {"chunk_size": CHUNK, "rows_max": LARGE, "prompt_rows_max": SMALL, "abandons_steps": True}
    bench = Bench(load_model(str(folder_of("llama")), "float32"), all_logits, **limits)
    bench.engine.start()
    bench.model.batches.clear()
    yield bench
    bench.engine.stop()
    bench.engine.cache.check_integrity()


def submit(bench: Bench, name: str, token_ids: list[int]) -> None:
    """Submits a feed whose sequence ends with it, so that nothing decodes."""
    feed = bench.feed(name, token_ids)
    settle = feed.done

    def done(logits: torch.Tensor, timing: StepTiming) -> None:
        bench.engine.cache.release(feed.table)
        settle(logits, timing)

    feed.done = done


def submit_prompts(bench: Bench) -> None:
    for name, token_ids in PROMPTS.items():
        submit(bench, name, token_ids)


def step_sizes(bench: Bench) -> list[int]:
    return [sum(rows for _, rows, _ in batch) for batch in bench.model.batches]


def post_short(bench: Bench, in_steps: set[int], layer: int, is_urgent: bool = True) -> None:
    """Posts short prompts in the steps of these numbers, counted from 1, before that layer."""

    def before_layer(at: int) -> None:
        number = len(bench.model.batches)
        if number in in_steps and at == layer:
            bench.engine.post(lambda: submit(bench, f"short {number}", SHORT), is_urgent)

    bench.model.before_layer = before_layer


@pytest.mark.parametrize("layer", range(LAYER_COUNT))
def test_newer_work_is_in_the_next_step_and_the_abandoned_one_runs_again(large: Bench, layer: int) -> None:
    """Claim: an urgent post ends a large step of prompts before its next layer; its feed is in the step after it, with
    twice its rows; the prompts go on where they were, and every answer has the bits of a run without it.

    Source: a prompt of 3 tokens waits for the step that runs when it arrives. Conclusive: at each layer, also where
    earlier ones have written their positions already; steps are compared by their rows, answers bit for bit.
    """
    expected = large.run(lambda: [submit_prompts(large), submit(large, "short 2", SHORT)], 4)
    large.model.batches.clear()
    post_short(large, {2}, layer)
    outcomes = large.run(lambda: submit_prompts(large), 4)
    sizes = step_sizes(large)
    assert sizes[:2] == [LARGE, LARGE] and large.engine.abandoned_count == 1
    assert sum(rows for _, rows, _ in large.model.batches[2]) == 2 * len(SHORT) and (0, 3, 1) in large.model.batches[2]
    first, second = (sorted({start for start, _, _ in large.model.batches[step]}) for step in (0, 1))
    assert (first, second) == ([0], [8]) and (8, 3, 0) in large.model.batches[2], "the oldest goes on where it was"
    assert all(torch.equal(outcomes[name], expected[name]) for name in expected) and len(outcomes) == len(expected)


def test_an_abandoned_step_leaves_zeros(large: Bench) -> None:
    """Claim: positions that an abandoned step wrote in some layers are zero in all of them afterwards.

    Source: a failed or abandoned step leaves nothing for the next owner of a block. Conclusive: not-a-number is planted
    at all positions of the step, in every layer, while it runs.
    """
    storage = large.engine.cache._storage
    layers = [*storage.keys, *storage.values]
    seen: list[bool] = []

    def before_layer(at: int) -> None:
        tables = [feed.table for feed in large.engine._waiting]
        if len(large.model.batches) == 1 and at == LAYER_COUNT - 1:
            for layer in layers:
                layer[[table.block_ids[0] for table in tables]] = torch.nan
            large.engine.post(lambda: seen.extend(bool(layer.isfinite().all()) for layer in layers), is_urgent=True)

    large.model.before_layer = before_layer
    large.run(lambda: submit_prompts(large), 3)
    assert seen == [True] * 2 * LAYER_COUNT


def test_few_steps_are_abandoned(large: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: after an abandoned step, steps are small and run to their end, for a multiple of the time that was wasted;
    and posts that bring no work abandon none.

    Source: prompts must end whatever arrives. Conclusive: each step would be abandoned by a post of its own if it
    might; with a factor of 0 each large one is, so the factor is what keeps the steps.
    """
    monkeypatch.setattr(scheduler, "SMALL_STEPS_FACTORS", (1e9, 1e9))
    post_short(large, {1, 2, 3, 4, 5}, layer=1)
    large.run(lambda: submit_prompts(large), 3 + 1)
    assert large.engine.abandoned_count == 1 and max(step_sizes(large)[1:]) <= SMALL

    monkeypatch.setattr(scheduler, "SMALL_STEPS_FACTORS", (0.0, 0.0))
    large.engine._small_until_s = 0.0
    large.model.batches.clear()
    post_short(large, {1, 3, 5}, layer=1, is_urgent=False)
    large.run(lambda: submit_prompts(large), 3 + 3)
    assert large.engine.abandoned_count == 1

    large.model.batches.clear()
    post_short(large, {1, 3, 5}, layer=1)
    large.run(lambda: submit_prompts(large), 3 + 3)
    assert large.engine.abandoned_count == 4


def test_steps_are_small_until_they_lost_what_the_abandoned_one_did() -> None:
    """Claim: the time of small steps after an abandoned one is its time over the share of speed that small steps lose,
    as measured, within bounds: the longest where they lose nothing, or nothing was measured.

    Source: rent until the rents are the price, then buy (Karlin et al. 1988): within the bounds, at most twice the loss
    of the best choice afterwards. Conclusive: rates made by hand, the latest steps count most.
    """
    least, most = SMALL_STEPS_FACTORS

    def rate(rows_per_s: float) -> PromptSpeed:
        speed = PromptSpeed()
        for _ in range(200):
            speed.add(100, 1.0)
        for _ in range(200):  # the machine is another now
            speed.add(64, 64 / rows_per_s)
        assert speed.rate == pytest.approx(rows_per_s, rel=1e-3)
        return speed

    assert small_steps_factor(rate(900.0), rate(1000.0)) == pytest.approx(10.0, rel=0.02)
    assert small_steps_factor(rate(500.0), rate(1000.0)) == least
    assert small_steps_factor(rate(999.0), rate(1000.0)) == most
    assert small_steps_factor(rate(1001.0), rate(1000.0)) == small_steps_factor(PromptSpeed(), rate(1.0)) == most


def test_steps_of_prompts_are_measured_by_their_size(large: Bench) -> None:
    """Claim: a step of prompts with more rows than a small one counts as large, one of more than half of a small one's
    rows as small, and any other as neither.

    Conclusive: each kind of step alone, and the rows that were counted are those that ran.
    """

    def counted(small_until_s: float, prompts: Callable[[], object], count: int) -> tuple[float, float]:
        engine = large.engine
        engine._small_until_s, engine._small, engine._large = small_until_s, PromptSpeed(), PromptSpeed()
        large.model.batches.clear()
        large.run(prompts, count)
        return engine._small.rows, engine._large.rows

    def ran(sizes: list[int]) -> float:
        rows = 0.0
        for size in sizes:
            rows = KEPT * rows + size
        return rows

    found = counted(0.0, lambda: submit_prompts(large), 3)
    sizes = step_sizes(large)
    assert found == (ran([own for own in sizes if CHUNK < own <= SMALL]), ran([own for own in sizes if own > SMALL]))
    assert found[1] > LARGE
    small, of_large = counted(float("inf"), lambda: submit_prompts(large), 3)
    assert small == ran([own for own in step_sizes(large) if own > CHUNK]) > SMALL and of_large == 0
    assert counted(0.0, lambda: submit(large, "short 2", SHORT), 1) == (0, 0)


def test_the_time_of_small_steps_is_by_the_speeds_of_both(large: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: an abandoned step asks for the factor of the speed of small steps against that of large ones. Conclusive:
    the objects that were given, in this order; the other order would always give the longest time."""
    asked: list[tuple[PromptSpeed, PromptSpeed]] = []
    monkeypatch.setattr(scheduler, "small_steps_factor", lambda *speeds: asked.append(speeds) or 0.0)
    post_short(large, {1}, layer=1)
    large.run(lambda: submit_prompts(large), 3 + 1)
    ((small, of_large),) = asked
    assert small is large.engine._small and of_large is large.engine._large
