"""Stage `steps`: whole steps, from the batch to the tokens on the host, and the forward alone.

Of one text in 1 to 8 rows, a tree, several texts, a long one, a prompt; with dependent launch and without, and by
modules where there is no step of our own kernels.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from bench.gpu_session.texts import PROMPT, Loaded, loaded, shapes_of
from bench.gpu_session.timing import WARM, device_s, host_s
from bench.gpu_session.worker import Session
from specdec.decoding.verification import VerificationRequest, verify
from specdec.engine.cuda import dependent
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths
from specdec.protocol.types import ResolvedSamplingParams, Rule

REPLAYS = 400  # of two texts in turns
FORWARDS = 8  # in a row, to time the forward alone
PARENTS = (0, 1, 2, 2, 1, 0, 5)  # of seven nodes behind a first row, on four paths
GREEDY = ResolvedSamplingParams(Rule.GREEDY, seed=0, prompt_length=1, temperature=0.0)


class Step(NamedTuple):
    """Texts of a step, rows of each, whether these are a tree, and whether the text is the long one."""

    texts: int
    rows: int
    is_tree: bool = False
    is_long: bool = False


CHAINS = tuple(Step(1, rows) for rows in range(1, 9))
TREE = Step(1, 1 + len(PARENTS), is_tree=True)
STEPS = (*CHAINS, TREE, Step(1, 1, is_long=True), Step(8, 5))
FEW = (Step(1, 1), Step(1, 8))
SMALL_STEPS = (Step(1, 1), Step(1, 8), TREE, Step(1, 1, is_long=True), Step(2, 2))


def run(session: Session) -> None:
    """Reports medians in milliseconds: `step_ms` with the sampler, under GREEDY; `forward_ms` of the device alone.
    `bytes`: weights and the texts' cache, read once."""
    steps = SMALL_STEPS if session.is_small else STEPS
    for shape in shapes_of(session):
        own = loaded(session, shape)
        for step in steps:
            report(session, own, step, way="kernels", dependent_launch=False)
        report_prompt(session, own, "kernels")
        if has_dependent_launch(session):
            with dependent_launch(session, own):
                for step in steps:
                    report(session, own, step, way="kernels", dependent_launch=True)
    for shape in shapes_of(session):
        own = loaded(session, shape, by_modules=True)
        for step in FEW:
            report(session, own, step, way="modules", dependent_launch=False)
        report_prompt(session, own, "modules")


def has_dependent_launch(session: Session) -> bool:
    """Whether a kernel can begin before the one before it has ended."""
    return session.is_small or dependent.is_supported(session.device)


@contextmanager
def dependent_launch(session: Session, own: Loaded) -> Iterator[None]:
    """Within it steps are captured with dependent launch. Reports how many of many replays have the bits of a step
    without: texts take turns, so that what a kernel reads too early is another's."""
    batches = [own.texts.batch(count, 8 // count) for count in (1, 2)]
    wanted = [own.model.forward(batch).logits.clone() for batch in batches]
    own.backend.is_dependent = True
    try:
        own.texts.allocate()
        replays = 2 if session.is_small else REPLAYS
        turns = (place for turn in range(replays) for place in [turn % 2])
        equal = sum(torch.equal(own.model.forward(batches[place]).logits, wanted[place]) for place in turns)
        session.add(check="replays with dependent launch", model=own.shape.name, rows=replays, equal=equal)
        yield
    finally:
        own.backend.is_dependent = False
        own.texts.allocate()


def report(session: Session, own: Loaded, step: Step, **about: Any) -> None:
    """Times one shape of step."""
    texts, params = own.texts, GREEDY
    paths = tree_paths(PARENTS, texts.context + 1) if step.is_tree else ()
    batch = texts.batch(step.texts, step.rows, paths, step.is_long)
    parents = PARENTS if step.is_tree else ()
    step_ms, forward_ms = times_ms(session, own, batch, params, parents)
    context = texts.long if step.is_long else texts.context
    session.add(
        model=own.shape.name,
        **about,
        texts=step.texts,
        rows=step.rows,
        paths=4 if step.is_tree else 1,
        context=context,
        is_long=step.is_long,
        step_ms=step_ms,
        forward_ms=forward_ms,
        bytes=own.model.product_bytes + step.texts * context * own.model.cache_bytes_per_position,
    )


def times_ms(
    session: Session, own: Loaded, batch: RaggedBatch, params: ResolvedSamplingParams, parents: tuple[int, ...] = ()
) -> tuple[float, float]:
    """Medians of a step of equal verifications with its sampler, and of its forward on the device."""
    start, ids = batch.chunks[0].start, batch.chunks[0].token_ids
    request = VerificationRequest(params, 0, own.texts.ids[:start], tuple(ids[1:]), parents=parents)
    requests = [request] * len(batch.chunks)
    counts = [len(ids)] * len(requests)

    def whole() -> None:
        output = own.model.forward(batch)
        verify(requests, counts, output.logits, output.readback)

    # Several in a row: while the device runs one, the host plans the next, so only the device's time is left.
    repeats = 1 if session.is_small else FORWARDS
    step_s, forward_s = [], []
    for _ in range(session.rounds + (0 if session.is_small else WARM)):
        step_s.append(host_s(whole))
        forward_s.append(device_s(session.device, lambda: [own.model.forward(batch) for _ in range(repeats)]) / repeats)
    step_ms, forward_ms = (statistics.median(times[-session.rounds :]) * 1e3 for times in (step_s, forward_s))
    return step_ms, forward_ms


def report_prompt(session: Session, own: Loaded, way: str) -> None:
    """Times a prompt's step: many rows, logits of the last."""
    rows = 16 if session.is_small else PROMPT
    texts = own.texts
    batch = RaggedBatch((Chunk(texts.tables[-1], 0, texts.ids[:rows], 1),))
    times_s = [device_s(session.device, lambda: own.model.forward(batch)) for _ in range(session.rounds)]
    session.add(model=own.shape.name, way=way, prompt_rows=rows, forward_ms=statistics.median(times_s) * 1e3)
