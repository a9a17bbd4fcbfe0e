"""Log lines of three real processes: each names its request, and none contains a user's text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.engine.table_model import write_table_model
from specdec.launch.children import Child, arguments_of, wait_all_ready
from tests.support.services import Client, fixed

# Lines that are about the process or a link, not about a request.
ABOUT_NONE = {
    "startup",
    "serving",
    "stopped",
    "link up",
    "link down",
    "the cache holds less than one session of full length",
    "vocabulary",
}
SECRET = "Zebrafinch"
REQUESTS = 4


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, list[dict]], list[Any], list[str]]]:
    """Lines of the three services, by service, for generations that preempt each other; their first messages, and the
    trace ids of two refused requests."""
    folder = tmp_path_factory.mktemp("logs")
    write_table_model(folder / "target", 7, seed=1)
    write_table_model(folder / "draft", 7, seed=2)
    common: dict[str, Any] = {"port": 0, "log_level": "debug", "drain_grace_s": 1.0}
    # Space for two texts and a half: younger sessions are preempted by older ones and read again.
    small = {"kv_cache_bytes": 1 << 12, "block_size": 8, "threads": 1}
    target = TargetSettings(model=str(folder / "target"), **common, **small)
    draft = DraftSettings(model=str(folder / "draft"), threads=1, max_model_len=16, **common)
    files = {name: (folder / f"{name}.log").open("w+") for name in ("target", "draft", "coordinator")}
    started, refused = [], []
    with Child("target", arguments_of(target), stderr=files["target"]) as main:
        with Child("draft", arguments_of(draft), stderr=files["draft"]) as guess:
            wait_all_ready([main, guess])
            own = CoordinatorSettings(
                target=main.address, draft=guess.address, tokenizer=str(folder / "target"), **common
            )
            with Child("coordinator", arguments_of(own), stderr=files["coordinator"]) as coordinator:
                coordinator.wait_ready()
                started, refused = generate(coordinator.address)
    lines = {}
    for name, file in files.items():
        file.seek(0)
        lines[name] = [json.loads(line) for line in file]
        file.close()
    yield lines, started, refused


def generate(address: str) -> tuple[list[Any], list[str]]:
    """Some generations at a time, and requests that are refused: for a field, and by the target."""
    client = Client(address)
    asked: dict[str, Any] = {
        "max_tokens": 200,
        "temperature": 1,
        "seed": 5,
        "ignore_eos": True,
        "stop": [SECRET],
        "cache_salt": SECRET,
    }
    # A fixed plan, since the policy may measure that the draft is of no use and open no session there.
    asked["speculative"] = fixed(2, draft_wait_ms=0)
    outcomes = client.generate_all([{"prompt": "<1><2><3>", **asked} for _ in range(REQUESTS)], width=REQUESTS)
    refused = []
    for index, more in enumerate(({"top_p": 7.0}, {"temperature": -1})):
        trace_id = f"{index + 1:032x}"
        request = client.request(SECRET, **{**asked, **more})
        context = (("traceparent", f"00-{trace_id}-{1:016x}-00"),)
        with pytest.raises(grpc.RpcError):
            list(client.stub.Generate(request, timeout=30, metadata=context))
        refused.append(trace_id)
    client.close()
    return [(outcome.started, outcome.finished) for outcome in outcomes], refused


def test_every_line_about_a_request_says_whose_it_is(logged):
    """Claim: in all three services every line that is not about the process itself carries a trace id, the one of a
    response or of a refused request, and at replicas and for admitted requests the session."""
    lines, started, refused = logged
    ids = {finished.trace_id for _, finished in started}
    assert len(ids) == REQUESTS
    for service, found in lines.items():
        about = [line for line in found if line["event"] not in ABOUT_NONE]
        assert all(line["service"] == service for line in found)
        for line in about:
            assert line["trace_id"] in ids | set(refused), line
            assert "session" in line or line["trace_id"] in refused, line
        assert any(line["trace_id"] in ids for line in about), f"the {service} said nothing about a request"


def test_each_request_begins_and_ends_in_the_coordinators_log(logged):
    """Claim: every admitted request has one line when it begins and one when it ends, with its outcome; a refused one
    has the latter; sessions of two requests differ."""
    lines, started, refused = logged
    begun = {line["trace_id"]: line for line in lines["coordinator"] if line["event"] == "generation"}
    ended = {line["trace_id"]: line for line in lines["coordinator"] if line["event"] == "generation ended"}
    assert begun.keys() == {finished.trace_id for _, finished in started}
    assert ended.keys() == begun.keys() | set(refused)
    assert {ended[trace_id]["outcome"] for trace_id in begun} == {"length"}
    assert {ended[trace_id]["outcome"] for trace_id in refused} == {"INVALID_FIELD"}
    assert len({line["session"] for line in begun.values()}) == REQUESTS
    assert all(ended[trace_id]["session"] == line["session"] for trace_id, line in begun.items())


def test_nothing_a_user_wrote_is_in_a_line(logged):
    """Claim: prompts, stop strings and salts are in no line of any service, at the most talkative level."""
    lines, _, _ = logged
    assert {"session preempted", "session opened again"} <= {line["event"] for line in lines["target"]}
    assert "item refused" in {line["event"] for line in lines["draft"]}, "its context is too short for these texts"
    assert SECRET not in json.dumps(lines) and "<1><2>" not in json.dumps(lines)
