"""Whether captured steps may launch dependently is found by replaying them: kernels that read too early are found."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch

from specdec.engine.cuda import dependent
from specdec.engine.cuda import step as step_module
from specdec.engine.cuda.backend import DeviceBackend
from specdec.engine.cuda.graphs import RepeatedCall
from specdec.engine.cuda.kernels import launch
from specdec.engine.cuda.plan import StepShape
from specdec.engine.interface import RaggedBatch
from tests.cuda.test_step import PRODUCT, driver_of
from tests.support.engine_models import random_tokens
from tests.support.interpreter import interpreted

SHAPE = StepShape(3, 3, 3, 3, 64)


@contextmanager
def lines_of_the_log() -> Iterator[list[str]]:
    """What the engine warns of."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("specdec.engine")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def agree(early_replay: int | None) -> bool:
    """Whether a step of two kernels is found to be the same: in one replay of the dependent one, the second reads what
    the first will write before it is written."""
    state, between, out = torch.zeros(3), torch.zeros(3), torch.full((3,), torch.nan)
    replays = 0

    def run(is_on: bool) -> None:
        nonlocal replays
        replays += is_on
        steps = [lambda: torch.mul(state, 3, out=between), lambda: torch.add(between, 1, out=out)]
        for step in reversed(steps) if is_on and replays == early_replay else steps:
            step()

    def feed(batch: RaggedBatch) -> None:
        state.copy_(torch.tensor(batch.chunks[0].token_ids))

    texts = dependent.two_texts(SHAPE, range(1, 3), 64)
    return dependent.replays_agree(lambda is_on: RepeatedCall(lambda: run(is_on)), feed, lambda: (out,), texts)


def test_one_early_read_in_many_replays_is_found() -> None:
    """Claim: a step that reads too early in one replay of those tried is found, the last one too; one that never does
    is not.

    Conclusive: memory that was not written yet holds what the other text left, as on a GPU: with one text it would hold
    the right numbers, of the replay before.
    """
    assert agree(None)
    for replay in (1, 2, dependent.REPLAYS, 2 * dependent.REPLAYS):
        assert not agree(replay)
    first, second = dependent.two_texts(SHAPE, range(1, 3), 64)
    assert all(ours != theirs for ours, theirs in zip(first.chunks[0].token_ids, second.chunks[0].token_ids))
    assert first.chunks[0].block_ids == second.chunks[0].block_ids


def test_other_bits_and_errors_turn_it_off_with_one_line() -> None:
    """Claim: where replays differ, or the device refuses, dependent launch is off, and one line says why."""

    def refusing() -> bool:
        raise RuntimeError("operation not supported\nand a long explanation")

    reasons = {"other bits than without": lambda: False, "RuntimeError: operation not supported": refusing}
    for reason, tried in reasons.items():
        with lines_of_the_log() as lines:
            assert not dependent.tried(tried, torch.device("cuda", 0))
        assert (
            len(lines) == 1 and lines[0].startswith("dependent launch is off on cuda:0") and lines[0].endswith(reason)
        )
    with lines_of_the_log() as lines:
        assert dependent.tried(lambda: True, torch.device("cuda", 0)) and not lines


def test_only_newer_gpus_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: no CPU and no GPU below compute capability 9.0 is tried."""
    assert not dependent.is_supported(torch.device("cpu"))
    for capability, is_new in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((12, 0), True)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, its=capability: its)
        assert dependent.is_supported(torch.device("cuda", 0)) == is_new


def other_bits(*arguments: object, **options: object) -> None:
    """A product that launched dependently is off by a rounding in one number of each row."""
    PRODUCT(*arguments, **options)
    if launch.is_dependent.get():
        _, _, out, rows = arguments
        out[:rows, 0] *= 1 + torch.finfo(out.dtype).eps


@pytest.mark.more
@pytest.mark.parametrize("broken", [None, other_bits])
@interpreted
def test_captured_steps_launch_dependently_where_nothing_changes(broken: Callable[..., None] | None) -> None:
    """Claim: the engine tries captured steps at its first forward, and launches them dependently if they have the same
    bits, else not; either way a text has the bits of steps that are not captured, and the blocks tried on are zeros.
    """
    text, supported = random_tokens(5, 1), mock.patch.object(dependent, "is_supported", lambda _: True)
    product = mock.patch.object(step_module, "product", broken or PRODUCT)
    with supported, product, mock.patch.object(dependent, "REPLAYS", 1), lines_of_the_log() as lines:
        driver = driver_of("shallow", "bfloat16", with_graphs=True)
        backend = driver.model.backend
        assert isinstance(backend, DeviceBackend) and backend._storage is not None
        assert backend.is_dependent == (broken is None) and len(lines) == bool(broken)
        assert not any(layer[:, 2:-1].any() for layer in backend._storage.layers)  # the last is for padding
        table = driver.open(8)
        found = torch.cat([driver.feed(table, [token]).clone() for token in text])
    plain = driver_of("shallow", "bfloat16")
    assert torch.equal(found, plain.feed(plain.open(8), text))
