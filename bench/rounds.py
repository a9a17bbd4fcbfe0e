"""`python -m bench.rounds`: the parts of a round's time, by rule and draft length, on the embedded pair.

Three services on this machine, one stream, held-out prompts, variants interleaved prompt by prompt. `link` is the time
of a round beyond the target's queue, forward pass and sampler: both ways on the network, messages, the rule.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec.client.request import make_request
from specdec.client.run import Run
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import heldout_prompts, running

RULES: dict[str, dict[str, Any]] = {
    "GREEDY, temperature 0": {"temperature": 0.0},
    "COUPLED, temperature 0.7": {"temperature": 0.7, "seed": 1},
    "REJECTION, temperature 0.7": {"temperature": 0.7},
    "COUPLED, temperature 1": {"temperature": 1.0, "seed": 1},
    "REJECTION, temperature 1": {"temperature": 1.0},
}
PARTS = ("draft_wait_s", "target_queue_s", "target_forward_s", "target_sampling_s", "target_heads_s", "target_link_s")


def named_rule(sampling: dict[str, Any]) -> str | None:
    """The rule that sampling parameters of RULES stand for, where it must be named: unseeded, the server would
    choose."""
    return "rejection" if sampling["temperature"] > 0 and "seed" not in sampling else None


def measure(
    stub: pb_grpc.CoordinatorServiceStub, prompt: str, rule: str, draft_length: int, max_tokens: int
) -> dict[str, float]:
    """One generation: tokens/s after the first token, acceptance, bytes, and milliseconds a round by part."""
    own = {"max_tokens": max_tokens, "ignore_eos": True, "rule": named_rule(RULES[rule]), **RULES[rule]}
    request = make_request(prompt, policy="fixed", num_speculative_tokens=draft_length, **own)
    run = Run.of(stub.Generate(request, timeout=300))
    counts, token_count = run.statistics, len(run.token_ids)
    seconds = counts.time.total_s - counts.time.time_to_first_token_s
    measurements = {
        "tokens_per_s": (token_count - 1) / seconds,
        "draft_tokens": counts.num_draft_tokens,
        "accepted_tokens": counts.num_accepted_draft_tokens,
        "spec_steps": counts.num_spec_steps,
        "draft_bytes_per_token": counts.draft_link_bytes / token_count,
    }
    return measurements | {part: getattr(counts.time, part) / counts.rounds * 1e3 for part in PARTS}


def summary(runs: list[dict[str, float]]) -> dict[str, float]:
    """Medians of rates and times over generations; totals of counts."""
    totals = {name: sum(run[name] for run in runs) for name in ("draft_tokens", "accepted_tokens", "spec_steps")}
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0] if name not in totals}
    medians["acceptance"] = totals["accepted_tokens"] / totals["draft_tokens"] if totals["draft_tokens"] else 0.0
    medians["mean_length"] = 1 + totals["accepted_tokens"] / totals["spec_steps"] if totals["spec_steps"] else 1.0
    return medians


def table_of(results: dict[str, dict[int, dict[str, float]]]) -> Table:
    """One line per rule and draft length; tokens/s beside the off row of the same run."""
    table = Table(title="milliseconds a round, medians over prompts; variants interleaved")
    parts = ("wait", "queue", "forward", "evid.", "link")
    for name in ("rule", "k", "tok/s", "on/off", "accept", "length", "B/tok", *parts):
        table.add_column(name, justify="left" if name == "rule" else "right")
    for rule, lines in results.items():
        for draft_length, line in lines.items():
            ratio = line["tokens_per_s"] / lines[0]["tokens_per_s"]
            times = (f"{line[part]:.2f}" for part in PARTS)
            counts = (f"{line['acceptance']:.2f}", f"{line['mean_length']:.2f}", f"{line['draft_bytes_per_token']:.0f}")
            table.add_row(rule, str(draft_length), f"{line['tokens_per_s']:.0f}", f"{ratio:.2f}", *counts, *times)
        table.add_section()
    return table


def table_models(folder: Path, vocabulary_size: int = 7, positions_max: int = 512) -> tuple[Path, Path]:
    """Writes target and draft of the protocol tests: table models with different distributions."""
    from specdec.engine.table_model import write_table_model

    for seed, name in enumerate(("target", "draft")):
        write_table_model(folder / name, vocabulary_size, positions_max, seed)
    return folder / "target", folder / "draft"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.rounds", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8, help="held-out prompts (8)")
    parser.add_argument("--max-tokens", type=int, default=64, help="output tokens of each generation (64)")
    parser.add_argument("--draft-lengths", type=int, nargs="+", default=[1, 2, 3, 4, 8], help="beside 0, which is off")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16 or auto (auto)")
    parser.add_argument("--table", action="store_true", help="models that compute nothing: what the rest takes")
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    asked = parser.parse_args()
    runs: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
    draft_lengths = sorted({0, *asked.draft_lengths})
    prompts = ["<1><2>"] if asked.table else list(heldout_prompts().values())[: asked.prompts]
    with contextlib.ExitStack() as stack:
        models = table_models(Path(stack.enter_context(tempfile.TemporaryDirectory()))) if asked.table else ()
        services = stack.enter_context(running(*models, threads=1, dtype=asked.dtype))
        with grpc.insecure_channel(services.coordinator.address) as channel:
            stub = pb_grpc.CoordinatorServiceStub(channel)
            measure(stub, prompts[0], next(iter(RULES)), 4, 16)
            for prompt in track(prompts, "measuring", console=Console(stderr=True)):
                for rule in RULES:
                    for draft_length in draft_lengths:
                        runs[rule, draft_length].append(measure(stub, prompt, rule, draft_length, asked.max_tokens))
    results = {rule: {k: summary(runs[rule, k]) for k in draft_lengths} for rule in RULES}
    Console(width=140).print(table_of(results))
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
