"""Heads on the target beside the draft service, over round trips to the draft: each alone, and both.

The shipped heads belong to the embedded target; the deepened one has the same hidden states, so they are written again
with its digest.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bars import Bar
from bench.deepened import write_deepened
from bench.pipeline.placement import placed
from bench.pipeline.variants import OFF, RULES_DEFAULT, Variant, request_of
from bench.proposers.texts import (
    Found,
    generate,
    median_of,
    per_second,
    pooled,
    pooled_ratio,
    seconds_of,
    shown,
)
from specdec.engine.heads import load_heads, save_heads
from specdec.engine.loading.model_folder import open_model_folder
from specdec.folders import EMBEDDED_MODELS, read_json
from tests.support.harness import heldout_prompts

RTTS_MS = (0.0, 5.0, 20.0, 50.0)
TARGET_RTT_MS = 0.2
DRAFT, HEADS = ("draft",), ("heads",)
VARIANTS = (
    Variant("draft", None, proposers=DRAFT),
    Variant("heads", None, proposers=HEADS),
    Variant("both", None, proposers=DRAFT + HEADS),
)
BOTH_BAR = 0.97


def heads_of_deepened(target: Path, folder: Path) -> Path:
    """The shipped heads in `folder`, as those of the deepened target. Returns the folder."""
    shipped = EMBEDDED_MODELS / "target-heads"
    own = open_model_folder(str(EMBEDDED_MODELS / "target"))
    heads = load_heads(shipped, own.digest(), read_json(shipped / "heads.json")["hidden_size"])
    folder.mkdir()
    save_heads(heads, folder, open_model_folder(str(target)).digest())
    return folder


def measure_heads(asked: argparse.Namespace, console: Console) -> tuple[list[Table], list[Bar], dict[str, Any]]:
    """Tokens per second over plain decoding, greedy, by round trip: medians of prompts. The two together are compared
    by the tokens and seconds of all texts, since a text's own ratio is between 0.5 and 2 by the policy's tries."""
    prompts = list(heldout_prompts().items())[: asked.prompts]
    rule = RULES_DEFAULT[0]
    table = Table(title=f"{rule}: tokens/s over plain decoding [95 %], by round trip to the draft")
    for heading in (
        "round trip, ms",
        "plain, tokens/s",
        *(variant.name for variant in VARIANTS),
        "both / better [95 %]",
    ):
        table.add_column(heading, justify="right")
    bars, written = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        target = write_deepened(Path(scratch))
        heads = heads_of_deepened(target, Path(scratch) / "heads")
        with placed(target, "bfloat16", "float32", target={"heads": str(heads)}) as place:
            stub = place.stubs[0]
            for rtt_ms in RTTS_MS:
                place.set_rtt(rtt_ms, TARGET_RTT_MS)
                found = Found()
                for name, prompt in track([prompts[0], *prompts], f"{rtt_ms:g} ms", console=Console(stderr=True)):
                    for variant in (OFF, *VARIANTS):
                        text = generate(stub, request_of(variant, rule, prompt, asked.tokens))
                        found.add(variant.name, str(name), text)
                ratios = [found.ratio(variant.name, OFF.name, per_second, None) for variant in VARIANTS]
                better = max((one.name for one in VARIANTS[:2]), key=lambda name: pooled(found, name, seconds_of))
                together = pooled_ratio(found, "both", better, seconds_of)
                both = found.ratio("both", better, per_second, None)
                plain = median_of(found, OFF.name, per_second)
                table.add_row(f"{rtt_ms:g}", f"{plain:.1f}", *map(str, ratios), f"{shown(together)} ({better})")
                claim, told = f"round trip {rtt_ms:g} ms: draft and heads / {better}", f"median of prompts {both}"
                bars.append(Bar(claim, BOTH_BAR, together.value, f"{shown(together)}; {told}"))
                written[f"{rtt_ms:g}"] = {
                    name: {prompt: text.tokens_per_s for prompt, text in own.items()}
                    for name, own in found.texts.items()
                }
    return [table], bars, written
