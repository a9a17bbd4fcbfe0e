"""A draft with another tokenizer, through the running services: the shipped chat draft proposes for the embedded
target, of whose tokens it has a part under other ids."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdec.protocol.types import DraftVocabulary
from specdec.rpc.client import open_channel
from specdec.rpc.convert import description_from_message
from specdec.settings import TlsSettings
from specdec.v1 import types_pb2 as types_pb
from tests.services.test_pair import PROMPTS, differing, requests
from tests.support.services import MODELS, SHAPES, Services, fixed, running


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with running(MODELS / "target", MODELS / "smollm2-draft", threads=1) as started:
        yield started


@pytest.mark.more
@pytest.mark.parametrize("temperature", [0, pytest.param(0.7, marks=pytest.mark.slow)])
def test_speculation_changes_nothing(services: Services, temperature: float) -> None:
    """Claim: every generation equals its reference without speculation in full, alone and eight at once, by chains and
    trees; draft tokens were offered, and both accepted and rejected."""
    client, accepted, drafted = services.client, 0, 0
    reference = [client.generate(**request) for request in requests(temperature, SHAPES["off"])]
    for speculative, width in ((fixed(3), 1), (fixed(4), 8), (SHAPES["tree"], 8)):
        outcomes = client.generate_all(requests(temperature, speculative), width=width)
        assert not differing(outcomes, reference), f"{speculative}, {width} at once"
        drafted += sum(outcome.finished.statistics.num_draft_tokens for outcome in outcomes)
        accepted += sum(outcome.finished.statistics.num_accepted_draft_tokens for outcome in outcomes)
    assert 0 < accepted < drafted


@pytest.mark.more
def test_characters_that_tokens_cut(services: Services) -> None:
    """Claim: a prompt of characters that both tokenizers cut, each elsewhere, is continued with the same tokens."""
    prompt = "# 日本語のテキスト 🎉🎉 café\nnames = {'é': 'ω',"
    off = services.client.generate(prompt, temperature=0, max_tokens=120, speculative=SHAPES["off"])
    on = services.client.generate(prompt, temperature=0, max_tokens=120, speculative=fixed(4))
    assert on.comparable == off.comparable and on.finished.statistics.num_draft_tokens > 0


@pytest.mark.more
def test_rejection_states_the_common_tokens_only(services: Services) -> None:
    """Claim: under REJECTION, whose draft distributions travel, tokens pass too, and all lie in the vocabulary. Eight
    texts: of one, which may end in a cycle that this draft never guesses, no token need pass."""
    common = {"max_tokens": 80, "temperature": 0.5, "ignore_eos": True, "speculative": fixed(3, rule="RULE_REJECTION")}
    outcomes = services.client.generate_all([{"prompt": prompt, **common} for prompt in PROMPTS], width=4)
    assert sum(outcome.finished.statistics.num_accepted_draft_tokens for outcome in outcomes) > 0
    assert all(len(outcome.token_ids) == 80 and max(outcome.token_ids) < 4096 for outcome in outcomes)


@pytest.mark.more
async def test_the_draft_says_which_tokens_it_has(services: Services) -> None:
    """Claim: Describe tells the relation, the number of common tokens, and the share they have of a sample text."""
    assert services.draft is not None
    async with open_channel(services.draft.address, TlsSettings()) as channel:
        ask = channel.unary_unary(
            "/specdec.v1.DraftService/Describe",
            types_pb.DescribeRequest.SerializeToString,
            types_pb.DescribeResponse.FromString,
        )
        described = description_from_message(await ask(types_pb.DescribeRequest()))
    assert described.draft_vocabulary is DraftVocabulary.MAPPED and described.vocabulary_size == 4096
    assert 1000 < described.draft_vocabulary_size < 4096 and 0.5 < described.draft_vocabulary_share < 1
    assert "has another tokenizer" in described.draft_vocabulary_sentence
