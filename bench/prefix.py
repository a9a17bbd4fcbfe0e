"""`python -m bench.prefix`: time to the first token of prompts that the target has cached, and of those it has not.

The shipped pair through the three services, one request at a time. Each prompt is sent twice in a row with a new salt:
the first finds nothing (cold), the second the blocks of the first (cached); lengths and dtypes take turns, so a
disturbance affects both alike. The text must be the same, and the statistics contain the tokens found.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec.client.request import make_request
from specdec.client.run import Run
from specdec.errors import SpecdecError
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import TARGET_MODEL, heldout_prompts, running

LENGTHS = (64, 100, 128, 200, 256, 300, 384, 480)  # multiples of a block, and others
OUTPUT_COUNT = 2  # the first token is what is timed; one more shows that the text goes on


@dataclass(frozen=True, slots=True)
class PrefixMeasurement:
    """Medians of one prompt length, in milliseconds; `found_count` tokens were in the cache the second time."""

    dtype: str
    prompt_length: int
    found_count: int
    cold_ms: float
    cached_ms: float

    @property
    def speedup(self) -> float:
        """Cold / cached."""
        return self.cold_ms / self.cached_ms


def prompts_of(length: int, count: int) -> list[list[int]]:
    """Returns `count` different prompts of `length` tokens, composed of held-out ones."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TARGET_MODEL / "tokenizer.json"))
    texts = list(heldout_prompts().values())
    prompts = []
    for index in range(count):
        ids: list[int] = []
        for offset in range(len(texts)):
            if len(ids) >= length:
                break
            ids += tokenizer.encode(texts[(index * 7 + offset) % len(texts)]).ids
        prompts.append(ids[:length])
    return prompts


def time_to_first_token(
    stub: pb_grpc.CoordinatorServiceStub, prompt: Sequence[int], salt: str
) -> tuple[float, int, tuple[int, ...]]:
    """(milliseconds by the coordinator's clock, tokens found, output tokens) of one greedy request without a draft."""
    own: dict[str, Any] = {"max_tokens": OUTPUT_COUNT, "temperature": 0, "ignore_eos": True}
    run = Run.of(stub.Generate(make_request(prompt, cache_salt=salt, enabled=False, **own)))
    found = run.statistics
    return found.time.time_to_first_token_s * 1e3, found.cached_prompt_tokens, tuple(run.token_ids)


def measure(dtype: str, lengths: Sequence[int], repeats: int, threads: int) -> Iterator[PrefixMeasurement]:
    """Cold and cached by length. Raises SpecdecError where the two texts differ."""
    cold: dict[int, list[float]] = {length: [] for length in lengths}
    cached: dict[int, list[float]] = {length: [] for length in lengths}
    found: dict[int, int] = {}
    prompts = {length: prompts_of(length, repeats + 1) for length in lengths}
    with running(draft_model=None, threads=threads, dtype=dtype) as services:
        with grpc.insecure_channel(services.coordinator.address) as channel:
            stub = pb_grpc.CoordinatorServiceStub(channel)
            for turn in track(range(repeats + 1), dtype, console=Console(stderr=True)):
                for length in lengths:
                    salt, prompt = f"{turn} {length}", prompts[length][turn]
                    first_ms, none, text = time_to_first_token(stub, prompt, salt)
                    again_ms, found[length], same = time_to_first_token(stub, prompt, salt)
                    if none or text != same:
                        raise SpecdecError(f"prompt {turn} of {length} tokens: {none} found, {text} and {same}")
                    if turn:  # the first turn warms up
                        cold[length].append(first_ms)
                        cached[length].append(again_ms)
    for length in lengths:
        medians = statistics.median(cold[length]), statistics.median(cached[length])
        yield PrefixMeasurement(dtype, length, found[length], *medians)


def table_of(measurements: Sequence[PrefixMeasurement]) -> Table:
    """Returns the measurements as a table."""
    table = Table(title="Time to the first token, shipped target, plain decoding (medians, ms)")
    for column in ("dtype", "prompt", "found", "cold", "cached", "cold / cached"):
        table.add_column(column, justify="left" if column == "dtype" else "right")
    for measurement in measurements:
        times = f"{measurement.cold_ms:.1f}", f"{measurement.cached_ms:.1f}", f"{measurement.speedup:.1f}"
        table.add_row(measurement.dtype, str(measurement.prompt_length), str(measurement.found_count), *times)
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.prefix", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"], help="(default: %(default)s)")
    parser.add_argument("--lengths", nargs="+", type=int, default=list(LENGTHS), help="tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=15, help="prompts of each length (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of the target (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=Path("out/prefix.json"), help="file (default: %(default)s)")
    asked = parser.parse_args()
    measurements: list[PrefixMeasurement] = []
    for dtype in asked.dtypes:
        measurements += measure(dtype, asked.lengths, asked.repeats, asked.threads)
    Console().print(table_of(measurements))
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    written = {"threads": asked.threads, "measurements": [asdict(measurement) for measurement in measurements]}
    asked.json.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
