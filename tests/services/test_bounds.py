"""What is bounded, seen from outside: values beyond their fields, a plan beside others, a flood, a reader that pauses.
Real processes and sockets; target and draft are those of tests/support/planted_pair.py."""

from __future__ import annotations

import queue
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import IO

import grpc
import pytest

from specdec.config import CoordinatorSettings
from specdec.engine.table_model import write_table_model
from specdec.launch.children import start
from specdec.protocol.limits import UINT32_MAX
from specdec.v1 import coordinator_service_pb2 as pb
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from specdec.v1 import target_service_pb2 as target_pb
from specdec.v1 import types_pb2 as types_pb
from tests.chaos.processes import anonymous_mb, thread_count
from tests.chaos.texts import Text, send_burst
from tests.support.pages import free_address, read_page
from tests.support.planted_pair import AGES, AGES_S, EPOCH_MAX, FAST_LINE, SLOW, SLOW_LINE
from tests.support.services import Client, Outcome, fixed
from tests.support.waiting import until

VOCABULARY_SIZE, POSITIONS_MAX = 24, 5000
LONG = fixed(16, proposers=["PROPOSER_NGRAM"])
ASKED = {"temperature": 1, "ignore_eos": True}
STREAMS = 8
PLACES = 64  # of a replica
READER_BYTES_MAX = 1 << 17  # a client's own limit of a message
ITEM_COUNT, MESSAGE_COUNT = 14, 1200  # of a flood: 17 MB, 9 times as much as values
HELD_MB_MAX = 40.0  # UNHANDLED_BYTES_MAX as values, and what is on the way


@dataclass(frozen=True)
class Planted:
    """The target's process, output and address; the coordinator's settings, address, page and client."""

    pid: int
    output: IO[str]
    target_address: str
    settings: CoordinatorSettings
    address: str
    page: str
    client: Client


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planted]:
    """A coordinator as it is, on the planted pair."""
    folder = tmp_path_factory.mktemp("bounds")
    roles, page = ("target", "draft"), free_address()
    with ExitStack() as stack:
        started: list[subprocess.Popen[str]] = []
        for seed, role in enumerate(roles):
            write_table_model(folder / role, VOCABULARY_SIZE, POSITIONS_MAX, seed)
            command = [sys.executable, "-m", "tests.support.planted_pair", role, "--model", str(folder / role)]
            if role == "draft":
                command += ["--target-tokenizer", str(folder / "target")]
            flags = ["--port", "0", "--threads", "1", "--device", "cpu", "--log-level", "error"]
            child = subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True)
            stack.enter_context(child)
            stack.callback(child.kill)
            started.append(child)
        target, draft = (child.stdout.readline().split()[-1] for child in started)
        settings = CoordinatorSettings(
            port=0,
            log_level="error",
            target=target,
            draft=draft,
            tokenizer=str(folder / "target"),
            metrics_address=page,
            max_num_seqs=STREAMS,
        )
        coordinator = stack.enter_context(start("coordinator", settings))
        client = Client(coordinator.wait_ready())
        stack.callback(client.close)
        yield Planted(started[0].pid, started[0].stdout, target, settings, coordinator.address, page, client)


def test_a_named_plan_shrinks_beside_others_and_has_a_maximum(planted: Planted) -> None:
    """Claim: a request that names 16 draft tokens offers them alone; beside others that name the same it offers far
    fewer, says so, and has the same text. Only beside as many as the coordinator takes is one more refused. One that
    names 64 nodes is refused by field and limit.

    Source: a client's FIXED overrode the load control. Conclusive: the requests alone and beside others are the same,
    the prompt has a match for nearly every pair of tokens, and the target's step grows with its rows; the refused one
    came while all others ran with these plans.
    """
    prompt = random.Random(1).choices(range(1, VOCABULARY_SIZE), k=1500)
    asked = {"prompt": prompt, "max_tokens": 400, "speculative": LONG, **ASKED}
    alone = planted.client.generate(**asked, seed=0)
    with ThreadPoolExecutor(STREAMS) as pool:
        texts = [pool.submit(planted.client.generate, **asked, seed=seed) for seed in range(STREAMS)]
        until(lambda: read_page(planted.page).value("vllm:num_requests_running") == STREAMS)
        with pytest.raises(grpc.RpcError) as refused:
            planted.client.generate([1], max_tokens=1)
        beside = [text.result() for text in texts]
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    statistics = [one.finished.statistics for one in (alone, *beside)]
    offered, *others = (one.num_draft_tokens / one.rounds for one in statistics)
    assert offered > 8 and sum(others) / STREAMS < offered / 3
    reasons = [one.policy_reason for one in statistics]
    assert reasons[0] == "fixed: 16 tokens" and any("under the load of" in reason for reason in reasons[1:])
    assert beside[0].comparable == alone.comparable
    with pytest.raises(grpc.RpcError) as caught:
        planted.client.generate([1], speculative=fixed(16, draft_nodes_per_step=64))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    limit = "speculative.draft_nodes_per_step is 64; it must be at most this server's maximum, 8"
    assert limit in caught.value.details()


def test_no_request_starts_a_thread(planted: Planted) -> None:
    """Claim: a coordinator that was never asked has all its threads; a burst of requests starts no further one.

    Source: its pool for prompts started them by and by, so that a count of threads, after whatever requests, could
    still grow. Conclusive: the kernel counts the threads, and the burst is the first work of this coordinator: such a
    pool starts a thread for its first call already.
    """
    settings = planted.settings.model_copy(update={"metrics_address": None})
    with start("coordinator", settings) as coordinator:
        address, pid = coordinator.wait_ready(), coordinator.process.pid
        count = thread_count(pid)
        send_burst(address, [Text((1, 2, 3), 0.0, 0, 1)])
        assert thread_count(pid) == count


def test_a_step_of_an_hour_ends_no_text(planted: Planted) -> None:
    """Claim: a text whose step lasted longer than its field can hold is complete, with the longest time that the field
    holds, and so is a text beside it. Source: 71 minutes ended the stream of all sessions.

    Conclusive: the target's clock leaps in this step, so the time that it measures is a real difference."""
    asked = {"max_tokens": 100, "speculative": {"enabled": False}, **ASKED}
    beside, text = planted.client.generate_all([{"prompt": prompt, **asked} for prompt in ([1], AGES)], 2)
    assert len(beside.token_ids) == len(text.token_ids) == 100
    assert UINT32_MAX / 1e6 <= text.finished.statistics.time.target_forward_s < AGES_S


def test_a_text_that_spends_its_epochs_costs_no_other_its_draft(planted: Planted) -> None:
    """Claim: when an answer of the draft has an epoch beyond its field, the draft refuses this text, which goes on
    without, and no other: the next one is drafted to its end. Source: epochs were counted for the life of the draft, so
    from then on every message failed, and with it the stream of all sessions, for ever.

    Conclusive: a lost stream is no refusal, and refusals are counted; both texts together begin more epochs than the
    field holds, and the second alone fewer, since an epoch takes a round.
    """
    refusals = "specdec_draft_refusals_total"
    before = read_page(planted.page).value(refusals)
    way = fixed(2, draft_wait_ms=1000, proposers=["PROPOSER_DRAFT"])
    asked = {"prompt": [1, 2], "speculative": way, **ASKED}
    texts = [planted.client.generate(**asked, max_tokens=count) for count in (300, EPOCH_MAX)]
    assert read_page(planted.page).value(refusals) == before + 1
    assert [len(text.token_ids) for text in texts] == [300, EPOCH_MAX]
    spent, after = (text.finished.statistics for text in texts)
    assert spent.num_spec_steps < spent.rounds / 2 and after.num_spec_steps
    tested = {pb.TOKEN_KIND_ACCEPTED, pb.TOKEN_KIND_RECOVERED}
    assert not tested & {*texts[0].kinds[-20:]} and tested & {*texts[1].kinds[-20:]}


def test_a_reader_that_pauses_gets_its_whole_text(planted: Planted) -> None:
    """Claim: a client that reads nothing while its text is generated, with 20 log-probabilities a token, gets all of it
    afterwards, in messages below its limit. Source: what was left undelivered became one message without a maximum,
    beyond the client's limit: the tail of the text never arrived.

    Conclusive: the text is complete before it is read, its merged tail is larger than the limit, beyond which the
    client's own gRPC refuses a message, and all of it equals the text of a client that reads.
    """
    count, counter = 3500, "vllm:generation_tokens_total"
    sampling = {"temperature": 0, "ignore_eos": True, "max_tokens": count, "logprobs": 20}
    end = read_page(planted.page).value(counter) + 2 * count
    options = [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 4096),  # little fits on the way
        ("grpc.max_receive_message_length", READER_BYTES_MAX),
    ]
    text, sizes = Outcome(), []
    with grpc.insecure_channel(planted.address, options=options) as channel:
        request = planted.client.request([1, 2], LONG, **sampling)
        paused = pb_grpc.CoordinatorServiceStub(channel).Generate(request, timeout=60)
        read = planted.client.generate([1, 2], speculative=LONG, **sampling)
        until(lambda: read_page(planted.page).value(counter) == end)
        for message in paused:
            planted.client.take(text, message)
            sizes.append((len(message.delta.token_ids), message.ByteSize()))
    tail = [size for token_count, size in sizes if token_count > 1 + LONG["num_speculative_tokens"]]
    assert len(tail) > 1 and sum(tail) > READER_BYTES_MAX
    assert len(text.token_ids) == count and text.comparable == read.comparable


def test_a_flood_waits_while_the_engine_works(planted: Planted) -> None:
    """Claim: while a step lasts, a stream that sends without end is not read beyond its bound: the target's memory
    stays, and the flood waits at its sender. Then a text beside it is as it is alone, and every item is answered.

    Source: the engine's inbox had no bound, so a stream filled the memory during one long step. Conclusive: the flood
    is 17 MB, the step lasts longer than reading all of it takes, and the memory is read when the step ends.
    """
    item = target_pb.VerifyItem(session=1, incarnation=1, base_position=1000, suffix_token_ids=[1] * 1000)
    data = target_pb.VerifyRequest(items=[{"verify": item}] * ITEM_COUNT).SerializeToString()
    sent_count = answered_count = 0
    is_over = threading.Event()

    def requests() -> Iterator[bytes]:
        nonlocal sent_count
        for _ in range(MESSAGE_COUNT):
            yield data
            sent_count += 1
        is_over.wait(60)

    def flood() -> None:
        nonlocal answered_count
        with grpc.insecure_channel(planted.target_address) as channel:
            for message in channel.stream_stream("/specdec.v1.TargetService/Verify")(requests(), timeout=60):
                answered_count += len(target_pb.VerifyResponse.FromString(message).items)
                if answered_count == MESSAGE_COUNT * ITEM_COUNT:
                    is_over.set()

    asked = {"max_tokens": 100, "seed": 3, "speculative": {"enabled": False}, **ASKED}
    with ThreadPoolExecutor(2) as pool:
        text = pool.submit(planted.client.generate, SLOW, **asked)
        assert planted.output.readline().strip() == SLOW_LINE
        before_mb = anonymous_mb(planted.pid)
        flooding = pool.submit(flood)
        assert planted.output.readline().strip() == FAST_LINE
        assert anonymous_mb(planted.pid) - before_mb < HELD_MB_MAX and sent_count < MESSAGE_COUNT
        beside = text.result(60)
        flooding.result(60)
    assert answered_count == MESSAGE_COUNT * ITEM_COUNT
    alone = planted.client.generate(SLOW, resume=beside.token_ids[:1], **asked)  # another prompt for the slow step
    assert beside.token_ids[1:] == alone.token_ids


class Occupier:
    """A stream that holds every place of a target and works in each, in rounds, until it is `over`."""

    def __init__(self) -> None:
        self.held, self.lost = set(range(1, PLACES + 1)), set[int]()
        self.round_count = 0
        self.over = threading.Event()

    def message(self, incarnation: int) -> bytes:
        params = {"rule": types_pb.RULE_COUPLED, "prompt_length": 1}
        fields = {"params": params, "length_max": 9, "vocabulary_size": VOCABULARY_SIZE}
        items = []
        for session in self.held:
            name = {"session": session, "incarnation": incarnation}
            items += [{"open": {**name, **fields}}, {"verify": {**name, "base_position": 1, "suffix_token_ids": [1]}}]
        return target_pb.VerifyRequest(items=items).SerializeToString()

    def run(self, address: str) -> None:
        """Every session that it holds must answer every round, or be named as lost."""
        requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        with grpc.insecure_channel(address) as channel:
            answers = channel.stream_stream("/specdec.v1.TargetService/Verify")(iter(requests.get, None), timeout=60)
            while not self.over.is_set():
                self.round_count += 1
                requests.put(self.message(self.round_count))
                waiting = set(self.held)
                while waiting:
                    for item in target_pb.VerifyResponse.FromString(next(answers)).items:
                        if item.HasField("result"):
                            waiting.discard(item.result.session)  # of a lost one that was opened again at once, too
                            continue
                        if item.HasField("missing_tokens"):  # or an error: a place that is asked for again is refused
                            assert item.missing_tokens.unknown
                            self.lost.add(item.missing_tokens.session)
                            self.held -= self.lost
                            waiting -= self.lost
            requests.put(None)


def test_a_stream_that_works_in_every_place_gives_up_those_beyond_its_share(planted: Planted) -> None:
    """Claim: a stream that holds all places of a target, and works in each without a pause, keeps a user out for a
    while and not for ever; it is told which of them ended, and works on in the others.

    Source: a stream could keep all places of a replica from others for ever. Conclusive: the user is refused before,
    and every session of the stream answers every round until the stream is told of its end.
    """
    occupier, refused_s = Occupier(), [0.0]

    def is_served() -> bool:
        try:
            planted.client.generate([1], max_tokens=3, speculative={"enabled": False}, **ASKED)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and "64 session slots" in error.details()
            refused_s.append(time.monotonic() - begun_s)
            return False
        return True

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(occupier.run, planted.target_address)
        begun_s = time.monotonic()
        until(lambda: occupier.round_count > 1 or working.done())
        until(is_served)
        until(lambda: bool(occupier.lost) or working.done())  # it reads its answers on a thread of its own
        occupier.over.set()
        working.result(60)
    assert refused_s[-1] > 0 and occupier.round_count > 5
    assert 0 < len(occupier.lost) < PLACES / 2
