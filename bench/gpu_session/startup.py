"""Stage `startup`: loading in a new process, where Triton's cache has what earlier stages compiled. The stage `bits`
has the same with an empty one."""

from __future__ import annotations

from bench.gpu_session.texts import loaded, shapes_of
from bench.gpu_session.worker import Session


def run(session: Session) -> None:
    """Reports the seconds to make the engine's model, its checks included, and of the first step, with its captures."""
    for shape in shapes_of(session):
        own = loaded(session, shape)
        session.add(model=shape.name, load_s=own.load_s, first_s=own.first_s, captured=own.backend.graph_count)
