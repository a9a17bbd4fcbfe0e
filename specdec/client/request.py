"""Requests to a coordinator, from plain values.

The server, which has the model, checks ranges, and its error names field and limit. Only values that do not fit the
message are refused here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import ConfigError
from specdec.v1 import coordinator_service_pb2 as coordinator_pb
from specdec.v1 import types_pb2 as types_pb

Request = coordinator_pb.GenerateRequest
SAMPLING = coordinator_pb.SamplingParams.DESCRIPTOR.fields_by_name
FIELDS = {  # descriptors of all that `make_request` takes by name, in their order
    field.name: field
    for message in (coordinator_pb.SamplingParams, coordinator_pb.SpeculativePolicy)
    for field in message.DESCRIPTOR.fields
}
PREFIXES = {  # of the names that enums have on the wire, such as RULE_ for GREEDY
    name: own.enum_type.values_by_number[0].name.removesuffix("UNSPECIFIED")
    for name, own in FIELDS.items()
    if own.enum_type
}
WORDS = {  # that stand for them
    name: tuple(own.name.removeprefix(prefix).lower() for own in FIELDS[name].enum_type.values if own.number)
    for name, prefix in PREFIXES.items()
}


def make_request(
    prompt: str | Sequence[int],
    resumed: Sequence[int] = (),
    prediction: str | Sequence[int] = (),
    label: str = "",
    cache_salt: str = "",
    decoder_prompt: str | Sequence[int] = (),
    **fields: Any,
) -> Request:
    """Returns the message. `prompt`, `prediction` and `decoder_prompt` are texts or token ids, the last two absent
    without any; `resumed` output token ids of an earlier stream. `fields` are those of SamplingParams and
    SpeculativePolicy; None leaves one absent. `logit_bias` is pairs or a mapping; rule, policy and proposers are words
    such as "greedy", or names of the wire; `grammar` is a mapping with the names of the message Grammar, a schema as
    text or as its value, `choice` a list of texts. Raises ConfigError for a value that does not fit."""
    biases = fields.pop("logit_bias", None) or ()
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    if fields.get("grammar") is not None:
        fields["grammar"] = _grammar(**fields["grammar"])
    for name, prefix in PREFIXES.items():
        given = fields.get(name)
        fields[name] = (
            [_named(one, prefix) for one in given or ()] if FIELDS[name].is_repeated else _named(given, prefix)
        )
    try:
        request = Request(
            sampling=coordinator_pb.SamplingParams(
                logit_bias=[types_pb.LogitBias(token_id=token_id, bias=bias) for token_id, bias in pairs],
                **{name: fields.pop(name) for name in SAMPLING if name in fields},
            ),
            speculative=coordinator_pb.SpeculativePolicy(**fields),
            label=label,
            cache_salt=cache_salt,
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        for own, given in ((request.prediction, prediction), (request.decoder_prompt, decoder_prompt)):
            if isinstance(given, str):
                own.text = given
            elif given:
                own.token_ids.ids.extend(given)
        if resumed:
            request.resume.output_token_ids.extend(resumed)
    except (UnicodeEncodeError, ValueError) as error:
        raise ConfigError(f"the request cannot be sent, its texts must be UTF-8: {error}") from error
    return request


def _grammar(json_schema: Any = None, choice: Sequence[str] | None = None, **others: Any) -> coordinator_pb.Grammar:
    """Returns the message of a grammar. Raises ValueError for a schema that is no JSON."""
    if json_schema is not None and not isinstance(json_schema, str):
        json_schema = json.dumps(json_schema, ensure_ascii=False)
    texts = None if choice is None else coordinator_pb.Choice(texts=choice)
    return coordinator_pb.Grammar(json_schema=json_schema, choice=texts, **others)


def _named(value: Any, prefix: str) -> Any:
    """Returns the name on the wire of a word; other values unchanged."""
    return prefix + value.upper().removeprefix(prefix) if isinstance(value, str) else value
