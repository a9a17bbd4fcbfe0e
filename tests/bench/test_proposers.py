"""The tables of `bench.proposers`, from given texts."""

from __future__ import annotations

from specdec.bench.pipeline.variants import OFF
from specdec.bench.prompts import copying_prompts, prose_prompts
from specdec.bench.proposers.chat import LOCAL_AUTO, WARM, chat_results
from specdec.bench.proposers.texts import Found, Text
from specdec.v1 import coordinator_service_pb2 as pb


def test_a_prompt_without_one_of_the_variants_has_its_other_results() -> None:
    """Claim: the table of the chat model counts every text there is: the first prompt has no other answer to predict.
    Source: the command ended with a KeyError in place of its table, after half an hour. Conclusive: each ratio is of
    known rates, and the one without a first text is of the other two alone."""
    copying, prose = copying_prompts()[:3], prose_prompts()[:2]
    rates = {OFF.name: 10.0, LOCAL_AUTO.name: 20.0, WARM: 40.0, "90 % right": 30.0, "wholly wrong": 9.0}
    found, peer = Found(), Found()
    for number, prompt in enumerate([*copying, *prose]):
        for variant, rate in rates.items():
            found.add(variant, prompt.name, text(rate))
        if number:
            found.add("another answer", prompt.name, text(10.0 * (1 + number)))
        peer.add("generate", prompt.name, text(5.0))
        peer.add("prompt lookup", prompt.name, text(10.0))
    _, bars, _ = chat_results(found, peer, copying, prose, best=10)
    reached = {bar.claim: bar.reached for bar in bars}
    assert reached == {
        "copying: no draft / off": 2.0,
        "prose: no draft / off": 2.0,
        "copying: 90 % right / off": 3.0,
        "copying: wholly wrong / off": 0.9,
        "copying: another answer / off": 2.5,
        "copying: no draft / prompt lookup of transformers": 2.0,
    }


def text(rate: float) -> Text:
    """One that does not cycle, of this rate."""
    return Text(rate, 2.0, tuple(range(100)), pb.Statistics())
