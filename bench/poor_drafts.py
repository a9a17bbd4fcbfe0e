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
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file

from bench.bars import OF_OFF, Bar, never_slower
from bench.placement import Placed, placed
from bench.results import Cell, Ratio, Results, Table
from bench.runner import Contender, Prepared, Values, main
from bench.streams import ADAPTED_S, rate_between
from specdec.client.events import event_of
from specdec.client.run import Run
from specdec.engine.loading.folder_files import MANIFEST_FILE, WEIGHTS_FILE
from specdec.launch.children import Child
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.deepened import write_deepened
from tests.support.draft_troubles import hundred_times_slower, silent
from tests.support.harness import DRAFT_MODEL, heldout_prompts
from tests.support.samples import TIMEOUT_S, measure
from tests.support.variants import AUTO, OFF, RULE_NAMES, Variant, request_of

Trouble = Callable[[Child, threading.Event], None]
RULES = (RULE_NAMES[0], RULE_NAMES[4])
SLOW, WRONG = "as slow as its target", "always wrong"
TROUBLES: dict[str, Trouble] = {"silent": silent, "a hundred times slower": hundred_times_slower}
RTT_MS, TARGET_RTT_MS = 1.0, 0.2
BEFORE_S = 0.7  # the time a text is under way before its draft changes
RECOVERY_S = 3.0  # until a link that was given up is there again
COUNTED_S = 1.5  # of a text whose draft changes, which is left then: of longer ones steps read more
MAX_TOKENS, CHANGED_TOKENS = 64, 1500  # the latter: more than any text has by then


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


def rate_in_trouble(place: Placed, variant: Variant, request: pb.GenerateRequest, trouble: Trouble) -> float:
    """Tokens a second of a text whose draft changes while it is under way, from two seconds after the change."""
    draft, run, is_over = place.services.draft, Run(), threading.Event()
    assert draft is not None
    changing = threading.Timer(BEFORE_S, trouble, (draft, is_over))
    from_s = time.perf_counter() + BEFORE_S + ADAPTED_S
    changing.start()
    call = place.stub_of(variant).Generate(request, timeout=TIMEOUT_S)
    try:
        for response in call:
            run.take(event_of(response))
            if time.perf_counter() > from_s + COUNTED_S:
                break
    finally:
        call.cancel()
        changing.cancel()
        is_over.set()
        changing.join()
        draft.signal(signal.SIGCONT)
    return rate_between(run.deltas, from_s, from_s + COUNTED_S)


def rate(place: Placed, cell: Cell, variant: Variant, prompt: tuple[int, str]) -> Values:
    """Measures one text."""
    rule, trouble = str(cell["rule"]), TROUBLES.get(str(cell["draft"]))
    if trouble is None:
        return {"tokens_per_s": measure(place.stub_of(variant), variant, rule, RTT_MS, prompt, MAX_TOKENS).tokens_per_s}
    if variant == AUTO:  # back at what the draft is worth when it is well
        time.sleep(RECOVERY_S)
        measure(place.stub_of(variant), variant, rule, RTT_MS, prompt, MAX_TOKENS)
    request = request_of(variant, rule, prompt[1], CHANGED_TOKENS)
    return {"tokens_per_s": rate_in_trouble(place, variant, request, trouble)}


def ratio_of(results: Results, cell: Cell) -> Ratio | None:
    return results.ratio(cell, AUTO.name, OFF.name, "tokens_per_s")


class PoorDrafts:
    """See the module."""

    name = "poor_drafts"
    about = "auto / off with drafts of no use, one stream, emulated machines, 1 ms to the draft"
    turns, quick_turns, minutes = 9, 2, 12

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """None of its own."""

    def cells(self, asked: argparse.Namespace) -> list[Cell]:
        rules = RULES[:1] if asked.quick else RULES
        return [{"rule": rule, "draft": draft} for draft in (SLOW, WRONG, *TROUBLES) for rule in rules]

    @contextmanager
    def prepared(self, asked: argparse.Namespace) -> Iterator[Prepared]:
        prompts = list(heldout_prompts().items())
        with TemporaryDirectory() as scratch, ExitStack() as running:
            target = write_deepened(Path(scratch) / "target")
            drafts = {SLOW: (target, "bfloat16"), WRONG: (write_always_wrong(Path(scratch) / "wrong"), "float32")}

            def contenders(cell: Cell, results: Results) -> dict[str, Contender]:
                running.close()
                model, dtype = drafts.get(str(cell["draft"]), (DRAFT_MODEL, "float32"))
                place = running.enter_context(placed(target, "bfloat16", dtype, draft_model=model))
                place.set_rtt(RTT_MS, TARGET_RTT_MS)

                def contender(variant: Variant) -> Contender:
                    return lambda turn: rate(place, cell, variant, prompts[turn % len(prompts)])

                return {variant.name: contender(variant) for variant in (OFF, AUTO)}

            yield contenders

    def tables(self, results: Results) -> list[Table]:
        def text(draft: str, rule: str) -> str:
            ratio = ratio_of(results, {"rule": rule, "draft": draft})
            return ratio.short(OF_OFF) if ratio else ""

        drafts = dict.fromkeys(str(cell["draft"]) for cell in results.cells())
        rows = [[draft, *(text(draft, rule) for rule in RULES)] for draft in drafts]
        return [Table("auto_over_off", f"{self.about} (bar {OF_OFF})", ["draft", *RULES], rows)]

    def bars(self, results: Results) -> list[Bar]:
        ratios = {f"{cell['draft']}, {cell['rule']}": ratio_of(results, cell) for cell in results.cells()}
        return never_slower({name: ratio for name, ratio in ratios.items() if ratio})[:1]


BENCHMARK = PoorDrafts()

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
