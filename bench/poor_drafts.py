"""`python -m bench.poor_drafts`: speculation with drafts that are of no use, against plain decoding.

As slow as its target: the target itself. Always wrong: the shipped draft with its output layer turned by one token, as
sure of its guesses as before. Silent, and a hundred times slower: the shipped draft, stopped or nearly so while a text
is under way; what counts is the time from two seconds after. One stream, off and auto in turns, `auto` on a coordinator
of its own, the target made deeper by layers that add nothing.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from safetensors.torch import load_file, save_file

from bench.bars import add_check_flag, as_json, conclude
from bench.concurrency import ratio_in_turns
from bench.deepened import EXTRA_LAYERS_DEFAULT, write_deepened
from bench.harness import DRAFT_MODEL, heldout_prompts
from bench.pipeline.bars import never_slower
from bench.pipeline.measurements import Ratio
from bench.pipeline.placement import Placed, description, placed
from bench.pipeline.samples import TIMEOUT_S, measure
from bench.pipeline.variants import AUTO, RULES_DEFAULT, Variant, request_of
from bench.streams import ADAPTED_S, rate_between
from specdec.client.run import Run
from specdec.engine.loading.folder_files import MANIFEST_FILE, WEIGHTS_FILE
from specdec.errors import SpecdecError
from specdec.launch.children import Child
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc

Trouble = Callable[[Child, threading.Event], None]
BEFORE_S = 0.7  # the time a text is under way before its draft changes
AWAKE_S, ASLEEP_S = 0.002, 0.2  # one step in a hundred times as long
RECOVERY_S = 3.0  # until a link that was given up is there again
QUICK = {"pairs": 2, "pairs_max": 0, "max_tokens": 48}
CHANGED_TOKENS = 400  # enough for the time that counts; more would compare steps after more tokens with off


def write_always_wrong(folder: Path) -> Path:
    """The shipped draft, whose logits belong to the token before each."""
    skipped = shutil.ignore_patterns(MANIFEST_FILE, WEIGHTS_FILE, "config.json")
    shutil.copytree(DRAFT_MODEL, folder, ignore=skipped, dirs_exist_ok=True)
    config = json.loads((DRAFT_MODEL / "config.json").read_text(encoding="utf-8"))
    weights = load_file(DRAFT_MODEL / WEIGHTS_FILE)
    weights["lm_head.weight"] = torch.roll(weights["model.embed_tokens.weight"], 1, 0)  # [vocab, hidden]
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}), encoding="utf-8")
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    return folder


def silent(draft: Child, is_over: threading.Event) -> None:
    """The draft does nothing at all, and its connections stay open."""
    draft.signal(signal.SIGSTOP)
    is_over.wait()


def hundred_times_slower(draft: Child, is_over: threading.Event) -> None:
    """The draft runs for two milliseconds in two hundred."""
    while not is_over.wait(AWAKE_S):
        draft.signal(signal.SIGSTOP)
        is_over.wait(ASLEEP_S)
        draft.signal(signal.SIGCONT)


TROUBLES: dict[str, Trouble] = {"silent": silent, "a hundred times slower": hundred_times_slower}


def rate_in_trouble(
    stub: pb_grpc.CoordinatorServiceStub, request: pb.GenerateRequest, draft: Child, trouble: Trouble
) -> float:
    """Tokens a second of a text whose draft changes while it is under way, from two seconds after the change."""
    is_over = threading.Event()
    changing = threading.Timer(BEFORE_S, trouble, (draft, is_over))
    requested_s = time.perf_counter()
    changing.start()
    try:
        deltas = Run.of(stub.Generate(request, timeout=TIMEOUT_S)).deltas
    finally:
        changing.cancel()
        is_over.set()
        changing.join()
        draft.signal(signal.SIGCONT)
    return rate_between(deltas, requested_s + BEFORE_S + ADAPTED_S, deltas[-1][0])


def cells_in_trouble(place: Placed, rule: str, asked: argparse.Namespace, done: Callable[[], None]) -> dict[str, Ratio]:
    """Auto / off for every trouble."""
    prompts = list(heldout_prompts().items())
    draft = place.services.draft
    assert draft is not None
    found = {}
    for name, trouble in TROUBLES.items():

        def rate(variant: Variant, number: int, trouble: Trouble = trouble) -> float:
            prompt = prompts[number % len(prompts)]
            if variant == AUTO:  # back at what the draft is worth when it is well
                time.sleep(RECOVERY_S)
                measure(place.stub_of(variant), variant, rule, 0.0, prompt, asked.max_tokens)
            request = request_of(variant, rule, prompt[1], CHANGED_TOKENS)
            return rate_in_trouble(place.stub_of(variant), request, draft, trouble)

        found[f"{rule}, {name}"] = ratio_in_turns(rate, asked, done)[0]
    return found


def cell_of(place: Placed, rule: str, asked: argparse.Namespace, done: Callable[[], None]) -> Ratio:
    """Auto / off on these services, from the first request on."""
    prompts = list(heldout_prompts().items())

    def rate(variant: Variant, number: int) -> float:
        prompt = prompts[number % len(prompts)]
        return measure(place.stub_of(variant), variant, rule, 0.0, prompt, asked.max_tokens).tokens_per_s

    return ratio_in_turns(rate, asked, done)[0]


def cells(asked: argparse.Namespace, scratch: Path, done: Callable[[], None]) -> Iterator[tuple[dict[str, Ratio], Any]]:
    """Every cell as it is made, and where everything ran. Raises SpecdecError."""
    rules = [RULES_DEFAULT[number] for number in asked.rules]
    model = write_deepened(scratch / "target", asked.extra_layers)
    drafts = {
        "as slow as its target": (model, asked.dtype),
        "always wrong": (write_always_wrong(scratch / "wrong"), asked.draft_dtype),
    }
    for name, (draft_model, draft_dtype) in drafts.items():
        for rule in rules:
            with placed(model, asked.dtype, draft_dtype, draft_model=draft_model) as place:
                place.set_rtt(asked.rtt_ms, asked.target_rtt_ms)
                yield {f"{rule}, {name}": cell_of(place, rule, asked, done)}, description(place)
    with placed(model, asked.dtype, asked.draft_dtype) as place:
        place.set_rtt(asked.rtt_ms, asked.target_rtt_ms)
        for rule in rules:
            yield cells_in_trouble(place, rule, asked, done), description(place)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.poor_drafts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rules", type=int, nargs="+", default=[0, 4], help="by number, as bench.pipeline lists them")
    parser.add_argument("--rtt-ms", type=float, default=1.0, help="coordinator-draft (%(default)s)")
    parser.add_argument("--target-rtt-ms", type=float, default=0.2, help="coordinator-target (%(default)s)")
    parser.add_argument("--pairs", type=int, default=9, help="of off and auto in a cell (%(default)s)")
    parser.add_argument("--pairs-max", type=int, default=60, help="where auto is below 0.98 of off (%(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="where the draft does not change (%(default)s)")
    parser.add_argument("--extra-layers", type=int, default=EXTRA_LAYERS_DEFAULT, help="of the target (%(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of the target (%(default)s)")
    parser.add_argument("--draft-dtype", default="float32", help="of the draft (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="about three minutes: two pairs")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(parser)
    if parser.parse_known_args()[0].quick:
        parser.set_defaults(**QUICK)
    return parser.parse_args()


def main() -> int:
    asked = options()
    console = Console(width=170)
    found: dict[str, Ratio] = {}
    hardware: list[Any] = []
    try:
        with tempfile.TemporaryDirectory() as scratch, Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("measuring", total=len(asked.rules) * (2 + len(TROUBLES)) * asked.pairs)
            for ratios, described in cells(asked, Path(scratch), lambda: bar.advance(task)):
                hardware.append(described)
                for name, ratio in ratios.items():
                    console.print(f"{name}: auto/off {ratio}", highlight=False)
                found |= ratios
    except SpecdecError as error:
        print(f"poor_drafts: {error}", file=sys.stderr)
        return 1
    bars = never_slower(found)[:1]
    asked.out.mkdir(parents=True, exist_ok=True)
    written = {"hardware": hardware[-1], "rtt_ms": asked.rtt_ms, "extra_layers": asked.extra_layers}
    written |= {"cells": {name: asdict(ratio) for name, ratio in found.items()}, "bars": as_json(bars)}
    (asked.out / "poor_drafts.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
