"""Services whose log lines have no reader: real processes on real descriptors. Texts, health and links do not depend on
them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.config import CoordinatorSettings, TargetSettings, split_address
from specdec.launch.children import Child, arguments_of, wait_all_ready
from tests.support.pages import free_address, read_page
from tests.support.services import Client, Outcome
from tests.support.waiting import until

PROMPT, TEXTS = [1, 2, 3], 45
ASKED = {"max_tokens": 4, "temperature": 1, "seed": 5, "ignore_eos": True}
LONG = {**ASKED, "max_tokens": 450}
PIPE_BYTES = 4096  # a page, the least: full after some ten texts
STATES = health_pb2.HealthCheckResponse


@contextlib.contextmanager
def standard_errors() -> Iterator[dict[str, int]]:
    """Descriptors that take no line: a pipe without a reader, one that is never read, a full disk."""
    with contextlib.ExitStack() as stack:
        (gone, unheard), (unread, unread_end) = os.pipe(), os.pipe()
        fcntl.fcntl(unread_end, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        os.close(gone)
        full = os.open("/dev/full", os.O_WRONLY)
        for descriptor in (unheard, unread, unread_end, full):
            stack.callback(os.close, descriptor)
        yield {"gone": unheard, "unread": unread_end, "full": full}


def health(client: Client) -> int:
    request = health_pb2.HealthCheckRequest()
    return health_pb2_grpc.HealthStub(client.channel).Check(request, timeout=10).status


@pytest.mark.more
def test_readers_of_log_lines_that_stop_reading_cost_lines_only(table_models: tuple[Path, Path]) -> None:
    """Claim: with standard error without a reader, unread or on a full disk, at the default level, texts are generated
    as with a reader; a target killed after that ends a text with UNAVAILABLE and health is NOT_SERVING; restarted, it
    is connected again; SIGTERM ends each service with exit code 0; the lines that are lost are counted on the page. Nor
    do stacks, which SIGUSR1 asks for, stop a service.

    Source: each generation ended UNKNOWN with the log's exception, an unread pipe stopped the event loop after nine
    texts, and a link whose line could not be written was never up again. Conclusive: real processes on such
    descriptors, each of which gets several lines for every text, more than a pipe of one page holds.
    """
    with standard_errors() as errors, contextlib.ExitStack() as stack:
        common = {"model": str(table_models[0]), "threads": 1}
        target = stack.enter_context(
            Child("target", arguments_of(TargetSettings(port=0, **common)), stderr=errors["unread"])
        )
        address = target.wait_ready()
        pages, coordinators, clients = {}, {}, {}
        for name, error in errors.items():
            pages[name] = free_address()
            own = CoordinatorSettings(
                port=0,
                target=address,
                target_wait_s=0.0,
                tokenizer=str(table_models[0]),
                metrics_address=pages[name],
                drain_grace_s=5.0,
            )
            coordinators[name] = stack.enter_context(Child("coordinator", arguments_of(own), stderr=error))
        wait_all_ready([*coordinators.values()])
        for name, child in coordinators.items():
            clients[name] = Client(child.address)
            stack.callback(clients[name].close)
        expected = clients["gone"].generate(PROMPT, **ASKED).comparable
        for client in clients.values():
            outcomes = client.generate_all([{"prompt": PROMPT, **ASKED}] * TEXTS, width=4)
            assert [outcome.comparable for outcome in outcomes] == [expected] * TEXTS

        for child in (target, coordinators["unread"]):
            child.signal(signal.SIGUSR1)  # the stacks of all threads, from a signal handler
        running = {
            name: iter(client.stub.Generate(client.request(PROMPT, **LONG), timeout=60))
            for name, client in clients.items()
        }
        for responses in running.values():
            assert next(responses).HasField("started")
        target.signal(signal.SIGKILL)
        for name, responses in running.items():
            with pytest.raises(grpc.RpcError) as caught:
                for response in responses:
                    clients[name].take(Outcome(), response)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and "resume" in caught.value.details()
            until(lambda name=name: health(clients[name]) == STATES.NOT_SERVING)
        target.stop()
        settings = TargetSettings(port=split_address(address)[1], **common)
        stack.enter_context(Child("target", arguments_of(settings), stderr=errors["unread"])).wait_ready()
        for name, client in clients.items():
            until(lambda client=client: health(client) == STATES.SERVING)
            assert client.generate(PROMPT, **ASKED).comparable == expected
            assert read_page(pages[name]).value("specdec_log_lines_dropped_total") > 0 or name == "unread"
        began_s = time.monotonic()
        for child in coordinators.values():
            child.request_stop()
        assert [child.stop(30.0) for child in coordinators.values()] == [0, 0, 0]
        assert time.monotonic() - began_s < 20.0
