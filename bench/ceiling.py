"""`python -m bench.ceiling`: what one stream could reach, beside rounds that wait, and what the cost model says of it.

The figures come from the event simulation of bench/event_simulation.py: no models, no services, the times and
probabilities that are asked for. It is the line measured results are held against, and the policy's own cost model: the
last columns are what that predicts of the same plans, over the simulated speed.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from bench.event_simulation import Scenario, simulate
from specdec.policy.plan import Plan
from specdec.protocol.cost_model import Conditions, Curve, predict


def synchronous(scenario: Scenario, draft_length_max: int = 24) -> tuple[float, int]:
    """Tokens per second of rounds that wait for their draft, at the best fixed draft length, and that length: E/(T + gd
    + r) with E = 1 + a + ... + a^g; plain decoding among them."""
    best = (0.0, 0)
    expected, survival = 1.0, 1.0
    for length in range(draft_length_max + 1):
        draft_s = length * scenario.draft_step_s(1) + (scenario.network_s if length else 0.0)
        round_s = scenario.target_step_s(length + 1) + scenario.round_overhead_s + draft_s
        best = max(best, (expected / round_s, length))
        survival *= scenario.hazard(length)
        expected += survival
    return best


def best_streamed(scenario: Scenario, leaves: tuple[int, ...], token_count: int) -> tuple[float, Plan]:
    """Tokens per second of the best streamed plan with so many leaves, and the plan."""
    plans = [Plan(16, window, count) for count in leaves for window in (8, 16, 32)]
    return max(((simulate(scenario, plan, token_count), plan) for plan in plans), key=lambda line: line[0])


def scenario_of(asked: argparse.Namespace, acceptance: float, network_s: float) -> Scenario:
    """The world that is asked for, as the simulation takes it."""
    target_s, draft_s = asked.target_ms / 1e3, asked.draft_ms / 1e3
    return Scenario(
        target_step_s=lambda rows: target_s,
        draft_step_s=lambda leaves: draft_s * (1 + asked.leaf_cost * (leaves - 1)),
        network_s=network_s,
        acceptance=(acceptance,),
        branch_probabilities=tuple(asked.branches),
        bonus_match=asked.bonus_match,
        round_overhead_s=asked.overhead_ms / 1e3,
    )


def conditions_of(scenario: Scenario) -> Conditions:
    """The same world, as the cost model takes it."""
    return Conditions(
        target_step_s=Curve(((1, scenario.target_step_s(1)),)),
        draft_step_s=Curve(tuple((leaves, scenario.draft_step_s(leaves)) for leaves in (1, 2))),
        network_s=scenario.network_s,
        round_overhead_s=scenario.round_overhead_s,
        acceptance=scenario.acceptance,
        branch_probabilities=scenario.branch_probabilities,
        bonus_match=scenario.bonus_match,
    )


def table_of(asked: argparse.Namespace) -> Table:
    """A line per acceptance and round trip; every speed beside plain decoding."""
    table = Table(title=f"speed over plain decoding; target step {asked.target_ms} ms, draft step {asked.draft_ms} ms")
    speeds = ("synchronous", "co-located", "chain", "tree")
    for name in ("acceptance", "RTT ms", *speeds, "leaves", "window", "/ sync", "/ co-l.", "model: chain", "tree"):
        table.add_column(name, justify="right")
    for acceptance in asked.acceptance:
        for share in asked.round_trips:
            scenario = scenario_of(asked, acceptance, share * asked.target_ms / 1e3)
            chain, chain_plan = best_streamed(scenario, (1,), asked.tokens)
            tree, tree_plan = best_streamed(scenario, tuple(asked.leaves), asked.tokens)
            colocated, _ = synchronous(replace(scenario, network_s=0.0))
            apart, _ = synchronous(scenario)
            cells = [f"{acceptance:.2f}", f"{share * asked.target_ms:g}"]
            cells += [f"{speed * asked.target_ms / 1e3:.2f}" for speed in (apart, colocated, chain, tree)]
            ratios = [max(chain, tree) / apart, max(chain, tree) / colocated]
            conditions = conditions_of(scenario)
            ratios += [predict(conditions, chain_plan) / chain, predict(conditions, tree_plan) / tree]
            table.add_row(*cells, str(tree_plan.leaves), str(tree_plan.window), *(f"{ratio:.2f}" for ratio in ratios))
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.ceiling", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target-ms", type=float, default=20.0, help="milliseconds of a target step (20)")
    parser.add_argument("--draft-ms", type=float, default=2.0, help="of a draft step with one leaf (2)")
    parser.add_argument("--leaf-cost", type=float, default=0.1, help="what each further leaf adds to it, as a share")
    parser.add_argument("--acceptance", type=float, nargs="+", default=[0.6, 0.7, 0.8])
    parser.add_argument("--round-trips", type=float, nargs="+", default=[0, 0.1, 0.25, 0.5, 1, 2, 5], help="of a step")
    parser.add_argument(
        "--branches", type=float, nargs="*", default=[0.45, 0.15], help="second, third guess right in misses"
    )
    parser.add_argument(
        "--bonus-match", type=float, help="first guess right where it was not offered; as the acceptance"
    )
    parser.add_argument("--overhead-ms", type=float, default=0.0, help="of a round beside the target's step (0)")
    parser.add_argument("--leaves", type=int, nargs="+", default=[2, 4, 8], help="a draft step of a tree (2 4 8)")
    parser.add_argument("--tokens", type=int, default=2000, help="simulated tokens of each run (2000)")
    Console(width=140).print(table_of(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
