"""Bad input, through real sockets, on the public service and on the internal ones.

Each case must be refused naming field and limit, at once, and the service must go on serving: the last line of every
test generates.
"""

from __future__ import annotations

import time

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb
from tests.support.services import Client, Services

GENERATE = "/specdec.v1.CoordinatorService/Generate"
SAMPLING_CASES = {
    "nan temperature": ({"temperature": float("nan")}, "temperature"),
    "negative temperature": ({"temperature": -1.0}, "temperature"),
    "tiny temperature": ({"temperature": 1e-9}, "temperature"),
    "infinite temperature": ({"temperature": float("inf")}, "temperature"),
    "top_p 0": ({"top_p": 0.0}, "top_p"),
    "top_p above 1": ({"top_p": 1.1}, "top_p"),
    "min_p above 1": ({"min_p": 2.0}, "min_p"),
    "a billion tokens": ({"max_tokens": 10**9}, "sampling.max_tokens"),
    "more tokens than positions": ({"max_tokens": 600}, "sampling.max_tokens"),
    "zero tokens": ({"max_tokens": 0}, "sampling.max_tokens"),
    "min above max": ({"max_tokens": 3, "min_tokens": 4}, "sampling.min_tokens"),
    "a megabyte of stop": ({"stop": ["x" * 1_000_000]}, "sampling.stop[0]"),
    "empty stop": ({"stop": [""]}, "sampling.stop[0]"),
    "too many stops": ({"stop": ["a"] * 17}, "sampling.stop"),
    "unknown stop token": ({"stop_token_ids": [7]}, "sampling.stop_token_ids[0]"),
    "unknown bias token": ({"logit_bias": {7: 1.0}}, "sampling.logit_bias[0]"),
    "nan bias": ({"logit_bias": {1: float("nan")}}, "logit_bias.bias"),
    "repetition 0": ({"repetition_penalty": 0.0}, "repetition_penalty"),
    "presence 3": ({"presence_penalty": 3.0}, "presence_penalty"),
    "logprobs 21": ({"logprobs": 21}, "logprobs"),
    "two texts": ({"n": 2}, "sampling.n"),
    "unknown rule": ({"speculative": {"rule": 9}}, "speculative.rule"),
    "greedy with temperature": ({"temperature": 1, "speculative": {"rule": "RULE_GREEDY"}}, "speculative.rule"),
    "rejection with seed": ({"seed": 1, "speculative": {"rule": "RULE_REJECTION"}}, "speculative.rule"),
    "coupled at 0": ({"temperature": 0, "speculative": {"rule": "RULE_COUPLED"}}, "speculative.rule"),
    "too long a draft": ({"speculative": {"num_speculative_tokens": 17}}, "speculative.num_speculative_tokens"),
    "resume beyond the end": ({"max_tokens": 2, "resume": [1, 1, 1]}, "resume.output_token_ids"),
    "resume with unknown token": ({"resume": [99]}, "resume.output_token_ids[0]"),
}


def details(error: grpc.RpcError) -> status_pb2.Status:
    """The rich status of a failed call."""
    (value,) = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    return status_pb2.Status.FromString(value)


def violations(error: grpc.RpcError) -> list[str]:
    """The fields a failed call blames."""
    fields: list[str] = []
    for detail in details(error).details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            fields += [violation.field for violation in bad.field_violations]
    return fields


def refused(client: Client, prompt, **asked) -> grpc.RpcError:
    """The error of a generation that must be refused within 50 ms of the second try (the first may start threads)."""
    for _ in range(2):
        began_s = time.monotonic()
        with pytest.raises(grpc.RpcError) as caught:
            client.generate(prompt, **asked)
        took_s = time.monotonic() - began_s
    assert took_s < 1.0
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, caught.value.details()
    return caught.value


def still_serves(services: Services) -> None:
    assert services.client.generate([1, 2], max_tokens=3, ignore_eos=True).finished.usage.output_tokens == 3


@pytest.mark.parametrize("case", SAMPLING_CASES)
def test_a_bad_field_is_named_with_its_limit(table_services: Services, case: str):
    """Claim: the status names the field and its limit, and the next request is served."""
    asked, field = SAMPLING_CASES[case]
    error = refused(table_services.client, [1, 2], **asked)
    assert field in violations(error) or field in error.details(), error.details()
    assert "must be" in error.details()
    still_serves(table_services)


BAD_PROMPTS = [("", "prompt"), ([], "prompt"), ([7], "prompt.token_ids[0]"), ([1] * 600, "512")]


@pytest.mark.parametrize("prompt, word", BAD_PROMPTS)
def test_a_bad_prompt_is_refused(table_services: Services, prompt, word: str):
    """Empty text, no ids, an id the model lacks, more tokens than the model has positions."""
    error = refused(table_services.client, prompt)
    assert word in error.details(), error.details()
    still_serves(table_services)


def test_a_prompt_of_many_bytes_is_refused_before_it_is_tokenised(table_services: Services):
    """Claim: the bound on bytes comes before the work of tokenising; the field says it was the text, not its tokens."""
    error = refused(table_services.client, "<1>" * 1_000_000)
    assert "prompt.text" in violations(error)


@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe", b"\x08\x96\x01garbage"])
def test_malformed_bytes_are_invalid_argument(table_services: Services, data: bytes):
    """The second case is a text field that is not UTF-8: all are INVALID_ARGUMENT, none UNKNOWN."""
    with pytest.raises(grpc.RpcError) as caught:
        list(table_services.client.channel.unary_stream(GENERATE)(data))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    still_serves(table_services)


def test_a_field_the_server_does_not_know_is_refused(table_services: Services):
    """Claim: nothing a user sets is ignored, a field of a later version included."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])).SerializeToString() + b"\xf8\x3e\x01"
    with pytest.raises(grpc.RpcError) as caught:
        list(table_services.client.channel.unary_stream(GENERATE)(request))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "field 1007" in caught.value.details()


def law(**changed) -> types_pb.Law:
    fields = dict(rule=2, seed=1, temperature=1.0, top_p=1.0, repetition_penalty=1.0, prompt_length=2)
    return types_pb.Law(**{**fields, **changed})


def opened(session: int = 1, **changed) -> types_pb.OpenItem:
    fields = dict(session=session, incarnation=1, law=law(), length_max=20, vocabulary_size=7)
    return types_pb.OpenItem(**{**fields, **changed})


def verify(**changed) -> target_pb.VerifyItem:
    fields = dict(session=1, incarnation=1, round_index=0, base_position=2, suffix_token_ids=[1, 2])
    return target_pb.VerifyItem(**{**fields, **changed})


def row(token_id_steps, weight_codes: bytes) -> types_pb.Row:
    return types_pb.Row(token_id_steps=token_id_steps, weight_codes=weight_codes)


GOOD_ROW = row([1, 2], b"\x00\x10")  # tokens 1 and 3
TARGET_CASES = {
    "empty item": (target_pb.VerifyRequestItem(), "item"),
    "session 0": (target_pb.VerifyRequestItem(open=opened(session=0)), "session"),
    "no law": (target_pb.VerifyRequestItem(open=opened(law=types_pb.Law())), "rule"),
    "more positions than the model": (target_pb.VerifyRequestItem(open=opened(length_max=513)), "length_max"),
    "empty suffix": (target_pb.VerifyRequestItem(verify=verify(suffix_token_ids=[])), "suffix_token_ids"),
    "unknown token": (target_pb.VerifyRequestItem(verify=verify(draft_token_ids=[7], rows=[GOOD_ROW])), "draft_token"),
    "no row": (target_pb.VerifyRequestItem(verify=verify(draft_token_ids=[3])), "rows"),
    "row without its token": (
        target_pb.VerifyRequestItem(verify=verify(draft_token_ids=[2], rows=[GOOD_ROW])),
        "row",
    ),
    "row without tokens": (
        target_pb.VerifyRequestItem(verify=verify(draft_token_ids=[3], rows=[row([], b"")])),
        "row.token_ids",
    ),
    "row with a weight too many": (
        target_pb.VerifyRequestItem(verify=verify(draft_token_ids=[3], rows=[row([3], b"\x01\x02")])),
        "row.weights",
    ),
    "row with a token twice": (
        target_pb.VerifyRequestItem(verify=verify(draft_token_ids=[3], rows=[row([3, 0], b"\x01\x02")])),
        "row.token_ids",
    ),
    "row beyond the vocabulary": (
        target_pb.VerifyRequestItem(verify=verify(draft_token_ids=[3], rows=[row([3, 2**32 - 1], b"\x01\x02")])),
        "row.token_ids",
    ),
    "65 draft tokens": (target_pb.VerifyRequestItem(verify=verify(draft_token_ids=[1] * 65)), "draft_token_ids"),
    "beyond its length": (
        target_pb.VerifyRequestItem(verify=verify(draft_token_ids=[3] * 19, rows=[GOOD_ROW] * 19)),
        "length_max",
    ),
}


def target_answers(services: Services, *items, count: int) -> list[target_pb.VerifyResponseItem]:
    """What the target answers on a stream of its own to one message of items."""
    with grpc.insecure_channel(services.target.address) as channel:
        call = channel.stream_stream("/specdec.v1.TargetService/Verify")

        def requests():
            yield target_pb.VerifyRequest(items=items).SerializeToString()
            time.sleep(0.5)

        answers: list[target_pb.VerifyResponseItem] = []
        for data in call(requests(), timeout=10):
            answers += target_pb.VerifyResponse.FromString(data).items
            if len(answers) >= count:
                break
        return answers


@pytest.mark.parametrize("case", TARGET_CASES)
def test_the_target_answers_a_bad_item_and_goes_on(table_services: Services, case: str):
    """Claim: one bad item costs itself only: the next item of the same message is served."""
    item, word = TARGET_CASES[case]
    good = [
        target_pb.VerifyRequestItem(open=opened(session=2)),
        target_pb.VerifyRequestItem(verify=verify(session=2, draft_token_ids=[3], rows=[GOOD_ROW])),
    ]
    answers = target_answers(table_services, target_pb.VerifyRequestItem(open=opened()), item, *good, count=2)
    errors = [answer.error for answer in answers if answer.HasField("error")]
    assert len(errors) == 1 and errors[0].code == 3 and word in errors[0].message, answers
    assert any(answer.HasField("evidence") and answer.evidence.session == 2 for answer in answers)


def test_a_forged_session_is_told_to_open(table_services: Services):
    """Claim: a session belongs to the stream that opened it; a name from elsewhere is unknown."""
    (answer,) = target_answers(table_services, target_pb.VerifyRequestItem(verify=verify(session=1)), count=1)
    assert answer.short.unknown and answer.short.session == 1


def test_a_round_asked_again_is_answered_from_memory_or_refused(table_services: Services):
    """Claim: equal content, equal answer; other content under the same name is refused; an older round is dropped."""
    first = verify(round_index=4, draft_token_ids=[3], rows=[GOOD_ROW])
    other = verify(round_index=4, draft_token_ids=[1], rows=[GOOD_ROW])
    older = verify(round_index=3, draft_token_ids=[3], rows=[GOOD_ROW])
    with grpc.insecure_channel(table_services.target.address) as channel:

        def requests():
            begun = [{"open": opened()}, {"verify": first}]
            for items in (begun, [{"verify": older}], [{"verify": first}], [{"verify": other}]):
                message = target_pb.VerifyRequest(items=[target_pb.VerifyRequestItem(**item) for item in items])
                yield message.SerializeToString()
                time.sleep(0.3)

        answers = []
        for data in channel.stream_stream("/specdec.v1.TargetService/Verify")(requests(), timeout=10):
            answers += target_pb.VerifyResponse.FromString(data).items
    evidence = [answer.evidence for answer in answers if answer.HasField("evidence")]
    assert len(evidence) == 2 and evidence[0] == evidence[1]
    (error,) = [answer.error for answer in answers if answer.HasField("error")]
    assert "round_index" in error.message


@pytest.mark.parametrize("service, method", [("TargetService", "Verify"), ("DraftService", "Draft")])
def test_malformed_bytes_end_a_replica_stream_as_invalid_argument(table_services: Services, service: str, method: str):
    """Claim: bytes that are no message end that stream only, with the code that says whose fault it is."""
    address = (table_services.target if service == "TargetService" else table_services.draft).address
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
        list(channel.stream_stream(f"/specdec.v1.{service}/{method}")(iter([b"\xff\xff"]), timeout=10))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    still_serves(table_services)


def test_the_draft_answers_bad_items(table_services: Services):
    """The draft service checks as the target does: a commit without suffix, a window of 65, an unknown token."""
    commit = dict(session=1, incarnation=1, committed_length=2)
    items = [
        draft_pb.DraftRequestItem(open=opened()),
        draft_pb.DraftRequestItem(commit=draft_pb.CommitItem(**commit, window=1)),
        draft_pb.DraftRequestItem(commit=draft_pb.CommitItem(**commit, suffix_token_ids=[1, 2], window=65)),
        draft_pb.DraftRequestItem(commit=draft_pb.CommitItem(**commit, suffix_token_ids=[1, 9], window=2)),
    ]
    with grpc.insecure_channel(table_services.draft.address) as channel:

        def requests():
            yield draft_pb.DraftRequest(items=items).SerializeToString()
            time.sleep(0.5)

        answers = []
        for data in channel.stream_stream("/specdec.v1.DraftService/Draft")(requests(), timeout=10):
            answers += draft_pb.DraftResponse.FromString(data).items
    words = [answer.error.message for answer in answers]
    assert len(words) == 3
    assert "suffix_token_ids" in words[0] and "window" in words[1] and "suffix_token_ids[1]" in words[2]
