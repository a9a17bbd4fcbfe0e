"""`python -m bench.pair`: a target with its draft, over plain decoding of the same services: the chat model with its
shipped draft, with a head of `--heads`, or with both, or the two folders of `--target` and `--draft` or `--heads`.

Held-out prompts; plain decoding (off) and the service's own choice (auto, all proposers) in turns on every one. The
target has one core; draft and coordinator share the other. The chat pair answers as many questions of every class,
greedy and with a seed at temperature 0.7, on loopback and with a round trip to the draft; with draft and head on
loopback, each proposer alone too, whose best is a bar for all of them together. A given pair answers the
prompts of a file, an encoder-decoder as its input, on loopback, greedy and at temperature 1 with a seed and without,
also in rounds of a fixed number of draft tokens, as published for T5 (Leviathan, Kalman, Matias 2023, table 2); of an
encoder-decoder the steps of both stacks too.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.bars import Bar, add_check_flag, as_json, conclude
from bench.pipeline.placement import Placed, description, placed
from bench.pipeline.variants import OFF, RULES_DEFAULT, Variant, request_of, synchronous
from bench.prompts import Prompt
from bench.proposers.chat import template_ids
from bench.proposers.texts import Found, Text, generate, per_second, whole_per_second
from bench.results import Ratio, ratio_of
from bench.step.encoder_decoder import StackSteps, measure_stacks, stack_table
from specdec.chat.template import ChatTemplate
from specdec.distill.written import prompts_of
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ConfigError, SpecdecError
from specdec.folders import CHAT_DRAFT, CHAT_MODEL, EMBEDDED_MODELS
from tests.support.harness import DRAFT_MODEL

AUTO = Variant("auto", None, proposers=())  # no names: all that the service has
WITH_HEAD = Variant("auto", None, proposers=("heads", "ngram", "suffix", "grammar"))  # the draft service is idle then
ALONE = tuple(Variant(name, None, proposers=(name,)) for name in ("heads", "draft", "ngram", "suffix"))
ALONE_BAR = 0.98  # of the best single proposer's speed
GREEDY, SEEDED = RULES_DEFAULT[:2]
RATE_BARS = {(GREEDY, 0.0): 1.4, (SEEDED, 0.0): 1.3, (GREEDY, 50.0): 1.2, (SEEDED, 50.0): 1.2}  # by rule and RTT in ms
GIVEN = tuple((rule, 0.0) for rule in (GREEDY, "COUPLED, temperature 1", "REJECTION, temperature 1"))
PUBLISHED = (  # task, temperature, draft tokens a round, acceptance of one, speed over plain decoding
    ("English to German, WMT", 0, 7, 0.75, 3.4),
    ("English to German, WMT", 1, 7, 0.62, 2.6),
    ("summaries, CNN/DM", 0, 5, 0.65, 3.1),
    ("summaries, CNN/DM", 1, 5, 0.53, 2.3),
)
PUBLISHED_TITLE = "published: T5-XXL, 11B, with T5-small, 77M; one stream, TPU v4"
Cell = tuple[str, float]


@dataclass(frozen=True, slots=True)
class Pair:
    """What is measured: folders, prompts, ways beside plain decoding, auto first, and cells. `draft`: of a draft model
    that is measured, `heads`: of a feature head on the target; `encoded`: a prompt as it is sent; `has_encoder`: of the
    target."""

    target: Path
    draft: Path | None
    heads: Path | None
    prompts: Sequence[Prompt]
    encoded: Callable[[Prompt], str | Sequence[int]]
    variants: tuple[Variant, ...]
    cells: tuple[Cell, ...]
    has_encoder: bool


def questions(per_class: int) -> list[Prompt]:
    """Returns the first held-out questions of every class."""
    lines = (EMBEDDED_MODELS / "chat_prompts.jsonl").read_text(encoding="utf-8").splitlines()
    chosen: dict[str, list[Prompt]] = {}
    for row in map(json.loads, lines):
        chosen.setdefault(row["class"], []).append(Prompt(str(row["id"]), row["class"], row["prompt"]))
    return [question for own in chosen.values() for question in own[:per_class]]


def pair_of(asked: argparse.Namespace) -> Pair:
    """Returns the pair of the flags. Raises ConfigError."""
    variants: tuple[Variant, ...]
    given = asked.target, asked.heads or asked.draft, asked.prompts
    if (asked.target or asked.prompts) and not all(given):
        what = "--target, --draft or --heads, and --prompts"
        raise ConfigError(f"{what} go together: without all of them it is the chat pair")
    if all(given):
        prompts = [Prompt(str(index), "given", text) for index, text in enumerate(prompts_of(asked.prompts))]
        template = ChatTemplate.read(asked.target)
        fixed = synchronous(asked.draft_tokens)
        variants = (WITH_HEAD, replace(fixed, proposers=("heads",))) if asked.heads else (AUTO, fixed)
    else:
        asked.target = open_model_folder(CHAT_MODEL).path
        prompts, template = questions(asked.per_class), ChatTemplate.read(asked.target)
        variants = (AUTO, *ALONE) if asked.heads and asked.draft else (WITH_HEAD if asked.heads else AUTO,)
    encode = (lambda prompt: prompt.prompt) if template is None else (lambda prompt: template_ids(template, prompt))
    draft = asked.draft or (None if asked.heads else CHAT_DRAFT)
    cells = GIVEN if all(given) else tuple(cell for cell in RATE_BARS if cell[1] == 0 or not asked.heads)
    has_encoder = open_model_folder(str(asked.target)).has_encoder
    chosen = prompts[: asked.prompt_count or None]
    return Pair(asked.target, draft, asked.heads, chosen, encode, variants, cells, has_encoder)


def texts_of(place: Placed, cell: Cell, pair: Pair, tokens: int) -> Found:
    """Returns the texts of one rule and round trip; the first prompt warms up."""
    rule, rtt_ms = cell
    place.set_rtt(rtt_ms, 0.2)
    found = Found()
    for prompt in track([pair.prompts[0], *pair.prompts], f"{rule}, RTT {rtt_ms:g} ms", console=Console(stderr=True)):
        for variant in (OFF, *pair.variants):
            request = request_of(variant, rule, pair.encoded(prompt), tokens, ignore_eos=False)
            stub = place.stubs[0 if variant.draft_length is None else -1]
            found.add(variant.name, prompt.name, generate(stub, request))
    return found


def table_of(found: dict[Cell, Found], pair: Pair) -> Table:
    """A line for each rule, round trip and way; `accepted` and `tested / accepted`: see the page of performance."""
    names = " and ".join(own.name for own in (pair.draft, pair.heads) if own)
    table = Table(title=f"{pair.target.name} with {names}, over plain decoding")
    for name in ("rule", "RTT ms", "way", "tok/s", "/ off", "whole texts / off", "accepted", "acceptance", "a round"):
        table.add_column(name, justify="left" if name in ("rule", "way") else "right")
    for (rule, rtt_ms), own in found.items():
        table.add_row(rule, f"{rtt_ms:g}", OFF.name, f"{rate(list(own.texts[OFF.name].values())):.1f}")
        for variant in pair.variants:
            texts = list(own.texts[variant.name].values())
            ratios = [str(ratio_over_off(own, variant, of)) for of in (per_second, whole_per_second)]
            length = sum(len(text.token_ids) for text in texts) / sum(text.statistics.rounds for text in texts)
            shares = f"{model_share(texts):.2f}", f"{acceptance(texts):.2f}", f"{length:.2f}"
            table.add_row(rule, f"{rtt_ms:g}", variant.name, f"{rate(texts):.1f}", *ratios, *shares)
    return table


def published_table() -> Table:
    """The measurements of the paper with their settings."""
    table = Table(title=PUBLISHED_TITLE)
    for name in ("task", "temperature", "draft tokens", "acceptance", "of plain"):
        table.add_column(name, justify="left" if name == "task" else "right")
    for task, temperature, length, accepted, speed in PUBLISHED:
        table.add_row(task, str(temperature), str(length), f"{accepted:.2f}", f"{speed:.1f}")
    return table


def ratio_over_off(found: Found, variant: Variant, of: Callable[[Text], float] = per_second) -> Ratio:
    """A way over plain decoding, of all texts."""
    return found.ratio(variant.name, OFF.name, of, None) or ratio_of([0.0])


def model_share(texts: Sequence[Text]) -> float:
    """Accepted of all verified draft tokens of the draft model or head, those after a rejected one among them."""
    counts = [text.statistics for text in texts]
    proposed = sum(each.num_model_draft_tokens + each.num_heads_draft_tokens for each in counts)
    accepted = sum(each.num_model_accepted_tokens + each.num_heads_accepted_tokens for each in counts)
    return accepted / max(1, proposed)


def acceptance(texts: Sequence[Text]) -> float:
    """Accepted of the draft tokens, of all proposers, whose predecessors were accepted: the paper's alpha."""
    return sum(text.tested[0] for text in texts) / max(1, sum(text.tested[1] for text in texts))


def rate(texts: Sequence[Text]) -> float:
    """Tokens per second of all texts together; one of a single token has none."""
    timed = [text for text in texts if text.tokens_per_s]
    return sum(len(text.token_ids) for text in timed) / sum(len(text.token_ids) / text.tokens_per_s for text in timed)


def bars_of(found: dict[Cell, Found], pair: Pair) -> list[Bar]:
    """Those of the chat pair: over plain decoding, or of all proposers over the best one alone."""
    bars = []
    for cell, own in found.items():
        where = f"{cell[0]}, RTT {cell[1]:g} ms"
        if ALONE[0] in pair.variants:
            over = {one.name: own.ratio(AUTO.name, one.name, per_second, None) or ratio_of([0.0]) for one in ALONE}
            best = min(over, key=lambda name: over[name].median)
            bars.append(Bar(f"chat pair, all proposers / {best} alone, {where}", ALONE_BAR, over[best].median))
        else:
            name = f"chat pair, auto / off, {where}"
            bars.append(Bar(name, RATE_BARS[cell], ratio_over_off(own, AUTO).median))
    return bars


def parser() -> argparse.ArgumentParser:
    """The command's flags."""
    flags = argparse.ArgumentParser(prog="python -m bench.pair", description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--target", type=Path, help="folder of the target (the chat model)")
    flags.add_argument("--draft", type=Path, help="folder of its draft (the chat model's)")
    flags.add_argument(
        "--heads", type=Path, help="folder of an EAGLE-3 head on the target; chat pair: beside --draft too"
    )
    flags.add_argument("--prompts", type=Path, help="prompts of a given pair: one a line, or .jsonl with `prompt`")
    flags.add_argument("--prompt-count", type=int, default=0, help="first prompts; 0: all (%(default)s)")
    flags.add_argument("--draft-tokens", type=int, default=7, help="of a round of a given pair (%(default)s)")
    flags.add_argument("--per-class", type=int, default=2, help="questions of every class (%(default)s)")
    flags.add_argument("--tokens", type=int, default=64, help="most tokens of an answer (%(default)s)")
    flags.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(flags)
    return flags


def main() -> int:
    asked = parser().parse_args()
    is_given = asked.target is not None
    console = Console(width=150)
    try:
        pair = pair_of(asked)
        head = {"heads": str(pair.heads)} if pair.heads else None
        with placed(pair.target, "bfloat16", "auto", draft_model=pair.draft or DRAFT_MODEL, target=head) as place:
            hardware = description(place)
            found = {cell: texts_of(place, cell, pair, asked.tokens) for cell in pair.cells}
    except SpecdecError as error:
        print(f"pair: {error}", file=sys.stderr)
        return 1
    console.print(table_of(found, pair))
    steps: list[StackSteps] = []
    if pair.has_encoder and pair.draft:
        steps = [measure_stacks(folder, dtype) for folder, dtype in ((pair.target, "bfloat16"), (pair.draft, "auto"))]
        console.print(stack_table(steps), published_table())
    bars = [] if is_given else bars_of(found, pair)
    asked.out.mkdir(parents=True, exist_ok=True)
    written = {"hardware": hardware, "bars": as_json(bars), "steps": [asdict(own) for own in steps]}
    for (rule, rtt_ms), own in found.items():
        for variant in pair.variants:
            texts = list(own.texts[variant.name].values())
            facts = {"acceptance": acceptance(texts), "whole": asdict(ratio_over_off(own, variant, whole_per_second))}
            written[f"{variant.name}, {rule}, RTT {rtt_ms:g} ms"] = asdict(ratio_over_off(own, variant)) | facts
    name = f"pair-{pair.target.name}.json" if is_given else "pair.json"
    (asked.out / name).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return conclude(bars, console, asked.check) if bars else 0


if __name__ == "__main__":
    sys.exit(main())
