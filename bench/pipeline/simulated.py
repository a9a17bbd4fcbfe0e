"""The simulator's estimate of one stream's rate, from the steps, acceptance and overhead measured here."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.deepened import load, step_times_ms
from bench.draft.alone import draft_steps_ms
from bench.pipeline.measurements import by_variant, hazards
from bench.pipeline.ranks import Ranks
from bench.pipeline.sweep import Cell
from bench.pipeline.variants import OFF, Variant, rule_of
from specdec.protocol.plan import Plan
from specdec.protocol.types import ResolvedSamplingParams
from specdec.rpc.process import set_startup_objects_aside
from tests.support.harness import DRAFT_MODEL
from tests.support.simulation import Text, World, best_plan, rate_of

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 17)
NODE_COUNTS_PER_STEP = (1, 2, 4, 8)
DRAFT_CONTEXT = 128  # about a held-out prompt and half its text
SIMULATED_TOKENS = 3000
CEILING = "ceiling"


@dataclass(frozen=True, slots=True)
class Steps:
    """Milliseconds of a step with nothing else running: a forward pass of the target by rows and of the draft by nodes,
    and by rule a step of the draft's service, which also makes guesses and keeps the tree."""

    target_ms: Mapping[int, float]
    draft_forward_ms: Mapping[int, float]
    draft_ms: Mapping[str, Mapping[int, float]]

    def as_json(self) -> dict[str, Any]:
        return {
            "target_ms_by_rows": dict(self.target_ms),
            "draft_forward_ms_by_nodes": dict(self.draft_forward_ms),
            "draft_ms_by_nodes": {rule: dict(own) for rule, own in self.draft_ms.items()},
        }


def measure_steps(target_model: Path, dtype: str, draft_dtype: str, rules: Sequence[str], repeats: int = 9) -> Steps:
    """Both models in this process, one thread, nothing else running here."""
    torch.set_num_threads(1)
    target = step_times_ms(load(target_model, dtype), [(1, rows) for rows in ROW_COUNTS], repeats)
    set_startup_objects_aside()  # as services do
    all_params = [
        ResolvedSamplingParams(rule, 1, DRAFT_CONTEXT, temperature=temperature)
        for rule, temperature in map(rule_of, rules)
    ]
    forward = step_times_ms(
        load(DRAFT_MODEL, draft_dtype), [(nodes_per_step, 1) for nodes_per_step in NODE_COUNTS_PER_STEP], repeats
    )
    return Steps(
        {rows: ms for (_, rows), ms in target.items()},
        {nodes_per_step: ms for (nodes_per_step, _), ms in forward.items()},
        dict(zip(rules, draft_steps_ms(DRAFT_MODEL, draft_dtype, all_params, NODE_COUNTS_PER_STEP), strict=True)),
    )


def between(points_ms: Mapping[int, float], scale: float = 1.0) -> Callable[[int], float]:
    """Returns seconds by count, times `scale`: linear interpolation between measurements, the last slope continued."""
    counts = sorted(points_ms)

    def seconds(count: int) -> float:
        upper = min(max(bisect_left(counts, count), 1), len(counts) - 1)
        first, second = counts[upper - 1], counts[upper]
        slope = (points_ms[second] - points_ms[first]) / (second - first)
        return scale * max(points_ms[counts[0]], points_ms[first] + slope * (count - first)) / 1e3

    return seconds


def acceptance_of(cell: Cell) -> tuple[float, ...]:
    """Returns the acceptance by position of a cell's longest synchronous rounds; empty if it has none."""
    longest = max(
        (variant for variant in by_variant(cell.samples) if variant.startswith("sync")),
        key=lambda name: int(name.split()[1]),
        default=None,
    )
    if longest is None:
        return ()
    return hazards([sample for sample in cell.samples if sample.variant == longest], int(longest.split()[1]))


def world_of(cell: Cell, steps: Steps, ranks: Ranks | None, acceptance: tuple[float, ...]) -> World:
    """A stream in a cell: its round trip, the acceptance on its prompts if that is known, its own pace.

    Steps of both models are scaled by the forward time of plain decoding in the same cell, for a slower hour; the time
    of its rounds beyond that is the overhead of every round.
    """
    off = cell.measurements[OFF.name]
    scale = off.forward_ms / steps.target_ms[1]
    hazards = acceptance or (ranks.acceptance if ranks else 0.6,)
    return World(
        target_step_s=between(steps.target_ms, scale),
        draft_step_s=between(steps.draft_ms[cell.rule], scale),
        network_s=cell.measured_rtt_ms["draft"] / 1e3,
        texts=(Text(hazards, token_count=math.inf),),
        first_probability=min(max(hazards[0], 0.01), 0.99),
        branches=ranks.branches if ranks else (0.45, 0.15),
        bonus_match=ranks.bonus_match if ranks else None,
        overhead_s=max(0.0, 1 / off.tokens_per_s - off.forward_ms / 1e3),
    )


def simulate_all(
    cells: Sequence[Cell], steps: Steps, ranks: Mapping[str, Ranks], variants: Sequence[Variant]
) -> list[dict[str, float]]:
    """Of each cell, tokens per second by variant with a plan of its own, and the best plan's as `ceiling`.

    A cell without synchronous rounds takes the acceptance of one that has them, of the same rule and round trip: its
    prompts are the same.
    """
    known = {(cell.rule, cell.rtt_ms): found for cell in cells if (found := acceptance_of(cell))}
    results = []
    for cell in cells:
        world = world_of(cell, steps, ranks.get(cell.rule), known.get((cell.rule, cell.rtt_ms), ()))
        rate = partial(rate_of, world, token_count=SIMULATED_TOKENS)
        fixed = [variant for variant in variants if variant.draft_length and variant.name in cell.measurements]
        results.append({variant.name: rate(plan_of(variant)) for variant in fixed} | {CEILING: best_plan(rate)[0]})
    return results


def plan_of(variant: Variant) -> Plan:
    """The plan of a fixed variant that speculates."""
    length = variant.draft_length or 0
    wait_length = length if variant.is_synchronous else 0
    return Plan(length, variant.window, variant.nodes_per_step, wait_length, variant.wait_ms / 1e3)
