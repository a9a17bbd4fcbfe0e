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
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from bench.bars import Bar
from bench.deepened import write_deepened
from bench.pipeline.bars import OF_OFF, never_slower
from bench.pipeline.placement import Placed, placed
from bench.pipeline.samples import TIMEOUT_S, measure
from bench.pipeline.variants import AUTO, OFF, RULES_DEFAULT, Variant, request_of
from bench.results import Cell, Results, Table
from bench.runner import Contender, Prepared, Values, main
from bench.streams import ADAPTED_S, rate_between
from specdec.client.run import Run
from specdec.engine.loading.folder_files import MANIFEST_FILE, WEIGHTS_FILE
from specdec.launch.children import Child
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.harness import DRAFT_MODEL, heldout_prompts

Trouble = Callable[[Child, threading.Event], None]
BEFORE_S = 0.7  # the time a text is under way before its draft changes
AWAKE_S, ASLEEP_S = 0.002, 0.2  # one step in a hundred times as long
RECOVERY_S = 3.0  # until a link that was given up is there again
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


RULES = (RULES_DEFAULT[0], RULES_DEFAULT[4])
SLOW, WRONG = "as slow as its target", "always wrong"
TROUBLES: dict[str, Trouble] = {"silent": silent, "a hundred times slower": hundred_times_slower}


def rate_in_trouble(place: Placed, variant: Variant, request: pb.GenerateRequest, trouble: Trouble) -> float:
    """Tokens a second of a text whose draft changes while it is under way, from two seconds after the change."""
    draft, stub = place.services.draft, place.stub_of(variant)
    assert draft is not None
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


class PoorDrafts:
    """See the module."""

    name = "poor_drafts"
    about = "auto / off with drafts of no use, one stream, emulated machines, 1 ms to the draft"
    turns, quick_turns, minutes = 9, 2, 12

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--max-tokens", type=int, default=64, help="where the draft does not change (%(default)s)")

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        rules = RULES[:1] if asked.quick else RULES
        return [{"rule": rule, "draft": draft} for draft in (SLOW, WRONG, *TROUBLES) for rule in rules]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        prompts = list(heldout_prompts().items())
        with TemporaryDirectory() as scratch, ExitStack() as running:
            target = write_deepened(Path(scratch) / "target")
            wrong = write_always_wrong(Path(scratch) / "wrong")
            drafts = {SLOW: (target, "bfloat16"), WRONG: (wrong, "float32")}

            def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                running.close()
                rule, draft = str(cell["rule"]), str(cell["draft"])
                model, dtype = drafts.get(draft, (DRAFT_MODEL, "float32"))
                place = running.enter_context(placed(target, "bfloat16", dtype, draft_model=model))
                place.set_rtt(1.0, 0.2)

                def rate(variant: Variant, turn: int) -> Values:
                    prompt = prompts[turn % len(prompts)]
                    if draft not in TROUBLES:
                        sample = measure(place.stub_of(variant), variant, rule, 0.0, prompt, asked.max_tokens)
                        return {"tokens_per_s": sample.tokens_per_s}
                    if variant == AUTO:  # back at what the draft is worth when it is well
                        time.sleep(RECOVERY_S)
                        measure(place.stub_of(variant), variant, rule, 0.0, prompt, asked.max_tokens)
                    request = request_of(variant, rule, prompt[1], CHANGED_TOKENS)
                    return {"tokens_per_s": rate_in_trouble(place, variant, request, TROUBLES[draft])}

                return {variant.name: partial(rate, variant) for variant in (OFF, AUTO)}

            yield contenders

    def tables(self, results: Results) -> list[Table]:
        def shown_ratio(draft: str, rule: str) -> str:
            ratio = results.ratio({"rule": rule, "draft": draft}, AUTO.name, OFF.name, "tokens_per_s")
            return ratio.short(OF_OFF) if ratio else ""

        drafts = dict.fromkeys(str(cell["draft"]) for cell, _ in results.found)
        rows = [[draft, *(shown_ratio(draft, rule) for rule in RULES)] for draft in drafts]
        return [Table("auto_over_off", f"{self.about} (bar {OF_OFF})", ["draft", *RULES], rows)]

    def bars(self, results: Results) -> list[Bar]:
        found = {", ".join(map(str, cell.values())): cell for cell in results.cells()}
        ratios = {name: results.ratio(cell, AUTO.name, OFF.name, "tokens_per_s") for name, cell in found.items()}
        return never_slower({name: ratio for name, ratio in ratios.items() if ratio})[:1]


BENCHMARK = PoorDrafts()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
