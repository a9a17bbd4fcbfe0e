"""Stage `peer`: `transformers` alone on the same card, with a static cache and `torch.compile`, which replays graphs.

It needs nothing that is not installed with the engine. On a CPU its module runs uncompiled.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
import transformers

from bench.gpu_models import Shape, plain_model
from bench.gpu_session.texts import dtype_of, random_ids, shapes_of
from bench.gpu_session.timing import WARM, host_s
from bench.gpu_session.worker import Session

CONTEXT, CACHE = 480, 1024


def run(session: Session) -> None:
    """Reports `step_ms`, from tokens to the next tokens on the host, of one row and of eight: medians."""
    for rows in (1, 8):
        for shape in shapes_of(session):
            with torch.inference_mode():
                measure(session, shape, rows)


def measure(session: Session, shape: Shape, rows: int) -> None:
    """Times steps of one text behind CONTEXT tokens. Made anew for each number of rows, to which it is compiled."""
    device, is_small = session.device, session.is_small
    context, capacity = (20, 64) if is_small else (CONTEXT, CACHE)
    model = plain_model(shape, device, dtype_of(session))
    its: Any = model  # typed for a protocol that its class does not fit
    cache = transformers.StaticCache(config=model.config, max_cache_len=capacity)
    ids = torch.tensor([random_ids(context + rows, shape.vocabulary)], device=device)
    its(input_ids=ids[:, :context], past_key_values=cache, use_cache=True, logits_to_keep=1)
    options: Any = {"mode": "reduce-overhead", "fullgraph": True, "dynamic": False}
    step = its.forward if is_small else torch.compile(its.forward, **options)
    places = torch.arange(context, context + rows, device=device)[None]
    own_ids = ids[:, context:].clone()

    def whole() -> list[int]:
        if not is_small:
            torch.compiler.cudagraph_mark_step_begin()
        logits = step(input_ids=own_ids, position_ids=places, past_key_values=cache, use_cache=True).logits
        found: list[int] = logits[0].argmax(-1).tolist()
        return found

    compiled_s = sum(host_s(whole) for _ in range(WARM))
    step_ms = statistics.median(host_s(whole) for _ in range(session.rounds)) * 1e3
    session.add(model=shape.name, rows=rows, context=context, step_ms=step_ms, compiled_s=compiled_s)
