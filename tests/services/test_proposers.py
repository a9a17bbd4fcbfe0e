"""Proposers and trees through the services: the text is that of plain decoding, and every source is counted."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from specdec.config import DraftSettings
from specdec.engine.table_model import write_table_model
from specdec.launch.children import start
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.services import MODELS, SHAPES, Client, Outcome, Services, fixed, running

PROMPT = list(range(40, 52))
# Each pair of tokens goes on in several ways, so that n-grams alone make trees.
DIGITS = "rows = [1, 2, 1, 3, 1, 2, 4, 1, 3, 2, 1, 4, 2, 1, 3, 4, 1, 2, 3, 1, 4, 3, 2, 1, 3, 1,"
LENGTH = 60
SOURCES = {"ngram": "PROPOSER_NGRAM", "suffix": "PROPOSER_SUFFIX", "prediction": "PROPOSER_PREDICTION"}


SOURCE_NAMES = {"model": "PROPOSER_DRAFT", **SOURCES, "heads": "PROPOSER_HEADS"}
TREE = {"draft_nodes_per_step": 4, "draft_siblings": 2}
CASES = [
    pytest.param(way, rows, marks=[] if (way, rows) == ("all", 12) else [pytest.mark.slow])
    for way in (*SOURCE_NAMES, "all")
    for rows in (2, 5, 12, 16)
]


def way_of(source: str, rows: int) -> dict[str, Any]:
    """A way to speculate with one source, or with all at once, by trees of up to `rows` draft tokens."""
    proposers = [*SOURCE_NAMES.values()] if source == "all" else [SOURCE_NAMES[source]]
    shape = {**TREE, "draft_window": rows} if source in ("all", "model") else {}
    return fixed(rows, proposers=proposers, draft_wait_ms=2000, **shape)


@pytest.fixture(
    scope="module",
    params=["float32", *(pytest.param(own, marks=pytest.mark.slow) for own in ("bfloat16", "float32/2", "bfloat16/2"))],
)
def pair(request: pytest.FixtureRequest) -> Iterator[Services]:
    """The shipped pair and its heads. A parameter is type/ranks of the target."""
    if request.param == "float32":
        yield request.getfixturevalue("shipped_pair")
        return
    dtype, _, ranks = request.param.partition("/")
    own = {"heads": str(MODELS / "target-heads"), "tensor_parallel_size": int(ranks or 1)}
    with running(MODELS / "target", MODELS / "draft", threads=1, dtype=dtype, target=own) as services:
        yield services


@pytest.fixture(scope="module")
def batch(pair: Services) -> list[tuple[dict[str, Any], Outcome]]:
    """Eight requests, greedy ones and seeded ones, and their texts, each generated alone by plain decoding."""
    requests = [
        {"max_tokens": 60, "ignore_eos": True, "logprobs": 1}
        | {"prompt": f"{DIGITS} {index}," if index % 4 else PROMPT[index % 5 :]}
        | ({"temperature": 0.9, "seed": index} if index % 2 else {"temperature": 0.0})
        for index in range(8)
    ]
    return [(one, pair.client.generate(**one, speculative=SHAPES["off"])) for one in requests]


def plain(client: Client, prompt: str | list[int] = PROMPT, length: int = LENGTH, **asked: Any) -> Outcome:
    return client.generate(prompt, max_tokens=length, ignore_eos=True, speculative=SHAPES["off"], **asked)


def with_errors(token_ids: list[int]) -> list[int]:
    """These tokens, every sixth another one."""
    return [3 if index % 6 == 5 else token_id for index, token_id in enumerate(token_ids)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("source", SOURCES)
def test_each_source_alone_changes_nothing(pair: Services, source: str, temperature: float) -> None:
    """Claim: with one source and no draft model the text, log-probabilities and usage are those of plain decoding,
    tokens of that source are accepted, and they are counted for it alone. The prediction has one wrong token in six."""
    asked = {"temperature": temperature, "logprobs": 1, "ignore_eos": True, "max_tokens": LENGTH}
    asked |= {"seed": 5} if temperature else {}
    off = pair.client.generate(PROMPT, speculative=SHAPES["off"], **asked)
    predicted = with_errors(off.token_ids)
    for _ in range(2):  # the second time the store has the text
        prediction = predicted if source == "prediction" else ()
        on = pair.client.generate(
            PROMPT, speculative=fixed(8, proposers=[SOURCES[source]]), prediction=prediction, **asked
        )
        assert on.comparable == off.comparable
    statistics = on.finished.statistics
    accepted = {name: getattr(statistics, f"num_{name}_accepted_tokens") for name in (*SOURCES, "model", "heads")}
    assert accepted.pop(source) == statistics.num_accepted_draft_tokens
    assert not any(accepted.values()) and statistics.draft_link_bytes == 0
    if source != "ngram" or not temperature:
        assert statistics.num_accepted_draft_tokens > LENGTH / 3
    number = pb.Proposer.Value(SOURCES[source])
    assert on.proposers.count(number) == statistics.num_accepted_draft_tokens
    assert all((kind == pb.TOKEN_KIND_ACCEPTED) == (own > 0) for kind, own in zip(on.kinds, on.proposers))


@pytest.mark.parametrize("way, rows", CASES)
def test_sources_change_nothing_in_a_batch(
    pair: Services, batch: list[tuple[dict[str, Any], Outcome]], way: str, rows: int
) -> None:
    """Claim: each source alone, and all at once, changes no token, log-probability or usage of 1, 3 and 8 texts at a
    time, greedy and seeded, in both types, over one rank and two, by trees of 2 to 16 draft tokens. Conclusive: plain
    decoding of each text alone is the reference; tokens of the source were offered, of each where all are asked, and
    there a third of the rounds has several paths. Predictions have one wrong token in six."""
    offered: Counter[str] = Counter()
    paths = steps = 0
    for width in (1, 3, 8):
        asked = [
            {
                **one,
                "speculative": way_of(way, rows),
                "prediction": with_errors(off.token_ids) if way == "prediction" or way == "all" and index % 2 else (),
                "cache_salt": "" if width == 3 else f"{way} {rows} {width}",  # a store with these texts, or without any
            }
            for index, (one, off) in enumerate(batch[:width])
        ]
        on = pair.client.generate_all(asked, width=width)
        assert [one.comparable for one in on] == [off.comparable for _, off in batch[:width]], f"batch {width}"
        for name in SOURCE_NAMES:
            offered[name] += sum(getattr(one.finished.statistics, f"num_{name}_draft_tokens") for one in on)
        paths += sum(one.finished.statistics.num_paths for one in on)
        steps += sum(one.finished.statistics.num_spec_steps for one in on)
    used = {name for name, count in offered.items() if count}
    if way != "all":
        assert used == {way}, offered
        assert paths > steps or way == "prediction" or rows == 2, (paths, steps)  # a prediction is one run
    else:
        assert paths > (1.1 if rows == 2 else 1.3) * steps, (paths, steps)
        assert used == SOURCE_NAMES.keys() or rows == 2 and len(used) > 2, offered


@pytest.mark.parametrize("siblings, rows", [(1, 2), pytest.param(2, 5, marks=pytest.mark.more), (3, 16)])
def test_trees_of_several_widths_change_nothing(pair: Services, siblings: int, rows: int) -> None:
    """Claim: trees of 2 to 16 rows, 1, 3 and 8 streams at once, greedy and with seeds, give the texts of plain
    decoding, and are trees."""
    way = fixed(rows, draft_window=rows, draft_nodes_per_step=4, draft_siblings=siblings, draft_wait_ms=2000)
    requests = [
        {"prompt": PROMPT[index % 5 :], "max_tokens": 120, "ignore_eos": True, "temperature": 0.9 * (index % 2)}
        | ({"seed": index} if index % 2 else {})
        for index in range(8)
    ]
    off = pair.client.generate_all([{**one, "speculative": SHAPES["off"]} for one in requests], width=4)
    for width in (1, 3, 8):
        on = pair.client.generate_all([{**one, "speculative": way} for one in requests[:width]], width=width)
        assert [one.comparable for one in on] == [one.comparable for one in off[:width]]
        statistics = [one.finished.statistics for one in on]
        assert sum(own.num_paths for own in statistics) > sum(own.num_spec_steps for own in statistics)
        assert sum(own.num_accepted_draft_tokens for own in statistics)


@pytest.mark.parametrize("pair", ["float32"], indirect=True)
def test_the_store_never_crosses_salts(pair: Services) -> None:
    """Claim: a text is proposed again for its own cache salt and for no other."""
    own = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.9, "seed": 99}
    way = fixed(8, proposers=["PROPOSER_SUFFIX"])
    counts = []
    for salt in ("alice", "bob", "", "alice", "bob"):
        outcome = pair.client.generate(PROMPT, speculative=way, cache_salt=salt, **own)
        counts.append(outcome.finished.statistics.num_suffix_accepted_tokens)
    assert max(counts[:3]) < LENGTH / 4 and min(counts[3:]) > LENGTH / 2


@pytest.mark.parametrize("pair", ["float32"], indirect=True)
def test_only_what_the_target_chose_is_remembered(pair: Services) -> None:
    """Claim: a text is proposed again from the first token on that its own stream generated. Resumed tokens are the
    client's words: a request that resumes made-up ones, and ends at once, leaves nothing; one that resumes half of a
    text leaves the other half, whose first token is found by the resumed ones before it.

    Conclusive: the same prompts are asked under the same salts with that source alone, so what it offers was stored;
    asked once more, with all of the text stored, the first half is accepted too.
    """
    way = fixed(8, proposers=["PROPOSER_SUFFIX"])
    made_up = [(17 * index * index + 5) % 4000 + 1 for index in range(200)]
    ended = pair.client.generate(PROMPT, resume=made_up, max_tokens=len(made_up), cache_salt="made up")
    assert ended.finished.usage.output_tokens == len(made_up) and not ended.token_ids
    asked = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 0.9, "seed": 99}
    after = pair.client.generate([*PROMPT, *made_up[:100]], speculative=way, cache_salt="made up", **asked)
    assert after.finished.statistics.num_suffix_draft_tokens == 0
    off = pair.client.generate(PROMPT, speculative=SHAPES["off"], cache_salt="whole", **asked)
    half = off.token_ids[: LENGTH // 2]
    pair.client.generate(PROMPT, resume=half, speculative=SHAPES["off"], cache_salt="half", **asked)
    number = pb.PROPOSER_SUFFIX
    for counts in ((0, LENGTH // 4), (LENGTH // 4, LENGTH // 4)):
        on = pair.client.generate(PROMPT, speculative=way, cache_salt="half", **asked)
        assert on.token_ids == off.token_ids
        found = on.proposers[: len(half)].count(number), on.proposers[len(half) :].count(number)
        assert all(own >= least for own, least in zip(found, counts)) and (counts[0] or not found[0]), found


def test_a_service_without_a_draft(table_services: Services) -> None:
    """Claim: a coordinator without a draft service speculates by its own proposers, by default, and says so."""
    with table_services.coordinator_with(draft=(), speculation_policy="auto") as client:
        off = plain(client, [1, 2, 3], 120, temperature=0.0)
        on = client.generate([1, 2, 3], max_tokens=120, ignore_eos=True, temperature=0.0)
        assert on.comparable == off.comparable
        statistics = on.finished.statistics
        assert statistics.num_ngram_accepted_tokens > 60 and statistics.rounds < 60
        assert "no draft model" in statistics.policy_reason


@pytest.mark.parametrize("pair", ["float32"], indirect=True)
def test_heads_change_nothing_and_are_counted(pair: Services) -> None:
    """Claim: with the shipped heads on the target and no draft, greedy and sampled texts are those of plain decoding,
    and tokens of the heads are accepted; a request that excludes heads gets none of their tokens."""
    with pair.coordinator_with(draft=(), speculation_policy="auto") as client:
        for asked in ({"temperature": 0.0}, {"temperature": 0.7, "seed": 4}):
            off = plain(client, "import os", **asked)
            both = [
                client.generate(
                    "import os",
                    max_tokens=LENGTH,
                    ignore_eos=True,
                    speculative=fixed(7, proposers=proposers),  # whatever the machine is busy with
                    **asked,
                )
                for proposers in (["PROPOSER_HEADS"], ["PROPOSER_NGRAM"])
            ]
            assert [one.comparable for one in both] == [off.comparable] * 2
            counts = [one.finished.statistics.num_heads_accepted_tokens for one in both]
            assert counts[0] > 5 and counts[1] == 0
            assert both[0].finished.statistics.num_accepted_draft_tokens == counts[0]


def test_proposers_go_on_when_the_draft_dies(table_services: Services, table_models: tuple[Path, Path]) -> None:
    """Claim: killing the draft leaves the text as it was, and the n-gram proposer goes on."""
    settings = DraftSettings(model=str(table_models[1]), port=0, threads=1, log_level="error")
    with start("draft", settings) as draft:
        address = draft.wait_ready()
        with table_services.coordinator_with(draft=address, speculation_policy="auto") as client:
            off = plain(client, [1, 2, 3], 300, temperature=0.0)
            outcome = Outcome()
            request = client.request([1, 2, 3], max_tokens=300, ignore_eos=True, temperature=0.0)
            for response in client.stub.Generate(request, timeout=60):
                client.take(outcome, response)
                if len(outcome.token_ids) > 20 and draft.is_running:
                    draft.process.kill()
                    time.sleep(0.2)
        assert outcome.comparable == off.comparable
        assert outcome.proposers[-1] in (0, pb.PROPOSER_NGRAM) and pb.PROPOSER_NGRAM in outcome.proposers[-20:]


@pytest.mark.parametrize("asked", [{"temperature": 0.0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("pair", ["float32"], indirect=True)
def test_a_predicted_text_saves_rounds_and_changes_nothing(pair: Services, asked: dict[str, float]) -> None:
    """Claim: with the answer as predicted text a generation is that of plain decoding in less than a third of its
    rounds; with another text it is the same too, in no more rounds than plain decoding. A round is a target step."""
    own = {"max_tokens": LENGTH, "ignore_eos": True, "logprobs": 1, **asked}
    off = pair.client.generate("def area(", speculative=SHAPES["off"], **own)
    texts = off.text, "The weather was fine, and the river rose all week. " * 3
    way = fixed(8, proposers=["PROPOSER_PREDICTION"])
    right, wrong = (pair.client.generate("def area(", speculative=way, prediction=text, **own) for text in texts)
    assert right.comparable == wrong.comparable == off.comparable
    statistics = right.finished.statistics
    assert statistics.rounds < off.finished.statistics.rounds / 3
    assert statistics.num_prediction_accepted_tokens == statistics.num_accepted_draft_tokens > LENGTH / 2
    assert wrong.finished.statistics.rounds <= off.finished.statistics.rounds


@pytest.mark.more
def test_a_predicted_text_is_tokenised_like_output(tmp_path: Path) -> None:
    """Claim: a predicted text is what the same text as token ids is, though the tokenizer begins prompts with a special
    token, and ends before the first token that the target lacks.

    Conclusive: rounds, offered and accepted tokens of both are equal, and a prediction that begins or ends elsewhere
    has others, as is shown beside them.
    """
    write_table_model(tmp_path / "target", 8, seed=1)
    file = tmp_path / "target" / "tokenizer.json"
    facts = json.loads(file.read_text())
    facts["model"]["vocab"]["<9>"] = 9
    file.write_text(json.dumps(facts))
    tokenizer = Tokenizer.from_file(str(file))
    tokenizer.post_processor = TemplateProcessing(single="<|end|> $A", special_tokens=[("<|end|>", 0)])
    tokenizer.save(str(file))
    asked = {"max_tokens": LENGTH, "ignore_eos": True, "temperature": 1.0, "seed": 7, "logit_bias": {0: -100.0}}
    with running(tmp_path / "target", None, threads=1) as services:
        off = services.client.generate("<1><2>", speculative=SHAPES["off"], **asked)
        assert off.finished.usage.prompt_tokens == 3 and off.text == "".join(f"<{token}>" for token in off.token_ids)
        words = off.text.replace("><", "> <").split()

        def counts(prediction: str | list[int]) -> tuple[int, int, int]:
            way = fixed(4, proposers=["PROPOSER_PREDICTION"])
            on = services.client.generate("<1><2>", speculative=way, prediction=prediction, **asked)
            assert on.comparable == off.comparable
            own = on.finished.statistics
            return own.rounds, own.num_prediction_draft_tokens, own.num_prediction_accepted_tokens

        whole, half = counts(off.token_ids), counts(off.token_ids[:20])
        assert counts(off.text) == whole and whole != counts([0, *off.token_ids])
        assert counts("".join([*words[:20], "<9>", *words[20:]])) == half != whole


@pytest.mark.parametrize("pair", ["float32"], indirect=True)
def test_a_predicted_text_has_a_limit_in_tokens(pair: Services) -> None:
    """Claim: a predicted text of more tokens than the target has positions is INVALID_ARGUMENT and names the limit."""
    with pytest.raises(grpc.RpcError) as refused:
        pair.client.generate("def f():", max_tokens=2, prediction="x = 1\n" * 2000)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "prediction.text" in refused.value.details() and "2048 tokens" in refused.value.details()


@pytest.mark.parametrize(
    "speculative, prediction, field",
    [
        ({"proposers": [0]}, (), "speculative.proposers[0]"),
        ({"proposers": [99]}, (), "speculative.proposers[0]"),
        ({"proposers": [1] * 7}, (), "speculative.proposers"),
        (fixed(3, draft_siblings=4), (), "speculative.draft_siblings"),
        ({"draft_siblings": 1}, (), "speculative.draft_siblings"),
        ({}, (1 << 20,), "prediction.token_ids[0]"),
    ],
    ids=["none", "unknown", "too many", "too many siblings", "siblings without FIXED", "an id the target lacks"],
)
def test_bad_input_is_refused_by_field(
    table_services: Services, speculative: dict, prediction: tuple, field: str
) -> None:
    """Claim: each is INVALID_ARGUMENT and names the field."""
    with pytest.raises(grpc.RpcError) as refused:
        table_services.client.generate([1], speculative=speculative, prediction=prediction)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT and field in refused.value.details()
