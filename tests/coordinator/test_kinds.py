"""Models of two kinds at a coordinator: the prompt of each, its key, and drafts of another kind. No sockets."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from specdec.config import CoordinatorSettings
from specdec.coordinator.service import Coordinator, Prompted
from specdec.coordinator.tokenizer import Tokenizer
from specdec.errors import InvalidRequest
from specdec.folders import EMBEDDED_MODELS
from specdec.protocol.request import GenerationRequest
from specdec.protocol.types import Description
from specdec.telemetry.tracing import Tracing
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.fleets import MODEL, fleet_of

SETTINGS = CoordinatorSettings(target=("localhost:1",), draft=("localhost:2",), tokenizer="none")
PAIR = replace(MODEL, encoder_positions_max=50, beginning_token_ids=(3, 5))
LARGE = replace(PAIR, vocabulary_size=4096)
TOKENIZER = str(EMBEDDED_MODELS / "target")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(TOKENIZER)


@pytest.fixture
def read(tokenizer: Tokenizer, tmp_path: Path) -> Any:
    """The coordinator's reading of a request to a model."""
    return Coordinator(SETTINGS, tokenizer, Tracing(), lambda: None)._read


@pytest.mark.parametrize(
    "beginning, expected",
    [({}, (3, 5)), ({"token_ids": {"ids": [6, 2]}}, (6, 2)), ({"text": "return x"}, None)],
    ids=["the model's", "token ids", "text"],
)
def test_a_prompt_is_input_and_beginning(
    read: Any, tokenizer: Tokenizer, beginning: dict[str, Any], expected: tuple[int, ...] | None
) -> None:
    """Claim: the tokens of a prompt are those of the input, then the model's beginning, the client's token ids in its
    place, or its text behind it; the input's length is told. Of a decoder alone the same request is the prompt as it
    is, and a beginning is refused."""
    message = pb.GenerateRequest(text="def f(x):", decoder_prompt=beginning or None)
    found: Prompted = read(message, LARGE)
    own_input = tokenizer.encode("def f(x):", 100)
    words = tokenizer.encode("return x", 100, "decoder_prompt.text")
    assert found.prompt == (*own_input, *(expected or (3, 5, *words)))
    assert found.encoder_length == len(own_input)
    decoder = replace(LARGE, encoder_positions_max=0, beginning_token_ids=())
    if beginning:
        with pytest.raises(InvalidRequest, match="decoder_prompt is 'set'"):
            read(message, decoder)
    else:
        plain = read(message, decoder)
        assert (plain.prompt, plain.encoder_length) == (own_input, 0)


def test_the_output_continues_the_beginning_alone(read: Any, tokenizer: Tokenizer) -> None:
    """Claim: the text of an output is that which follows its beginning: what an input ends with changes no character.
    Conclusive: an input that ends inside a character, whose last bytes the output's first token would complete."""
    character = tokenizer.encode("é", 100, "decoder_prompt.text")
    assert len(character) > 1 or not tokenizer.joins_bytes
    message = pb.GenerateRequest(token_ids={"ids": character[:1]}, sampling={"max_tokens": 4})
    for target, is_same in ((LARGE, False), (replace(LARGE, encoder_positions_max=0, beginning_token_ids=()), True)):
        (output,) = read(message, target).outputs
        text = "".join(output.append((*character[1:], *tokenizer.encode("x", 100, "decoder_prompt.text"))).texts)
        assert ("é" in text) == is_same or len(character) == 1


def test_what_does_not_fit_is_refused_by_name(read: Any) -> None:
    """Claim: an input beyond the encoder's positions, and one that leaves no position for output, is refused by field,
    value and limit. Conclusive: one token less is taken."""
    for count, target, sentence in (
        (51, LARGE, "prompt.token_ids is '51 tokens'; it must be at most 50 tokens"),
        (98, replace(LARGE, encoder_positions_max=99), "prompt is '100 tokens'; it must be at most 99 tokens"),
    ):
        with pytest.raises(InvalidRequest, match=sentence):
            read(pb.GenerateRequest(token_ids={"ids": [1] * count}), target)
        read(pb.GenerateRequest(token_ids={"ids": [1] * (count - 1)}), target)


def test_the_whole_input_is_the_key() -> None:
    """Claim: texts of the same input have one key, whatever begins their output, and those of inputs that differ in
    the last token have others, as their caches have nothing in common; a short input has none."""
    fleet = fleet_of(SETTINGS, PAIR)

    def key(tokens: list[int], length: int, **own: Any) -> bytes:
        request = GenerationRequest(token_ids=(1,), **own)
        return fleet.choose(request, 1, PAIR, tokens, 0, length).key

    long = [1] * 70
    assert key([*long, 3], 70) == key([*long, 3, 5, 6], 70) != b""
    assert len({key([*long, 3], 70), key([*long[:-1], 2, 3], 70), key([*long, 3], 71), key([*long, 3], 0)}) == 4
    assert key([1] * 12, 11) == b"" != key([1] * 12, 11, prompt_cache_key="name")


@pytest.mark.parametrize("target, draft", [(MODEL, PAIR), (PAIR, MODEL)], ids=["decoder", "encoder-decoder"])
def test_a_draft_of_another_kind_is_not_used(target: Description, draft: Description) -> None:
    """Claim: a draft of another kind than the targets gets no texts, whichever was connected first; the reason names
    both, in Describe and in the log, once. It is used again as soon as a target of its kind is there. Conclusive: the
    same draft and target of one kind are used."""
    with capture_logs() as logs:
        fleet = fleet_of(SETTINGS, target, draft)
        kinds = target.kind, draft.kind
        reason = f"the draft is {kinds[1]}, the target {kinds[0]}"
        assert not fleet.drafts.up() and fleet.drafts.absent_reason == reason
        assert fleet.choose(GenerationRequest(token_ids=(1,)), 1, target).draft is None or not fleet.drafts.up()
        (line,) = [line for line in logs if line["event"] == "draft not used"]
        assert line["why"] == reason and fleet.drafts.peers[0].state == "down"
        fleet.targets.peers[0].found(draft)
        assert fleet.drafts.up() and fleet.drafts.peers[0].state == "up"
        fleet.targets.peers[0].found(target)
        assert not fleet.drafts.up()
    assert fleet_of(SETTINGS, target, target).drafts.up()
