"""`python -m bench.head_pass`: the pass of a feature head over a step of its target, and what a loaded head costs.

In turns, with one thread and with two: a step of one row of the chat model in its own 4 bits and unpacked to bfloat16,
the same with a head loaded, and passes of the head with what they propose. Without `--heads` the head has one layer of
the target's sizes and random weights: times do not depend on them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.bars import Bar, add_check_flag, as_json, conclude, worst_of
from bench.deepened import load
from bench.engine.steps import BLOCK_SIZE, time_step
from bench.results import Ratio, ratio_of
from bench.verification import verification
from specdec.distill.eagle import head_sizes
from specdec.engine.eagle.folder import load_eagle, target_facts
from specdec.engine.eagle.model import EagleTarget
from specdec.engine.eagle.network import EagleHead, default_layers
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.loading.fitting import config_of
from specdec.engine.loading.model_folder import open_model_folder
from specdec.folders import CHAT_MODEL
from specdec.target_service.feature_head import FeatureHeadDrafter
from tests.support.unpacked import write_unpacked

PASS_OVER_STEP, LOADED_OVER_PLAIN = 0.12, 1.02
CONTEXT = 100  # cached tokens
PASS_ROWS = (1, 4, 8)
MS = 1000.0


@dataclass(frozen=True, slots=True)
class PassMeasurement:
    """One target and number of threads. Milliseconds are medians over turns, ratios those of the same turns.
    `pass_ms`: by rows, with what a pass proposes."""

    model: str
    threads: int
    step_ms: float
    pass_ms: dict[int, float]
    pass_over_step: Ratio
    loaded_over_plain: Ratio

    @property
    def name(self) -> str:
        """As bars and tables have it."""
        return f"{self.model}, {self.threads} thread{'s' * (self.threads > 1)}"


def head_of(model: str, heads: Path | None, token_count: int) -> EagleHead:
    """The head in a folder, or one of random weights that proposes the first tokens. Raises ModelRefused."""
    folder = open_model_folder(model)
    facts = target_facts(folder)
    if heads is not None:
        return load_eagle(heads, facts)
    torch.manual_seed(0)
    sizes = head_sizes(config_of(folder), facts, default_layers(facts.layer_count), token_count)
    return EagleHead(sizes, torch.arange(token_count)).requires_grad_(False)


def measure(
    name: str, model: str, head: EagleHead, threads: int, turns: int, advance: Callable[[], None]
) -> PassMeasurement:
    """Times every shape once a turn; the first turn warms up. Raises ModelRefused."""
    torch.set_num_threads(threads)
    plain, loaded = load(model, "bfloat16"), EagleTarget(load(model, "bfloat16"), head)
    drafter, size = FeatureHeadDrafter(loaded), loaded.description.vocabulary_size
    batch = verification(1, 1, CONTEXT)
    prompt = Chunk(batch.chunks[0].block_ids, 0, [5] * CONTEXT, 0)
    for each in (plain, loaded):
        each.allocate(2 + CONTEXT // BLOCK_SIZE + 1, BLOCK_SIZE)
        each.forward(RaggedBatch((prompt,)))
    plain_ms: list[float] = []
    loaded_ms: list[float] = []
    pass_ms: dict[int, list[float]] = {rows: [] for rows in PASS_ROWS}
    for turn in range(turns + 1):
        is_timed = turn > 0
        for each, its_ms in ((plain, plain_ms), (loaded, loaded_ms))[:: 1 if turn % 2 else -1]:
            each.forward(batch)  # not timed: caches hold what was read
            its_ms += [time_step(each, batch)] * is_timed
        for rows in PASS_ROWS:
            pass_ms[rows] += [MS * drafter.time_pass(rows, size)] * is_timed
        advance()
    return PassMeasurement(
        name,
        threads,
        statistics.median(plain_ms),
        {rows: statistics.median(own) for rows, own in pass_ms.items()},
        ratio_of([own / other for own, other in zip(pass_ms[1], plain_ms, strict=True)]),
        ratio_of([own / other for own, other in zip(loaded_ms, plain_ms, strict=True)]),
    )


def table_of(found: Sequence[PassMeasurement]) -> Table:
    """A line per target and number of threads."""
    table = Table(title="a feature head beside its target; medians in ms", title_justify="left")
    names = ["target", "step of one row", *(f"pass of {rows}" for rows in PASS_ROWS), "pass / step", "loaded / plain"]
    for name in names:
        table.add_column(name, justify="left" if name == "target" else "right")
    for own in found:
        ratios = f"{own.pass_over_step.median:.3f}", f"{own.loaded_over_plain.median:.3f}"
        table.add_row(own.name, f"{own.step_ms:.2f}", *(f"{own.pass_ms[rows]:.2f}" for rows in PASS_ROWS), *ratios)
    return table


def bars_of(found: Sequence[PassMeasurement]) -> list[Bar]:
    passes = {own.name: own.pass_over_step.median for own in found}
    loaded = {own.name: own.loaded_over_plain.median for own in found}
    return [
        worst_of("a head's pass / a step of one row", PASS_OVER_STEP, passes, is_limit=True),
        worst_of("a step with a head loaded / without", LOADED_OVER_PLAIN, loaded, is_limit=True),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    flags = argparse.ArgumentParser(prog="python -m bench.head_pass", description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--models", nargs="+", help="folders, GGUF files or hub ids (the chat model, packed and not)")
    flags.add_argument("--heads", type=Path, help="folder of a head of all of these (random weights)")
    flags.add_argument("--draft-vocabulary", type=int, default=8192, help="of a random head (%(default)s)")
    flags.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(%(default)s)")
    flags.add_argument("--turns", type=int, default=60, help="(%(default)s)")
    flags.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(flags)
    asked = flags.parse_args(arguments)
    console = Console()
    with tempfile.TemporaryDirectory() as scratch, Progress(console=console, transient=True) as shown:
        models = {name: name for name in asked.models or ()}
        if not models:
            models = {"chat, 4 bits": CHAT_MODEL}
            models["chat, bfloat16"] = str(write_unpacked(CHAT_MODEL, Path(scratch) / "chat"))
        total = len(models) * len(asked.threads) * (asked.turns + 1)
        task = shown.add_task("passes and steps", total=total)
        found = [
            measure(
                name,
                model,
                head_of(model, asked.heads, asked.draft_vocabulary),
                threads,
                asked.turns,
                lambda: shown.advance(task),
            )
            for name, model in models.items()
            for threads in asked.threads
        ]
    console.print(table_of(found))
    bars = bars_of(found)
    asked.out.mkdir(parents=True, exist_ok=True)
    written = {"measurements": [asdict(own) for own in found], "bars": as_json(bars)}
    (asked.out / "head_pass.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
