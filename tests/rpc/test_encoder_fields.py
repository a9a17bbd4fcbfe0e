"""Fields about encoder-decoder models in messages: values survive the wire, absent ones have their documented meaning,
and what contradicts itself or its model is refused by field, value and limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdec.client.request import make_request
from specdec.errors import InvalidRequest
from specdec.protocol.items import Open
from specdec.protocol.request import GenerationRequest
from specdec.protocol.types import Description, ResolvedSamplingParams, Rule
from specdec.rpc.convert import description_from_message, description_to_message
from specdec.rpc.convert_generate import request_from_message
from specdec.rpc.convert_items import item_from_message, item_to_bytes
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb

DECODER = Description("digest", "print", "name", 9, 40, (1,), "float32", "cpu", "torch")
PAIR = replace(DECODER, encoder_positions_max=16, beginning_token_ids=(3, 8))


def test_values_come_back() -> None:
    """Claim: the kind of a model, and the length of an input, survive the wire to target and draft; of a decoder alone
    they are absent. Conclusive: every field has a value of its own."""
    for description in (DECODER, PAIR):
        assert description_from_message(description_to_message(description)) == description
    assert (PAIR.has_encoder, PAIR.kind) == (True, "an encoder-decoder model")
    assert (DECODER.has_encoder, DECODER.kind) == (False, "a decoder alone")
    for length in (0, 5):
        params = ResolvedSamplingParams(Rule.GREEDY, 1, 7, temperature=0.0, encoder_length=length)
        opened = Open(1, 2, params, 10, 9)
        for kind in (target_pb.VerifyRequest, draft_pb.DraftRequest):
            message = kind.FromString(item_to_bytes(kind, opened))
            assert item_from_message(message.items[0]) == opened
            assert message.items[0].open.params.encoder_length == length


@pytest.mark.parametrize("length", [-1, 7, 8])
def test_an_input_leaves_a_token_of_the_prompt(length: int) -> None:
    """Claim: an input is at least one token shorter than its prompt, as an output begins with one."""
    with pytest.raises(InvalidRequest, match=f"encoder_length is {length}; it must be at least 0 and below"):
        ResolvedSamplingParams(Rule.GREEDY, 1, 7, temperature=0.0, encoder_length=length)


@pytest.mark.parametrize(
    "own, field",
    [
        ({"encoder_positions_max": 41}, "encoder_positions_max"),
        ({"beginning_token_ids": (9,)}, "beginning_token_ids[0]"),
        ({"beginning_token_ids": ()}, "beginning_token_ids"),
        ({"encoder_positions_max": 0}, "beginning_token_ids"),
        ({"beginning_token_ids": (3,) * 65}, "beginning_token_ids"),
    ],
    ids=str,
)
def test_a_description_is_of_one_kind(own: dict[str, Any], field: str) -> None:
    """Claim: a replica whose encoder has more positions than a session, or a beginning without an encoder, or the
    reverse, or with a token that it does not have, is refused by field."""
    with pytest.raises(InvalidRequest) as refused:
        description_from_message(description_to_message(replace(PAIR, **own)))
    assert refused.value.field == field


def test_a_beginning_is_text_or_token_ids() -> None:
    """Claim: a request's beginning is read as it was made, absent is neither; an empty one is refused by name."""
    for given, text, token_ids in (("ab", "ab", None), ((4, 5), None, (4, 5)), ((), None, None)):
        read = request_from_message(make_request((1, 2), decoder_prompt=given))
        assert (read.decoder_text, read.decoder_token_ids) == (text, token_ids)
        assert read.has_decoder_prompt == bool(given)
    empty: dict[str, dict[str, Any]] = {
        "decoder_prompt": {},
        "decoder_prompt.text": {"text": ""},
        "decoder_prompt.token_ids": {"token_ids": {}},
    }
    for field, content in empty.items():
        with pytest.raises(InvalidRequest) as refused:
            request_from_message(pb.GenerateRequest(text="x", decoder_prompt=content))
        assert refused.value.field == field
    many = pb.GenerateRequest(text="x", decoder_prompt={"token_ids": {"ids": [1] * 41}})
    with pytest.raises(InvalidRequest, match="decoder_prompt.token_ids is 41; it must be at most 40"):
        request_from_message(many, positions_max=40)


@pytest.mark.parametrize(
    "target, own, sentence",
    [
        (PAIR, {}, "prompt.token_ids is '17 tokens'; it must be at most 16 tokens, the positions of the encoder"),
        (DECODER, {"decoder_text": "x"}, "decoder_prompt is 'set'; it must be absent: the model is a decoder alone"),
        (DECODER, {"decoder_token_ids": (1,)}, "decoder_prompt is 'set'; it must be absent"),
    ],
    ids=["input", "text", "ids"],
)
def test_a_request_fits_the_kind_of_its_model(target: Description, own: dict[str, Any], sentence: str) -> None:
    """Claim: an input beyond the encoder's positions is refused, and a beginning for a decoder alone, by field, value
    and limit. Conclusive: the other kind takes the same request."""
    request = GenerationRequest(token_ids=(1,) * 17, **own)
    with pytest.raises(InvalidRequest, match=sentence):
        request.check_model(request.token_ids, target)
    other = DECODER if target is PAIR else replace(PAIR, encoder_positions_max=17)
    request.check_model(request.token_ids, other)
