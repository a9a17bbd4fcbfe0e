"""Stage `host`: planning a step and sending the plan, and what sampled rules add to a step.

Plans are those of a cache of blocks of 256 positions, 480 tokens before the rows. Without a GPU the copy is one within
the host's memory; these times mean something on any machine.
"""

from __future__ import annotations

from dataclasses import replace

from bench.gpu_session.steps import GREEDY, times_ms
from bench.gpu_session.texts import loaded, shapes_of
from bench.gpu_session.timing import host_us
from bench.gpu_session.worker import Session
from specdec.engine.cuda import step_plan
from specdec.engine.cuda.items import GROUP_ROWS, ItemLayout
from specdec.engine.cuda.plan import StepBuffer, StepShape, exact_shape
from specdec.engine.cuda.step_plan import ItemBuffer
from specdec.engine.interface import Chunk, RaggedBatch
from specdec.protocol.types import Rule

START, BLOCK_SIZE, BLOCKS_EACH = 480, 256, 3
PLANS = ((1, 1), (1, 8), (8, 5), (32, 4))  # texts, rows of each
PLAN_ROUNDS = 500
SAMPLED = replace(GREEDY, rule=Rule.COUPLED, temperature=0.7)
RULES = {
    "GREEDY": GREEDY,
    "COUPLED": SAMPLED,
    "COUPLED, top-p 0.95": replace(SAMPLED, top_p=0.95),
    "COUPLED, top-k 40, top-p 0.95, repetition 1.1": replace(SAMPLED, top_k=40, top_p=0.95, repetition_penalty=1.1),
    "REJECTION, top-p 0.95": replace(SAMPLED, rule=Rule.REJECTION, top_p=0.95),
}


def run(session: Session) -> None:
    """Reports medians: `fill_us` and `send_us` of plans, `step_ms` and `forward_ms` of one row under each rule."""
    for count, rows in PLANS:
        report_plan(session, count, rows)
    for shape in shapes_of(session):
        own = loaded(session, shape)
        batch = own.texts.batch(1, 1)
        for name, params in RULES.items():
            step_ms, forward_ms = times_ms(session, own, batch, params)
            session.add(model=shape.name, rule=name, step_ms=step_ms, forward_ms=forward_ms)


def report_plan(session: Session, count: int, rows: int) -> None:
    """Times the plan of a step of our own kernels, and that of a step of modules."""
    tables = [range(1 + BLOCKS_EACH * index, 1 + BLOCKS_EACH * (index + 1)) for index in range(count)]
    batch = RaggedBatch(tuple(Chunk(table, START, [5] * rows, rows) for table in tables))
    scratch = BLOCK_SIZE * tables[-1].stop
    layout = ItemLayout(GROUP_ROWS, BLOCK_SIZE, 4, (None,), scratch)
    ways: tuple[tuple[str, ItemBuffer | StepBuffer, StepShape], ...] = (
        ("kernels", ItemBuffer(layout, session.device), step_plan.shape_of(batch)),
        ("modules", StepBuffer(BLOCK_SIZE, scratch, session.device), exact_shape(batch)),
    )
    for way, buffer, shape in ways:
        buffer.reserve(shape)
        fill_us = host_us(lambda: buffer.fill(batch, shape), PLAN_ROUNDS)  # noqa: B023  # called within the round
        send_us = host_us(lambda: buffer.send(shape), PLAN_ROUNDS)  # noqa: B023
        session.add(way=way, texts=count, rows=rows, fill_us=fill_us, send_us=send_us)
