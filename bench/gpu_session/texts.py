"""Models in the worker's process, each with a cache of texts that all stages use."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from unittest import mock

import torch

from bench.gpu_models import EIGHT_B, ONE_B, Shape, engine_model, plain_model
from bench.gpu_session.timing import host_s
from bench.gpu_session.worker import Session
from specdec.engine.cuda import backend as backend_module
from specdec.engine.cuda.backend import DeviceBackend
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.loading.devices import default_block_size
from specdec.engine.transformers_model import TransformersModel

TINY = Shape("tiny", 64, 1, 2, 1, 128, 256, is_tied=False, positions=192)
PROMPT = 512  # rows of a prompt's step


def shapes_of(session: Session) -> tuple[Shape, ...]:
    """The models of a session."""
    return (TINY,) if session.is_small else (ONE_B, EIGHT_B)


def dtype_of(session: Session) -> torch.dtype:
    """The models' type: Triton's interpreter does not round to bfloat16 as a device does."""
    return torch.float16 if session.is_small else torch.bfloat16


def random_ids(count: int, vocabulary: int, seed: int = 1) -> list[int]:
    """Tokens of a text."""
    return torch.randint(1, vocabulary, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


class Texts:
    """A cache of `count` texts of `context` tokens, and of a last one of `long` tokens, each in its own blocks.

    `allocate` makes it, and fills all texts; what is captured is captured again at the next step.
    """

    def __init__(self, model: TransformersModel, count: int, context: int, long: int, more: int):
        """`more`: positions behind a text's tokens."""
        self.model = model
        self.count, self.context, self.long = count, context, long
        self._block_size = default_block_size(model.backend.device)
        blocks = [-(-(length + more) // self._block_size) for length in (*[context] * count, long)]
        starts = [1 + sum(blocks[:index]) for index in range(len(blocks) + 1)]
        self.tables = [range(start, end) for start, end in zip(starts, starts[1:])]
        self.ids = random_ids(long + more, model.description.vocabulary_size)

    def allocate(self) -> float:
        """Makes the cache anew; returns the seconds of the first step, in which steps are captured."""
        self.model.allocate(self.tables[-1].stop, self._block_size)
        first_s = host_s(lambda: self.feed(0, 0, 1))
        for index in range(self.count):
            self.feed(index, 0, self.context)
        self.feed(self.count, 0, self.long)
        return first_s

    def feed(self, index: int, start: int, end: int, width: int = PROMPT) -> list[torch.Tensor]:
        """Runs a text's tokens from `start` to below `end`, `width` in a step; returns the logits of the last row of
        each step."""
        found = []
        for first in range(start, end, width):
            chunk = Chunk(self.tables[index], first, self.ids[first : min(end, first + width)], 1)
            found.append(self.model.forward(RaggedBatch((chunk,))).logits.clone())
        return found

    def batch(self, count: int, rows: int, paths: Sequence[Sequence[int]] = (), is_long: bool = False) -> RaggedBatch:
        """The next `rows` tokens of `count` texts, or of the long one, all with logits. `paths`: of a tree in them."""
        start = self.long if is_long else self.context
        tables = self.tables[-1:] if is_long else self.tables[:count]
        return RaggedBatch(tuple(Chunk(each, start, self.ids[start : start + rows], rows, paths) for each in tables))


@contextmanager
def without_kernels() -> Iterator[None]:
    """Within it models are made without kernels of our own, whole steps and single parts."""
    with (
        mock.patch.object(backend_module, "device_step", lambda *_: None),
        mock.patch.object(backend_module, "have_kernels", lambda *_: False),
    ):
        yield


class Loaded:
    """A model of a shape in the engine, and its texts. `load_s`: seconds to make the engine's model of modules, its
    checks at loading included; `first_s`: of the first step, in which steps are captured."""

    def __init__(self, session: Session, shape: Shape, by_modules: bool):
        is_small, device = session.is_small, session.device
        self.shape = shape
        plain = plain_model(shape, device, dtype_of(session))
        started_s = time.perf_counter()
        with without_kernels() if by_modules else nullcontext():
            self.model = engine_model(plain, device, 2 if is_small else 64)
        self.load_s = time.perf_counter() - started_s
        self.backend.is_dependent = False  # until a stage asks for it
        # A small cache has too few blocks for the measurement of the drift, which takes the interpreter long.
        sizes = (2, 20, 40, 20) if is_small else (8, 480, 8192, PROMPT)
        self.texts = Texts(self.model, *sizes)
        self.first_s = self.texts.allocate()

    @contextmanager
    def not_captured(self) -> Iterator[None]:
        """Within it no step is captured."""
        self.backend.with_graphs = False
        try:
            self.texts.allocate()
            yield
        finally:
            self.backend.with_graphs = True
            self.texts.allocate()

    @property
    def backend(self) -> DeviceBackend:
        """The model's."""
        assert isinstance(self.model.backend, DeviceBackend)
        return self.model.backend


@functools.cache
def loaded(session: Session, shape: Shape, by_modules: bool = False) -> Loaded:
    """Returns a model of the session, made once in a process. `by_modules`: without a step of our own kernels."""
    return Loaded(session, shape, by_modules)
