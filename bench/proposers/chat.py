"""The chat model without a draft service: prompts whose answers copy, prose, predicted outputs that are right or wrong,
and prompt lookup of `transformers` at its best setting."""

from __future__ import annotations

import argparse
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench import prompt_lookup
from bench.bars import Bar
from bench.pipeline.variants import OFF, RULES_DEFAULT, Variant, request_of
from bench.prompts import Prompt, copying_prompts, copying_prompts_for_tuning, prose_prompts
from bench.proposers.texts import Found, Text, generate, median_of, per_round, per_second, served
from specdec.chat.template import ChatTemplate
from specdec.folders import CHAT_MODEL
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.unpacked import write_unpacked

LOCAL = ("ngram", "suffix")
LOCAL_AUTO = Variant("no draft", None, proposers=LOCAL)
PREDICTED = Variant("predicted", None, proposers=("prediction",))
WARM = "no draft, asked before"
WRONG_EVERY = 10  # of a prediction with 90 % right


def chat_request(
    template: ChatTemplate, prompt: Prompt, variant: Variant, tokens: int, rule: str = RULES_DEFAULT[0]
) -> pb.GenerateRequest:
    """The answer to one message, to its end or to `tokens` tokens."""
    return request_of(variant, rule, template_ids(template, prompt), tokens, ignore_eos=False)


def measure_chat(asked: argparse.Namespace, console: Console) -> tuple[list[Table], list[Bar], dict[str, Any]]:
    """The chat model with the coordinator's own proposers only, beside prompt lookup of `transformers`: both
    multiply its weights in bfloat16."""
    with tempfile.TemporaryDirectory() as scratch:
        return measured(asked, write_unpacked(CHAT_MODEL, Path(scratch)))


def measured(asked: argparse.Namespace, folder: Path) -> tuple[list[Table], list[Bar], dict[str, Any]]:
    """As `measure_chat`, of a folder that `transformers` reads."""
    template = ChatTemplate.read(folder)
    assert template is not None
    copying, prose = copying_prompts()[: asked.prompts], prose_prompts()[: max(4, asked.prompts // 2)]
    library, found, peer = prompt_lookup.load(folder, "bfloat16"), Found(), Found()
    tuning = [list(template_ids(template, prompt)) for prompt in copying_prompts_for_tuning()]
    best = prompt_lookup.best_num_tokens(library, tuning[: asked.tuning_prompts], min(asked.tokens, 64))
    with served(folder, None) as (stub,):
        for prompt in track([copying[0], *copying, *prose], "chat", console=Console(stderr=True)):
            for variant in (OFF, LOCAL_AUTO):
                found.add(
                    variant.name, prompt.name, generate(stub, chat_request(template, prompt, variant, asked.tokens))
                )
            salt = uuid.uuid4().hex
            for _ in range(2):  # the second time its own text is in the store
                warm = generate(stub, chat_request(template, prompt, LOCAL_AUTO, asked.tokens), salt)
            found.add(WARM, prompt.name, warm)
            answers = found.texts[OFF.name]
            answer = answers[prompt.name].token_ids
            others = [text.token_ids for name, text in answers.items() if name != prompt.name]
            predictions = {"90 % right": spoiled(answer, WRONG_EVERY), "wholly wrong": spoiled(answer, 1)}
            predictions |= {"another answer": list(others[-1])} if others else {}  # not for the first prompt
            for name, tokens in predictions.items():
                request = chat_request(template, prompt, PREDICTED, asked.tokens)
                request.prediction.token_ids.ids.extend(tokens)
                found.add(name, prompt.name, generate(stub, request))
            ids = list(template_ids(template, prompt))
            for name, count in (("generate", None), ("prompt lookup", best)):
                made = prompt_lookup.generate(library, ids, asked.tokens, count)
                peer.add(
                    name,
                    prompt.name,
                    Text(made.tokens_per_s, made.tokens_per_pass, made.token_ids, pb.Statistics()),
                )
    return chat_results(found, peer, copying, prose, best)


def spoiled(token_ids: Sequence[int], every: int) -> list[int]:
    """The text with every `every`-th token replaced by another."""
    return [token_id ^ 1 if index % every == every - 1 else token_id for index, token_id in enumerate(token_ids)] or [1]


def template_ids(template: ChatTemplate, prompt: Prompt) -> tuple[int, ...]:
    """The token ids of a message as the only one of a conversation."""
    return template.encode([{"role": "user", "content": prompt.prompt}])


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
        ("copying", "another answer"): 0.98,
    }
    for kind, prompts in (("copying", copying), ("prose", prose)):
        names = [prompt.name for prompt in prompts]
        for own, plain in ((found, OFF.name), (peer, "generate")):
            part = own.of(names)
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
            both = Found({"ours": found.texts[LOCAL_AUTO.name], "theirs": peer.texts["prompt lookup"]}).of(names)
            ratio = both.ratio("ours", "theirs", per_second, False)
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
