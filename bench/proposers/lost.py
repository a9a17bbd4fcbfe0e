"""The draft service is killed: the coordinator's own proposers go on. The first text after it counts too."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bars import Bar
from bench.deepened import write_deepened
from bench.pipeline.variants import OFF, RULES_DEFAULT, Variant, request_of
from bench.proposers.texts import Found, generate, per_second
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.harness import DRAFT_MODEL, heldout_prompts, running

EVERY = Variant("auto", None, proposers=("draft", "ngram"))


def measure_lost(asked: argparse.Namespace, console: Console) -> tuple[list[Table], list[Bar], dict[str, Any]]:
    """Tokens per second of `auto` over plain decoding before and after the draft is killed, greedy."""
    prompts, rule = list(heldout_prompts().items())[: asked.prompts], RULES_DEFAULT[0]
    before, after = Found(), Found()
    with (
        tempfile.TemporaryDirectory() as scratch,
        running(
            write_deepened(Path(scratch)), DRAFT_MODEL, None, {"dtype": "float32"}, threads=1, dtype="bfloat16"
        ) as services,
        grpc.insecure_channel(services.coordinator.address) as channel,
    ):
        stub = pb_grpc.CoordinatorServiceStub(channel)
        for found in (before, after):
            if found is after:
                assert services.draft is not None
                services.draft.process.kill()
            warm_up = prompts[:1] if found is before else []
            for name, prompt in track([*warm_up, *prompts], "draft", console=Console(stderr=True)):
                for variant in (OFF, EVERY):
                    found.add(variant.name, str(name), generate(stub, request_of(variant, rule, prompt, asked.tokens)))
    table = Table(title=f"{rule}: draft and n-gram over plain decoding, tokens/s [95 %]")
    for heading in ("", "over plain", "of texts that cycle"):
        table.add_column(heading, justify="right" if heading else "left")
    for when, found in (("with the draft", before), ("the draft is killed", after)):
        ratios = [found.ratio(EVERY.name, OFF.name, per_second, cyclic) for cyclic in (False, True)]
        table.add_row(when, *(str(ratio) if ratio else "" for ratio in ratios))
    ratio = after.ratio(EVERY.name, OFF.name, per_second, None)
    assert ratio is not None
    written = {
        when: {name: {prompt: text.tokens_per_s for prompt, text in own.items()} for name, own in found.texts.items()}
        for when, found in (("before", before), ("after", after))
    }
    return [table], [Bar("the draft is killed: auto / off", 0.98, ratio.median, str(ratio))], written
