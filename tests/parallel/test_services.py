"""A target of several ranks behind the real services, on one machine and on two."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from specdec.config import ServeSettings, TargetSettings
from specdec.launch.children import Child, start
from specdec.v1 import target_service_pb2_grpc as target_grpc
from specdec.v1 import types_pb2 as types_pb
from tests.sameness.generations import TREES
from tests.support.encoder_decoder_models import make_encoder_decoder
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL, heldout_prompts
from tests.support.ports import free_port
from tests.support.services import MODELS, SHAPES, fixed, running

LOOPBACK = ("0100007F", "00000000000000000000000001000000", "0000000000000000FFFF00000100007F")

RANKED_SHAPES = {
    # These two alone, since a text said before is surer.
    **{name: fixed(7, proposers=[name]) for name in ("PROPOSER_NGRAM", "PROPOSER_HEADS")},
    **{name: SHAPES[name] for name in ("chain", "tree", "siblings", "waiting siblings", "all proposers")},
    "all proposers, heads": TREES["all proposers, heads"],
}


def listening_beyond_loopback(pid: int) -> list[str]:
    """Local addresses of a process's listening TCP sockets that other machines could reach."""
    sockets = set()
    for file in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            sockets.add(os.readlink(file))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            address, state, inode = fields[1], fields[3], fields[9]
            if state == "0A" and f"socket:[{inode}]" in sockets and address.split(":")[0] not in LOOPBACK:
                found.append(address)
    return found


def describe(address: str) -> types_pb.DescribeResponse:
    """The description of a target."""
    with grpc.insecure_channel(address) as channel:
        return target_grpc.TargetServiceStub(channel).Describe(types_pb.DescribeRequest(), timeout=5)


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(("chain", "tree"), marks=[pytest.mark.more, pytest.mark.lengthy]),
        pytest.param(tuple(RANKED_SHAPES), marks=pytest.mark.slow, id="all"),
    ],
)
def test_on_and_off_say_the_same_text_over_ranks(shapes: tuple[str, ...]) -> None:
    """Claim (reliability table): at a fixed tensor-parallel degree speculation changes no token.

    Conclusive: the shipped pair with a target of two ranks and its heads; greedy and coupled, chains and trees, with
    siblings and with every proposer, against off. Of all shapes some rounds verified several paths, and tokens of each
    proposer passed.
    """
    prompts = list(heldout_prompts().values())[:2]
    target = {"tensor_parallel_size": 2, "heads": str(MODELS / "target-heads")}
    statistics = []
    with running(TARGET_MODEL, DRAFT_MODEL, threads=1, target=target) as services:
        for prompt in prompts:
            for sampling in ({"temperature": 0}, {"temperature": 1, "seed": 11}):
                asked = {"prompt": prompt, "max_tokens": 40, **sampling}
                expected = services.client.generate(**asked, speculative=SHAPES["off"])
                assert expected.started.numerics.tensor_parallel_size == 2
                for shape in shapes:
                    prediction = expected.token_ids if "proposers" in shape else ()
                    own = {"speculative": RANKED_SHAPES[shape], "prediction": prediction}
                    outcome = services.client.generate(**asked, **own)
                    assert outcome.comparable == expected.comparable, (shape, sampling)
                    statistics.append(outcome.finished.statistics)
    if len(shapes) < len(RANKED_SHAPES):
        return
    assert sum(own.num_paths for own in statistics) > sum(own.num_spec_steps for own in statistics)
    for name in ("model", "ngram", "suffix", "prediction", "heads"):
        assert sum(getattr(own, f"num_{name}_accepted_tokens") for own in statistics), name


@pytest.mark.more
def test_two_machines_of_two_ranks_are_one_target(tiny_folder: Callable[..., Path]) -> None:
    """Claim: `--nnodes 2` is started once on each machine, the first serves, all end together, and ranks listen on
    the address they were given only.

    Conclusive: two process trees that share nothing but loopback; the service says four ranks; listening sockets are
    read from the kernel.
    """
    common = {"model": str(tiny_folder("llama")), "tensor_parallel_size": 4, "nnodes": 2, "threads": 1, "port": 0}
    port = free_port()
    machines: list[Child] = []
    try:
        for node_rank in (1, 0):
            machines.append(start("target", TargetSettings(**common, node_rank=node_rank, master_port=port)))
        follower, server = machines
        assert describe(server.wait_ready()).numerics.tensor_parallel_size == 4
        assert not listening_beyond_loopback(server.process.pid)
        assert not listening_beyond_loopback(follower.process.pid)
        server.request_stop()
        assert (server.process.wait(20), follower.process.wait(20)) == (0, 0)
    finally:
        for machine in machines:
            machine.stop(0.0)


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "rank_count", "said"),
    [
        ("llama", 3, "num_attention_heads is 4"),
        ("t5", 2, "an encoder-decoder model runs in one process, so --tensor-parallel-size must be 1: "),
    ],
)
def test_a_refusal_is_reported_in_one_line(
    kind: str, rank_count: int, said: str, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Claim: a model that cannot be split ends the command with its reason, and no rank remains."""
    folder = tiny_folder(kind) if kind == "llama" else make_encoder_decoder(tmp_path / kind, kind)
    with start("target", TargetSettings(model=str(folder), tensor_parallel_size=rank_count, port=0)) as child:
        with pytest.raises(Exception, match=said):
            child.wait_ready()
        assert child.process.wait(5) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor_parallel_size": 3, "nnodes": 2, "master_port": 1}, "multiple of --nnodes 2"),
        ({"tensor_parallel_size": 2, "nnodes": 2}, "--master-port"),
        ({"node_rank": 1}, "below --nnodes 1"),
        ({"tensor_parallel_size": 2, "master_addr": "10.1.2.3"}, "--insecure-ranks"),
        ({"tensor_parallel_size": 2, "master_addr": "10.1.2.3", "insecure": True}, "--insecure-ranks"),
    ],
)
def test_places_that_cannot_be_are_refused(given: dict, said: str) -> None:
    """Claim: ranks with an invalid placement or unprotected links are refused before anything starts."""
    with pytest.raises(ValueError, match=said):
        TargetSettings(model="m", **given)
    assert TargetSettings(model="m", tensor_parallel_size=2, master_addr="10.1.2.3", insecure_ranks=True)


def test_serve_passes_the_ranks_on() -> None:
    """Claim: `specdec serve -tp 2` splits its target, and shares the target's threads among the ranks."""
    settings = ServeSettings(tensor_parallel_size=2)
    assert settings.target_settings().tensor_parallel_size == 2
    assert settings.target_settings().threads == max(1, settings.draft_settings().threads // 2)
