"""Stage `kernels`: the time of each kernel of a step, and the bytes it must read over it.

A step's launches are recorded while it runs, then those of one kernel and shape run one after another, captured. Each
reads weights of its own, or texts of its own, several times what the second cache holds, so that none finds them there,
as none does in a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from bench.gpu_session.card import l2_bytes
from bench.gpu_session.texts import Loaded, loaded, shapes_of
from bench.gpu_session.timing import each_us
from bench.gpu_session.worker import Session
from specdec.engine.cuda.kernels import attention, launch, norms, products, qkv
from specdec.engine.interface import Chunk, RaggedBatch

MODULES: tuple[Any, ...] = (attention, norms, products, qkv)
WITH_WEIGHT = ("product_kernel", "qkv_rope_kernel", "head_kernel")  # their second argument is one
COLD = 4  # times the second cache


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch, as `launch.launch` was called."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        """Launches again."""
        launch.launch(self.kernel, self.grid, *self.arguments, **self.options)

    @property
    def name(self) -> str:
        """The kernel, and the shape of its weight."""
        name: str = self.kernel.__name__
        own = name.removesuffix("_kernel")
        return own if self.weight is None else f"{own} {self.weight.shape[0]} x {self.weight.shape[1]}"

    @property
    def weight(self) -> torch.Tensor | None:
        """What a product reads."""
        return self.arguments[1] if self.kernel.__name__ in WITH_WEIGHT else None

    def elsewhere(self) -> Launch:
        """The same with a copy of the weight."""
        x, weight, *others = self.arguments
        return replace(self, arguments=(x, weight.clone(), *others))


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within it, launches of a step are made and recorded. A record has the step's indices for itself: the next step
    writes its own to the same memory."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        Launch(kernel, grid, arguments, options).run()
        own = tuple(each.clone() if is_index(each) else each for each in arguments)
        launches.append(Launch(kernel, grid, own, options))

    with ExitStack() as patches:
        for module in MODULES:
            patches.enter_context(mock.patch.object(module, "launch", record))
        yield launches


def is_index(argument: Any) -> bool:
    """Whether an argument is a tensor of integers."""
    return isinstance(argument, torch.Tensor) and argument.dtype in (torch.int32, torch.int64)


def run(session: Session) -> None:
    """Reports each kernel of a step of one row and of eight: `us` of one launch, and how many a step has."""
    for shape in shapes_of(session):
        own = loaded(session, shape)
        with own.not_captured():
            for rows in (1,) if session.is_small else (1, 8):
                measure(session, own, rows)


@torch.inference_mode()
def measure(session: Session, own: Loaded, rows: int) -> None:
    """Records a step of each of several texts, and times their launches kernel by kernel."""
    texts = own.texts
    cold_bytes = COLD * l2_bytes(session.device)
    context_bytes = texts.context * own.model.cache_bytes_per_position
    count = min(texts.count, 1 + cold_bytes // context_bytes)
    steps = [launches_of(own, index, rows) for index in range(count)]
    groups: dict[str, list[Launch]] = {}
    for one in steps[0]:
        groups.setdefault(one.name, []).append(one)
    if not groups:
        raise ValueError(f"a step of {own.shape.name} launches no kernel of ours")
    for name, launches in groups.items():
        timed, each_bytes, weight = launches, 0, launches[0].weight
        if weight is not None:
            each_bytes = weight.nbytes
            timed = [*launches, *(launches[0].elsewhere() for _ in range(cold_bytes // each_bytes - len(launches) + 1))]
        elif name in ("attend", "combine"):
            timed = [each for step in steps for each in step if each.name == name]
            each_bytes = context_bytes // len(launches) if name == "attend" else 0
        us = each_us(session.device, [each.run for each in timed], session.rounds)
        its = {"launches": len(launches), "us": us, "bytes": each_bytes}
        session.add(model=own.shape.name, rows=rows, kernel=name, **its, is_cold=each_bytes * len(timed) >= cold_bytes)


def launches_of(own: Loaded, index: int, rows: int) -> Sequence[Launch]:
    """The launches of a step of one text."""
    texts, start = own.texts, own.texts.context
    chunk = Chunk(texts.tables[index], start, texts.ids[start : start + rows], rows)
    with recorded() as launches:
        own.model.forward(RaggedBatch((chunk,)))
    return launches
