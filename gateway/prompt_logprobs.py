"""Prompts in answers: their log-probabilities in vLLM's form, and the prompt that `echo` puts before its answer.

They stay the messages that they came as until an answer is written: a prompt may have thousands of tokens, each with
the likeliest ones.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from specdec.gateway.errors import HttpError
from specdec.gateway.prompts import Prompts
from specdec.gateway.requests import ChatRequest, CompletionRequest, Generation
from specdec.v1 import types_pb2 as types_pb

LOGPROB_MIN = -9999.0  # stands for minus infinity, which JSON lacks
ENTRY_COUNT_MAX = 1 << 17  # log-probabilities of all prompts of a request: some 40 MB while the answer is written


class Given(NamedTuple):
    """A prompt as it was given: its tokens, and its text where the answer repeats it."""

    token_ids: list[int]
    text: str = ""


class Scored(NamedTuple):
    """A prompt token: its log-probability and rank, and the likeliest tokens with theirs, likeliest first."""

    token_id: int
    logprob: float
    rank: int
    likeliest: list[tuple[int, float]]


def echoes(body: Generation) -> bool:
    """Whether the answer begins with the prompt."""
    return isinstance(body, CompletionRequest) and body.echo


def check_encoder(body: Generation) -> None:
    """Raises HttpError for a body to an encoder-decoder model that asks for more of its prompt than an answer."""
    for name, is_asked in (("echo", echoes(body)), ("prompt_logprobs", body.prompt_logprobs is not None)):
        if is_asked:
            sentence = f"{name}: the model is an encoder-decoder model, whose answer does not follow its prompt"
            raise HttpError(400, sentence, "invalid_value", name)


def count_of(body: Generation) -> int | None:
    """Returns `sampling.prompt_logprobs`: what the field asks for, and what `echo` with `logprobs` does."""
    echoed = body.logprobs if isinstance(body, CompletionRequest) and body.echo else None
    return max((own for own in (body.prompt_logprobs, echoed) if own is not None), default=None)


async def given_prompts(
    body: ChatRequest | CompletionRequest, given: Sequence[str | list[int]], prompts: Prompts, positions_max: int
) -> list[Given]:
    """Returns the prompts with their tokens, if the answer has anything of them. Raises HttpError for more
    log-probabilities than an answer may have."""
    count = count_of(body)
    if count is None and not (body.return_token_ids or echoes(body)):
        return []
    made = []
    for prompt in given:
        is_text = isinstance(prompt, str)
        ids = await prompts.encode(prompt, positions_max) if isinstance(prompt, str) else prompt
        text = "" if not echoes(body) else prompt if is_text else await prompts.decode(ids)
        made.append(Given(ids, str(text)))
    entry_count = 0 if count is None else (1 + count) * sum(len(own.token_ids) for own in made)
    if entry_count > ENTRY_COUNT_MAX:
        name = "logprobs" if body.prompt_logprobs is None else "prompt_logprobs"
        sentence = f"{name}: the prompts have {entry_count} log-probabilities; at most {ENTRY_COUNT_MAX} are answered"
        raise HttpError(400, sentence, "invalid_value", name)
    return made


def scored_tokens(parts: Sequence[types_pb.PromptLogprobs], top_count: int) -> Iterator[Scored]:
    """Yields a prompt's tokens but the first, each with `top_count` likeliest."""
    for part in parts:
        width = len(part.top_token_ids) // len(part.token_ids)
        for at, (token_id, logprob, rank) in enumerate(zip(part.token_ids, part.logprobs, part.ranks, strict=True)):
            own = slice(at * width, at * width + min(top_count, width))
            yield Scored(token_id, logprob, rank, list(zip(part.top_token_ids[own], part.top_logprobs[own])))


def as_json(parts: Sequence[types_pb.PromptLogprobs], top_count: int, prompts: Prompts) -> str:
    """Returns log-probabilities of a prompt as vLLM has them, in JSON: null for the first token, for each other one a
    dictionary by token id of its own and the likeliest."""

    def entry(token_id: int, logprob: float, rank: int) -> str:
        own = {"logprob": max(LOGPROB_MIN, logprob), "rank": rank, "decoded_token": prompts.piece(token_id)[0]}
        return f'"{token_id}":{json.dumps(own, ensure_ascii=False, separators=(",", ":"))}'

    def line(own: Scored) -> str:
        likeliest = [(*pair, rank) for rank, pair in enumerate(own.likeliest, 1) if pair[0] != own.token_id]
        return "{" + ",".join(entry(*one) for one in ((own.token_id, own.logprob, own.rank), *likeliest)) + "}"

    return "[" + ",".join(("null", *map(line, scored_tokens(parts, top_count)))) + "]"


def echoed_entries(
    given: Given, parts: Sequence[types_pb.PromptLogprobs], top_count: int, prompts: Prompts, shows_ids: bool
) -> list[dict[str, Any]]:
    """Returns an entry for each token of an echoed prompt, as of its answer; the first has no log-probability."""

    def token(token_id: int, logprob: float | None) -> dict[str, Any]:
        text = f"token_id:{token_id}" if shows_ids else prompts.piece(token_id)[0]
        return {"token": text, "logprob": None if logprob is None else max(LOGPROB_MIN, logprob)}

    entries = [token(given.token_ids[0], None) | {"top_logprobs": []}]
    for own in scored_tokens(parts, top_count):
        likeliest = [token(*pair) for pair in own.likeliest]
        entries.append(token(own.token_id, own.logprob) | {"top_logprobs": likeliest})
    decoder, end = codecs.getincrementaldecoder("utf-8")("replace"), 0
    for entry, token_id in zip(entries, given.token_ids, strict=True):
        entry["text_offset"] = min(end, len(given.text))
        end += len(decoder.decode(prompts.piece(token_id)[1]))
    return entries
