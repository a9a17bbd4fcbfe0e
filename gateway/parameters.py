"""A request of HTTP as requests of gRPC: one for each prompt, by the names and limits of gRPC."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.client.request import Request, make_request
from specdec.gateway.errors import too_long
from specdec.gateway.fields import SAME_FORM
from specdec.gateway.prompt_logprobs import count_of
from specdec.gateway.prompts import Prompts
from specdec.gateway.requests import ChatRequest, CompletionRequest, Generation, Speculative

COMPLETION_TOKENS_DEFAULT = 16
SEED_MASK = (1 << 64) - 1


def salt_of(identity: str | None, cache_salt: str | None) -> str:
    """Returns the salt of cached prefixes: one key never finds those of another. Empty without key and salt."""
    if identity is None and cache_salt is None:
        return ""
    text = f"{identity or ''}\0{cache_salt or ''}"
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def logprob_count(body: Generation) -> int | None:
    """Returns `sampling.logprobs`."""
    if isinstance(body, ChatRequest):
        return (body.top_logprobs or 0) if body.logprobs else None
    assert isinstance(body, CompletionRequest)
    return body.logprobs


def make_requests(
    body: Generation,
    given: Sequence[str | Sequence[int]],
    prompts: Prompts,
    positions_max: int,
    salt: str,
    defaults: Mapping[str, Any],
    grammar: Mapping[str, Any] | None,
) -> list[Request]:
    """Returns the request of each prompt in `given`, whose answers have this grammar; `defaults`: sampling parameters
    where the body has none. Raises HttpError for token ids that do not fit the model, ConfigError for a value that does
    not fit its message."""
    fields = sampling_fields(body, prompts, defaults) | speculative_fields(body.speculative) | {"grammar": grammar}
    prediction = body.prediction.text if body.prediction else ()
    param = "messages" if isinstance(body, ChatRequest) else "prompt"
    beginning = body.decoder_prompt or () if isinstance(body, CompletionRequest) else ()
    made = []
    for prompt in given:
        most = body.output_count_max
        if not isinstance(prompt, str):
            left = positions_max - len(prompt)
            least = most or 1
            if left < least:
                raise too_long(positions_max, len(prompt), least, param)
            most = left if most is None and isinstance(body, ChatRequest) else most
        most = COMPLETION_TOKENS_DEFAULT if most is None else most
        made.append(make_request(prompt, (), prediction, "", salt, beginning, max_tokens=most, **fields))
    return made


def sampling_fields(body: Generation, prompts: Prompts, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of SamplingParams but `max_tokens`."""
    fields = {name: getattr(body, name) for name in SAME_FORM if getattr(body, name) is not None}
    if body.top_k is not None:
        fields["top_k"] = max(0, body.top_k)
    for name, value in defaults.items():
        fields.setdefault(name, value)
    special = [prompts.special_id(stop) for stop in body.stops]
    stop_ids = [*(body.stop_token_ids or ()), *(token_id for token_id in special if token_id is not None)]
    return fields | {
        "seed": None if body.seed is None else body.seed & SEED_MASK,
        "n": body.n if body.n > 1 else None,
        "stop": body.stops,
        "stop_token_ids": list(dict.fromkeys(stop_ids)),
        "bad_words": body.bad_words or (),
        "allowed_token_ids": body.allowed_token_ids or (),
        "logit_bias": {int(key): bias for key, bias in (body.logit_bias or {}).items()},
        "logprobs": logprob_count(body),
        "prompt_logprobs": count_of(body),
    }


def speculative_fields(speculative: Speculative) -> dict[str, Any]:
    """Returns the fields of SpeculativePolicy."""
    fields = speculative.model_dump(exclude={"statistics", "rounds"}) | {"report_rounds": speculative.rounds or None}
    return {name: value for name, value in fields.items() if value is not None}
