"""The tables of `bench.proposers`, from given texts."""

from __future__ import annotations

from bench.pipeline.variants import OFF
from bench.prompts import copying_prompts, prose_prompts
from bench.proposers.chat import LOCAL_AUTO, WARM, chat_results
from bench.proposers.texts import Found, Text, pooled, pooled_ratio, seconds_of, steps_of
from bench.proposers.trees import CHAINS, tree_bars, tree_variants
from specdec.advise.forecast import Estimate
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


def test_tokens_of_a_step_are_those_of_all_texts_together() -> None:
    """Claim: the bar of trees divides all tokens by all steps, so a long text counts as its tokens do, and plans are
    the best by this number. Source: by medians of texts the command chose another tree and printed 1.054 for 1.125.
    Conclusive: the first token, of the prompt's step, counts on neither side; the median would choose the other tree,
    and is above this ratio; the interval of equal texts is their ratio itself."""
    found = Found()
    chain, best, other = (one.name for one in (CHAINS[1], *tree_variants(8)[:2]))
    steps = {
        "a": {OFF.name: 100, chain: 50, best: 25, other: 50},
        "b": {OFF.name: 10, chain: 5, best: 5, other: 2},
        "c": {OFF.name: 10, chain: 5, best: 5, other: 2},
    }
    for name, own in steps.items():
        tokens = own[OFF.name]
        own |= {tree_variants(rows)[0].name: tokens for rows in (4, 16)}
        for variant, count in own.items():
            ids, statistics = tuple(range(1 + tokens)), pb.Statistics(rounds=1 + count)
            found.add(variant, name, Text(1.0, tokens / count, ids, statistics))
    assert pooled(found, OFF.name, steps_of) == 1.0
    assert pooled(found, chain, steps_of) == 2.0
    assert pooled(found, best, steps_of) == 120 / 35
    assert pooled(found, other, steps_of) == 120 / 54
    ratio = pooled_ratio(found, best, chain, steps_of)
    assert ratio.value == 120 / 35 / 2
    assert 1.0 <= ratio.low < ratio.value < ratio.high <= 2.0
    (bar,) = [bar for bar in tree_bars("COUPLED, temperature 0.7", found) if " 8 rows" in bar.claim]
    assert best in bar.claim
    assert (bar.reached, bar.bound) == (120 / 35 / 2, 1.12)
    slow, fast = (Text(rate, 2.0, tuple(range(11)), pb.Statistics()) for rate in (1.0, 10.0))
    rates = Found({"varied": {"a": slow, "b": fast}, "slow": {"a": slow, "b": slow}})
    assert pooled(rates, "varied", seconds_of) == 20 / 11, "ten tokens in ten seconds, ten in one"
    assert pooled_ratio(rates, "varied", "slow", seconds_of).value == 20 / 11
    equal = found.of({"b", "c"})
    assert pooled_ratio(equal, other, chain, steps_of) == Estimate(2.5, 2.5, 2.5)


def text(rate: float) -> Text:
    """One that does not cycle, of this rate."""
    return Text(rate, 2.0, tuple(range(100)), pb.Statistics())
