"""Services on table models under readers, for proofs of the protocol: models that compute nothing, real processes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.engine.table_model import write_table_model
from specdec.v1 import coordinator_service_pb2_grpc as pb_grpc
from specdec.v1 import types_pb2 as types_pb
from tests.chaos.processes import Restartable
from tests.chaos.texts import Text, open_channel
from tests.support.ports import free_port

VOCABULARY_SIZE = 7
COMMON: dict[str, Any] = {"port": 0, "log_level": "error", "drain_grace_s": 1.0}
REPLICA: dict[str, Any] = {**COMMON, "threads": 1, "device": "cpu"}


@dataclass(slots=True)
class Tables:
    """The three services; `draft` None: whatever listens on `draft_port`."""

    target: Restartable
    draft: Restartable | None
    coordinator: Restartable
    draft_port: int

    def described(self) -> Any:
        """The coordinator's description of its replicas."""
        with open_channel(self.coordinator.address) as channel:
            return pb_grpc.CoordinatorServiceStub(channel).Describe(types_pb.DescribeRequest(), timeout=5)

    @property
    def has_draft(self) -> bool:
        """Whether the coordinator uses a draft now."""
        return bool(self.described().HasField("draft"))

    @property
    def has_target(self) -> bool:
        """Whether the coordinator answers and uses a target now."""
        with contextlib.suppress(grpc.RpcError):
            return bool(self.described().HasField("target"))
        return False


@contextlib.contextmanager
def tables(has_draft: bool = True, every: Mapping[str, Any] | None = None) -> Iterator[Tables]:
    """Starts them and stops them at the end; `every`: settings of all."""
    replica, common = {**REPLICA, **(every or {})}, {**COMMON, **(every or {})}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name, seed in (("target", 1), ("draft", 2)):
            write_table_model(folder / name, VOCABULARY_SIZE, seed=seed)
        draft_port = free_port()

        def begun(role: str, settings: Any) -> Restartable:
            service = Restartable(role, role, settings)
            stack.callback(service.stop)
            return service

        target = begun("target", TargetSettings(**replica, model=str(folder / "target")))
        settings = DraftSettings(**{**replica, "port": draft_port}, model=str(folder / "draft"))
        draft = begun("draft", settings) if has_draft else None
        target.wait_ready()
        if draft is not None:
            draft.wait_ready()
        own = {"tokenizer": str(folder / "target"), "target": target.address, "draft": f"127.0.0.1:{draft_port}"}
        common["target_wait_s"] = 0.0  # texts of the only target end with it: `fleet` has several
        serving = begun("coordinator", CoordinatorSettings(**{**common, **own}))
        serving.wait_ready()
        yield Tables(target, draft, serving, draft_port)


def table_texts(count: int, max_tokens: int) -> list[Text]:
    """Half GREEDY, half COUPLED."""
    return [
        Text((1 + number % 3, 2, number % 5), float(number % 2), 1000 + number, max_tokens, ignore_eos=True)
        for number in range(count)
    ]
