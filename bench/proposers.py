"""`python -m bench.proposers`: trees beside chains, and the proposers that need no draft model.

`trees`: tokens per target step and per second of trees and chains on the deepened target, by rule, and `auto` with and
without trees. `chat`: the chat model without a draft service: prompts whose answers copy, chosen so, beside
`transformers`' own prompt lookup at its best setting, prose, and predicted outputs that are right or wrong. Variants
take turns prompt by prompt. Each generation has a cache salt of its own, so that no store holds its text; texts that
end in a cycle are counted apart.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from rich.console import Console
from rich.progress import track
from rich.table import Table

from specdec.bench import prompt_lookup
from specdec.bench.bars import Bar, add_check_flag, as_json, conclude
from specdec.bench.deepened import write_deepened
from specdec.bench.harness import DRAFT_MODEL, heldout_prompts, running
from specdec.bench.pipeline.measurements import Ratio, ratio_of
from specdec.bench.pipeline.samples import ends_in_cycle
from specdec.bench.pipeline.variants import CHAIN, OFF, RULES_DEFAULT, WAIT_MS, Variant, request_of, synchronous
from specdec.bench.prompts import Prompt, copying_prompts, copying_prompts_for_tuning, prose_prompts
from specdec.chat.template import ChatTemplate
from specdec.cli.processes import start
from specdec.coordinator.tokenizer import Tokenizer
from specdec.engine.chat_model import chat_model
from specdec.errors import SpecdecError
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc

TIMEOUT_S = 600.0
LOCAL = ("PROPOSER_NGRAM", "PROPOSER_SUFFIX")
AUTO = Variant("auto", None)
LOCAL_AUTO = Variant("no draft", None, proposers=LOCAL)
PREDICTED = Variant("predicted", None, proposers=("PROPOSER_PREDICTION",))
COMBS = {4: ((2, 1), (3, 1)), 8: ((3, 2), (4, 2), (6, 1)), 16: ((4, 3), (6, 3))}  # rows: depths and siblings
ROWS = tuple(COMBS)
TREE_BARS = {"GREEDY": (16, 1.08), "COUPLED": (8, 1.12), "REJECTION": (8, 1.05)}
WRONG_EVERY = 10  # of a prediction with 90 % right


@dataclass(frozen=True, slots=True)
class Text:
    """One generation: tokens per second after the first, tokens per round, and its token ids."""

    tokens_per_s: float
    tokens_per_round: float
    token_ids: tuple[int, ...]
    statistics: pb.Statistics

    @property
    def is_cyclic(self) -> bool:
        return ends_in_cycle(self.token_ids)


@dataclass(slots=True)
class Found:
    """The texts of variants by prompt, in turns."""

    texts: dict[str, dict[str, Text]] = field(default_factory=dict)

    def add(self, variant: str, prompt: str, text: Text) -> None:
        self.texts.setdefault(variant, {})[prompt] = text

    def ratio(self, variant: str, over: str, of: Callable[[Text], float], cyclic: bool | None = False) -> Ratio | None:
        """A variant over another, prompt by prompt; `cyclic` None: all texts, else by whether plain text cycles."""
        both = self.texts[variant], self.texts[over]
        plain = self.texts.get(OFF.name, both[1])
        names = [name for name in both[0] if cyclic is None or plain[name].is_cyclic is cyclic]
        values = [of(both[0][name]) / of(both[1][name]) for name in names]
        return ratio_of(values) if values else None


def per_second(text: Text) -> float:
    return text.tokens_per_s


def per_round(text: Text) -> float:
    return text.tokens_per_round


def generate(stub: pb_grpc.CoordinatorServiceStub, request: pb.GenerateRequest) -> Text:
    """Runs one generation, in a salt of its own. Raises grpc.RpcError."""
    request.cache_salt = uuid.uuid4().hex
    token_ids: list[int] = []
    finished = pb.Finished()
    for response in stub.Generate(request, timeout=TIMEOUT_S):
        if response.HasField("delta"):
            token_ids += response.delta.token_ids
        elif response.HasField("finished"):
            finished = response.finished
    counts, time = finished.statistics, finished.statistics.time
    seconds = time.total_s - time.time_to_first_token_s
    rate = (len(token_ids) - 1) / seconds if seconds > 0 else 0.0
    return Text(rate, (len(token_ids) - 1) / max(1, counts.rounds - 1), tuple(token_ids), counts)


@contextmanager
def served(folder: Path, draft: Path | None, *coordinators: dict[str, Any]) -> Iterator[list[Any]]:
    """Yields a stub for each coordinator; all share one target with one thread and one draft."""
    with running(folder, draft, {"speculation_policy": "auto"}, threads=1, dtype="bfloat16") as services:
        stubs = [pb_grpc.CoordinatorServiceStub(grpc.insecure_channel(services.coordinator.address))]
        children = []
        for own in coordinators:
            children.append(start("coordinator", services.settings.model_copy(update=own)))
            children[-1].wait_ready()
            stubs.append(pb_grpc.CoordinatorServiceStub(grpc.insecure_channel(children[-1].address)))
        try:
            yield stubs
        finally:
            for child in children:
                child.stop()


def tree_variants(rows: int) -> list[Variant]:
    """Trees of at most `rows` tokens: a chain of some depth with siblings, waited for as synchronous rounds are; and a
    tree that streams."""
    combs = [
        Variant(f"depth {depth}, {siblings} siblings, {rows} rows", rows, depth, 1, WAIT_MS, siblings)
        for depth, siblings in COMBS[rows]
    ]
    return [*combs, Variant(f"streamed tree, {rows} rows", rows, min(rows, 12), 4, siblings=2)]


def measure_trees(asked: argparse.Namespace, console: Console) -> tuple[list[Table], list[Bar], dict[str, Any]]:
    """Trees and chains on the deepened target, by rule."""
    prompts = list(heldout_prompts().items())[: asked.prompts]
    chains = [CHAIN, *map(synchronous, (1, 2, 3, 4, 6, 8))]
    chains_only = {"draft_siblings_max": 0}
    tables, bars, written = [], [], {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_deepened(Path(scratch))
        with served(folder, DRAFT_MODEL, chains_only, {}) as (fixed, plain_auto, tree_auto):
            for rule in [RULES_DEFAULT[number] for number in asked.rules]:
                found = Found()
                ways = [(OFF, fixed), *((one, fixed) for one in chains)]
                ways += [(one, fixed) for rows in ROWS for one in tree_variants(rows)]
                ways += [
                    (replace(AUTO, name="auto, chains"), plain_auto),
                    (replace(AUTO, name="auto, trees"), tree_auto),
                ]
                for name, prompt in track([prompts[0], *prompts], rule, console=Console(stderr=True)):
                    for variant, stub in ways:
                        found.add(
                            variant.name, str(name), generate(stub, request_of(variant, rule, prompt, asked.tokens))
                        )
                tables.append(tree_table(rule, found, [variant for variant, _ in ways]))
                bars += tree_bars(rule, found, chains)
                written[rule] = {
                    name: {prompt: [one.tokens_per_s, one.tokens_per_round] for prompt, one in own.items()}
                    for name, own in found.texts.items()
                }
                console.print(tables[-1])
    return tables, bars, written


def median_of(found: Found, variant: str, of: Callable[[Text], float]) -> float:
    return ratio_of([of(text) for text in found.texts[variant].values()]).median


def tree_table(rule: str, found: Found, variants: Sequence[Variant]) -> Table:
    table = Table(title=f"{rule}: medians over {len(found.texts[OFF.name])} prompts")
    for name in ("", "tokens a target step", "tokens/s", "tokens/s over off [95 %]"):
        table.add_column(name, justify="left" if not name else "right")
    for variant in variants:
        medians = median_of(found, variant.name, per_round), median_of(found, variant.name, per_second)
        ratio = found.ratio(variant.name, OFF.name, per_second, None)
        table.add_row(variant.name, f"{medians[0]:.2f}", f"{medians[1]:.1f}", str(ratio))
    return table


def tree_bars(rule: str, found: Found, chains: Sequence[Variant]) -> list[Bar]:
    """Tokens per target step of trees over the best chain of no more rows, and tokens/s of auto with trees."""
    bars = []
    rows, bound = TREE_BARS[rule.split(",")[0]]
    for count in ROWS:
        own = [chain.name for chain in chains if (chain.draft_length or 0) <= count]
        best = max(own, key=lambda name: median_of(found, name, per_round))
        tree = max((one.name for one in tree_variants(count)), key=lambda name: median_of(found, name, per_round))
        ratio = found.ratio(tree, best, per_round, None)
        claim = f"{rule}, {count} rows: tokens a target step, {tree} / best chain ({best})"
        bars.append(Bar(claim, bound if count == rows else 1.0, None if ratio is None else ratio.median, str(ratio)))
    ratio = found.ratio("auto, trees", "auto, chains", per_second, None)
    goal = 1.08 if rule.startswith("COUPLED") else 0.98
    bars.append(
        Bar(f"{rule}: tokens/s, auto with trees / without", goal, None if ratio is None else ratio.median, str(ratio))
    )
    return bars


def chat_request(template: ChatTemplate, prompt: Prompt, variant: Variant, tokens: int) -> pb.GenerateRequest:
    """The answer to one message, greedy, to its end or to `tokens` tokens."""
    text = template.render([{"role": "user", "content": prompt.prompt}])
    request = request_of(variant, RULES_DEFAULT[0], text, tokens)
    request.sampling.ignore_eos = False
    return request


def measure_chat(asked: argparse.Namespace, console: Console) -> tuple[list[Table], list[Bar], dict[str, Any]]:
    """The chat model with the coordinator's own proposers only, beside prompt lookup of `transformers`."""
    folder = chat_model()
    template = ChatTemplate.read(folder)
    assert template is not None
    copying, prose = copying_prompts()[: asked.prompts], prose_prompts()[: max(4, asked.prompts // 2)]
    library, found, peer = prompt_lookup.load(folder, "bfloat16"), Found(), Found()
    tuning = [template_ids(template, prompt, folder) for prompt in copying_prompts_for_tuning()]
    best = prompt_lookup.best_num_tokens(library, tuning[: asked.tuning_prompts], min(asked.tokens, 64))
    with served(folder, None) as (stub,):
        for prompt in track([copying[0], *copying, *prose], "chat", console=Console(stderr=True)):
            for variant in (OFF, LOCAL_AUTO):
                found.add(
                    variant.name, prompt.name, generate(stub, chat_request(template, prompt, variant, asked.tokens))
                )
            answer = found.texts[OFF.name][prompt.name].token_ids
            for name, tokens in (("90 % right", spoiled(answer, WRONG_EVERY)), ("wholly wrong", spoiled(answer, 1))):
                request = chat_request(template, prompt, PREDICTED, asked.tokens)
                request.prediction.token_ids.ids.extend(tokens)
                found.add(name, prompt.name, generate(stub, request))
            ids = template_ids(template, prompt, folder)
            for name, count in (("generate", None), ("prompt lookup", best)):
                made = prompt_lookup.generate(library, ids, asked.tokens, count)
                peer.add(
                    name,
                    prompt.name,
                    Text(made.tokens_per_s, len(made.token_ids) / made.passes, made.token_ids, pb.Statistics()),
                )
    return chat_results(found, peer, copying, prose, best)


def spoiled(token_ids: Sequence[int], every: int) -> list[int]:
    """The text with every `every`-th token replaced by another."""
    return [token_id ^ 1 if index % every == every - 1 else token_id for index, token_id in enumerate(token_ids)] or [1]


def template_ids(template: ChatTemplate, prompt: Prompt, folder: Path) -> list[int]:
    """The token ids that the coordinator makes of a message."""
    text = template.render([{"role": "user", "content": prompt.prompt}])
    return list(Tokenizer(str(folder)).encode(text, 1 << 16))


def chat_results(
    found: Found, peer: Found, copying: Sequence[Prompt], prose: Sequence[Prompt], best: int
) -> tuple[list[Table], list[Bar], dict[str, Any]]:
    table = Table(title=f"the chat model without a draft, greedy; prompt lookup of {best} tokens")
    for name in ("prompts", "", "tokens a step", "tokens/s", "over plain [95 %]", "of texts that cycle"):
        table.add_column(name, justify="left" if name in ("prompts", "") else "right")
    bars: list[Bar] = []
    bounds = {
        ("copying", LOCAL_AUTO.name): 1.8,
        ("prose", LOCAL_AUTO.name): 0.98,
        ("copying", "90 % right"): 2.5,
        ("copying", "wholly wrong"): 0.98,
    }
    for kind, prompts in (("copying", copying), ("prose", prose)):
        names = [prompt.name for prompt in prompts]
        for own, plain in ((found, OFF.name), (peer, "generate")):
            part = Found({variant: {name: texts[name] for name in names} for variant, texts in own.texts.items()})
            for variant in part.texts:
                ratios = [part.ratio(variant, plain, per_second, cyclic) for cyclic in (False, True)]
                shown = [str(ratio) if ratio else "" for ratio in ratios]
                medians = median_of(part, variant, per_round), median_of(part, variant, per_second)
                table.add_row(kind, variant, f"{medians[0]:.2f}", f"{medians[1]:.1f}", *shown)
                if bound := bounds.get((kind, variant)):
                    ratio = ratios[0]
                    reached = None if ratio is None else ratio.median
                    bars.append(Bar(f"{kind}: {variant} / off", bound, reached, shown[0]))
        if kind == "copying":
            sides = {"ours": found.texts[LOCAL_AUTO.name], "theirs": peer.texts["prompt lookup"]}
            both = Found({side: {name: texts[name] for name in names} for side, texts in sides.items()})
            ratio = both.ratio("ours", "theirs", per_second, None)
            bars.append(
                Bar(
                    "copying: no draft / prompt lookup of transformers",
                    1.0,
                    None if ratio is None else ratio.median,
                    str(ratio),
                )
            )
    written = {
        name: {prompt: [text.tokens_per_s, text.tokens_per_round] for prompt, text in texts.items()}
        for name, texts in (found.texts | peer.texts).items()
    }
    return [table], bars, written


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.proposers", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=["trees", "chat", []], default=["trees", "chat"], help="(both)")
    parser.add_argument("--prompts", type=int, default=40, help="prompts of each kind (%(default)s)")
    parser.add_argument(
        "--rules", type=int, nargs="+", default=[0, 1, 2], help="of trees, as bench.pipeline lists them"
    )
    parser.add_argument("--tuning-prompts", type=int, default=8, help="for prompt lookup's setting (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of a generation (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder of the JSON (%(default)s)")
    add_check_flag(parser)
    return parser.parse_args()


def main() -> int:
    asked = options()
    console = Console(width=150)
    measured = {"trees": measure_trees, "chat": measure_chat}
    bars: list[Bar] = []
    written: dict[str, Any] = {"asked": vars(asked) | {"out": ""}}
    try:
        for part in asked.parts:
            tables, own, numbers = measured[part](asked, console)
            bars += own
            written[part] = numbers
            for table in tables if part == "chat" else ():
                console.print(table)
    except SpecdecError as error:
        print(f"proposers: {error}", file=sys.stderr)
        return 1
    asked.out.mkdir(parents=True, exist_ok=True)
    (asked.out / "proposers.json").write_text(json.dumps(written | {"bars": as_json(bars)}, indent=2) + "\n")
    return conclude(bars, console, asked.check)


if __name__ == "__main__":
    sys.exit(main())
