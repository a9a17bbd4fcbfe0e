"""Rounds that deltas carry, through the services: their sums are the statistics, and their tokens are the text's."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grpc
import pytest

from specdec.engine.table_model import write_table_model
from specdec.protocol.report import PROPOSER_FIELDS
from specdec.protocol.tree_shape import branches
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from tests.support.services import SHAPES, Client, Outcome, Services, fixed, running

PROMPT = [1, 2, 3]
COUPLED = {"temperature": 0.9, "seed": 5}
RULES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": ({"temperature": 0}, {}),
    "coupled": (COUPLED, {}),
    "rejection": ({"temperature": 0.9}, {"rule": "RULE_REJECTION"}),
}
TREE = fixed(8, draft_window=8, draft_nodes_per_step=4, draft_siblings=2)
WAYS = {
    "plain": SHAPES["off"],
    "chain": fixed(3, draft_window=3),
    "tree": TREE,
    "n-gram": fixed(7, proposers=["PROPOSER_NGRAM"]),
    "both": TREE | {"proposers": ["PROPOSER_DRAFT", "PROPOSER_NGRAM", "PROPOSER_SUFFIX"]},
    "auto": SHAPES["auto"],
}
POSITIONS_MAX = 4000
ROUND_TOKENS_MAX = 9  # of all these ways


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Services]:
    """Services on table models of many positions, of which the draft is right now and then."""
    folder = tmp_path_factory.mktemp("rounds")
    for seed, name in enumerate(("target", "draft")):
        write_table_model(folder / name, 7, POSITIONS_MAX, seed)
    with running(folder / "target", folder / "draft", threads=1) as started:
        yield started


def read(messages: Iterable[pb.GenerateResponse]) -> tuple[Outcome, list[pb.Delta]]:
    """A text, and its deltas."""
    text, deltas = Outcome(), []
    for message in messages:
        Client.take(text, message)
        if message.HasField("delta"):
            deltas.append(message.delta)
    return text, deltas


def generated(client: Client, speculative: dict[str, Any], **asked: Any) -> tuple[Outcome, list[pb.Delta]]:
    """A text of 120 tokens whose deltas carry rounds, checked."""
    asked = {"max_tokens": 120, "ignore_eos": True, **asked}
    request = client.request(PROMPT, speculative | {"report_rounds": True}, **asked)
    text, deltas = read(client.stub.Generate(request, timeout=60))
    check_sums(text.finished.statistics, [own for delta in deltas for own in delta.rounds])
    check_tokens(deltas)
    assert not any(delta.HasField("statistics") for delta in deltas)
    return text, deltas


def check_sums(statistics: pb.Statistics, rounds: Sequence[pb.Round]) -> None:
    """Whatever statistics count and rounds tell is the same, exactly; times from verdict to verdict but for
    roundings."""
    assert [own.round_index for own in rounds] == list(range(statistics.rounds))
    speculating = [own for own in rounds if own.draft_token_ids]
    assert len(speculating) == statistics.num_spec_steps
    assert sum(len(own.draft_token_ids) for own in rounds) == statistics.num_draft_tokens
    assert sum(len(own.accepted) for own in rounds) == statistics.num_accepted_draft_tokens
    lengths = Counter(len(own.accepted) for own in speculating)
    assert lengths == {length: count for length, count in enumerate(statistics.acceptance_histogram) if count}
    assert sum(len(branches(own.parents, len(own.draft_token_ids))) for own in speculating) == statistics.num_paths
    offered = Counter(proposer for own in rounds for proposer in own.proposers)
    accepted = Counter(own.proposers[index] for own in rounds for index in own.accepted)
    for proposer, names in PROPOSER_FIELDS.items():
        counts = [getattr(statistics, name) for name in names]
        assert counts == [offered[proposer.value], accepted[proposer.value]], proposer
    for name in (
        "draft_wait_s",
        "target_queue_s",
        "target_forward_s",
        "target_sampling_s",
        "target_heads_s",
        "target_link_s",
    ):
        assert sum(getattr(own, name) for own in rounds) == getattr(statistics.time, name), name
    assert rounds[0].round_s == statistics.time.time_to_first_token_s
    assert sum(own.round_s for own in rounds) == pytest.approx(statistics.time.total_s, rel=1e-9)


def check_tokens(deltas: Sequence[pb.Delta]) -> None:
    """The tokens of a delta are those of its rounds: the accepted draft tokens, a path from the root with the kinds and
    proposers that the delta tells, and one of the target; only the last round of a text may lack some."""
    for delta in deltas:
        start = 0
        for own in delta.rounds:
            rows = own.parents or range(len(own.draft_token_ids))
            assert [rows[index] for index in own.accepted] == [0, *(index + 1 for index in own.accepted)][
                : len(own.accepted)
            ]
            assert len(own.proposers) == len(own.draft_token_ids)
            end = start + own.num_output_tokens
            accepted = [own.draft_token_ids[index] for index in own.accepted][: own.num_output_tokens]
            assert list(delta.token_ids[start:end])[: len(accepted)] == accepted
            kinds = list(delta.kinds[start:end])
            assert kinds[: len(accepted)] == [pb.TOKEN_KIND_ACCEPTED] * len(accepted)
            assert pb.TOKEN_KIND_ACCEPTED not in kinds[len(own.accepted) :]
            told = list(delta.proposers[start:end]) or [int(kind == pb.TOKEN_KIND_ACCEPTED) for kind in kinds]
            assert told[: len(accepted)] == [own.proposers[index] for index in own.accepted][: len(accepted)]
            assert end - start == len(own.accepted) + 1 or (delta is deltas[-1] and own is delta.rounds[-1])
            start = end
        assert start == len(delta.token_ids)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rule", RULES)
def test_rounds_are_the_statistics(services: Services, rule: str, way: str) -> None:
    """Claim: under each rule, in plain decoding, by chains, trees and proposers of the coordinator, the sums over the
    rounds are the statistics, exactly, and their accepted tokens the text's; asking for rounds changes no text.
    Conclusive: both were counted apart, one by the coordinator and one here, and are compared with ==; the way offered
    what it says: trees have rounds of several paths, n-grams tokens of their proposer."""
    sampling, named = RULES[rule]
    sampling = sampling | ({"cache_salt": "own"} if way == "both" else {})
    for _ in range(10):  # on a busy machine the draft may be late for a whole text
        text, deltas = generated(services.client, WAYS[way] | named, **sampling)
        rounds = [own for delta in deltas for own in delta.rounds]
        has_trees = way not in ("tree", "both") or any(own.parents for own in rounds)
        if has_trees and (way not in ("chain", "tree") or text.finished.statistics.num_accepted_draft_tokens):
            break
    else:
        pytest.fail("no text had the draft tokens of its way")
    if way == "n-gram":
        assert {proposer for own in rounds for proposer in own.proposers} == {pb.PROPOSER_NGRAM}
    silent, without = read(
        services.client.stub.Generate(
            services.client.request(PROMPT, WAYS[way] | named, max_tokens=120, ignore_eos=True, **sampling), timeout=60
        )
    )
    assert not any(delta.rounds for delta in without)
    assert rule == "rejection" or silent.comparable == text.comparable


def test_a_resumed_text_has_the_rounds_of_its_own_stream(services: Services) -> None:
    """Claim: a stream that goes on after 40 tokens numbers its rounds from 0, and they sum to its own statistics; both
    parts are the whole text. Conclusive: its first output index is 40, and the text is that of one stream."""
    whole, _ = generated(services.client, TREE, **COUPLED)
    rest, deltas = generated(services.client, TREE, resume=whole.token_ids[:40], **COUPLED)
    assert deltas[0].first_output_index == 40 and whole.token_ids[:40] + rest.token_ids == whole.token_ids


def test_a_text_that_ends_within_a_round(services: Services) -> None:
    """Claim: where a stop string ends the text among accepted tokens, the round tells all that were accepted, as
    statistics do, and how many of them are output. Conclusive: the prediction goes on beyond the stop, and in some
    round tokens after it were accepted."""
    way, whole = fixed(8, proposers=["PROPOSER_PREDICTION"]), generated(services.client, SHAPES["off"], **COUPLED)[0]
    cut_count = 0
    for length in range(30, 34):  # the stop has another place in its round
        asked = {"prediction": whole.token_ids, "stop": ["".join(whole.texts[length - 6 : length])], **COUPLED}
        text, deltas = generated(services.client, way, **asked)
        last = deltas[-1].rounds[-1]
        assert text.finished.stop_string and text.token_ids == whole.token_ids[: len(text.token_ids)]
        cut_count += last.num_output_tokens < len(last.accepted)
    assert cut_count


def test_merged_deltas_keep_their_rounds(services: Services) -> None:
    """Claim: a client that reads nothing while its text is generated gets every round afterwards, in order, with its
    tokens, and statistics that are the sums so far. Conclusive: messages with more tokens than a round
    can have were merged, sums and tokens are compared as for any text, and the text is that of a client that reads."""
    client, way = services.client, WAYS["n-gram"]
    asked = {"max_tokens": 3500, "ignore_eos": True, "temperature": 0}
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096)]  # little fits on the way
    with grpc.insecure_channel(services.coordinator.address, options=options) as channel:
        request = client.request(PROMPT, way | {"report_rounds": True, "report_statistics": True}, **asked)
        paused = pb_grpc.CoordinatorServiceStub(channel).Generate(request, timeout=120)
        beside = client.generate(PROMPT, speculative=way, **asked)
        text, deltas = read(paused)
    assert max(len(delta.token_ids) for delta in deltas) > ROUND_TOKENS_MAX
    assert max(len(delta.rounds) for delta in deltas) > 1
    rounds: list[pb.Round] = []
    for delta in deltas:
        rounds += delta.rounds
        if delta.HasField("statistics"):
            check_sums(delta.statistics, rounds)
    check_sums(text.finished.statistics, rounds)
    check_tokens(deltas)
    assert text.comparable == beside.comparable


def test_rounds_show_earlier_texts_of_a_salt_only(services: Services) -> None:
    """Claim: with a salt the suffix proposer proposes to a request that reports rounds; without one, a request that
    names it is refused with the field, though the store has the text. Conclusive: without rounds it proposes there."""
    named, asked = fixed(7, proposers=["PROPOSER_SUFFIX"]), {"max_tokens": 120, "ignore_eos": True, **COUPLED}
    for salt in ("", "own"):
        for _ in range(2):  # the second time the store has the text
            text = services.client.generate(PROMPT, speculative=named, cache_salt=salt, **asked)
        assert text.finished.statistics.num_suffix_accepted_tokens
    text, _ = generated(services.client, named, cache_salt="own", **COUPLED)
    assert text.finished.statistics.num_suffix_accepted_tokens
    with pytest.raises(grpc.RpcError) as refused:
        services.client.generate(PROMPT, speculative=named | {"report_rounds": True}, **asked)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "speculative.report_rounds is True; it must be" in refused.value.details()


def test_the_command_shows_the_rounds(services: Services) -> None:
    """Claim: `specdec generate --rounds` prints the text alone to standard output and a line per round to standard
    error; with `--json` the messages have the rounds, and standard error is empty. Conclusive: the text and the number
    of rounds are those of the statistics in the messages."""
    command = [sys.executable, "-m", "specdec.cli", "generate", "<1><2>", "--address", services.coordinator.address]
    command += ["--rounds", "--max-tokens", "40", "--ignore-eos", "--temperature", "0", "--policy", "off"]
    table, lines = (
        subprocess.run([*command, *more], capture_output=True, text=True, timeout=60, check=True)
        for more in ([], ["--json"])
    )
    messages = [json.loads(line) for line in lines.stdout.splitlines()]
    deltas = [message["delta"] for message in messages[1:-1]]
    count = messages[-1]["finished"]["statistics"]["rounds"]
    assert lines.stderr == "" and count == 40 == sum(len(delta["rounds"]) for delta in deltas)
    assert table.stdout == "".join(delta.get("text", "") for delta in deltas) + "\n"
    heading, *rows = table.stderr.splitlines()
    assert heading.split()[:2] == ["round", "ms"] and [row.split()[0] for row in rows] == [
        str(own) for own in range(40)
    ]
