"""Stage `bits`: whether a row has the same bits in every step, on this card.

First models: the logits of a text's rows in steps of many widths, in chunks, beside other texts, as nodes of a tree.
Then products alone, in the configurations that models use: rows of extreme values in steps of 1 to 128 rows, NaN in the
rows beyond.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from bench.gpu_models import Shape
from bench.gpu_session.steps import PARENTS
from bench.gpu_session.texts import Loaded, dtype_of, loaded, random_ids, shapes_of
from bench.gpu_session.worker import Session
from specdec.engine.cuda.kernels import products
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths

WIDTHS = (512, 128, 64, 17, 16, 8, 5, 2, 1)
SMALL_WIDTHS = (12, 5)
ROWS = (128, 64, 17, 16, 8, 5, 2, 1)
SMALL_ROWS = (17, 2)


def run(session: Session) -> None:
    """Reports `equal` of `rows` of each check."""
    for shape in shapes_of(session):
        check_model(session, loaded(session, shape))
    for shape in shapes_of(session):
        for name, weight, activation in weights_of(session, shape):
            check_product(session, shape.name, name, weight, activation)


def check_model(session: Session, own: Loaded) -> None:
    """Compares the rows of one text, fed in many ways, with those of a step of all."""
    name, backend = own.shape.name, own.backend
    margins = backend.margins
    session.add(
        check="loading",
        model=name,
        numerics=backend.numerics or "modules",
        load_s=own.load_s,
        first_s=own.first_s,
        captured=backend.graph_count,
        drift=None if margins is None else margins.drift,
    )
    widths = SMALL_WIDTHS if session.is_small else WIDTHS
    ids, whole = own.texts.ids[: widths[0]], torch.empty(0)
    for width in widths:
        found = fed(own, ids, width)
        whole = whole if len(whole) else found
        session.add(check="widths", model=name, width=width, rows=len(ids), equal=equal_rows(found, whole))
    compare_shapes(session, own)


def fed(own: Loaded, ids: list[int], width: int) -> torch.Tensor:
    """Logits of all rows of a text in a cache of its own, fed `width` rows a step.  # [rows, vocab] float32"""
    rows = []
    for start in range(0, len(ids), width):
        part = ids[start : start + width]
        chunk = Chunk(own.texts.tables[-1], start, part, len(part))
        rows.append(own.model.forward(RaggedBatch((chunk,))).logits.clone())
    return torch.cat(rows)


def compare_shapes(session: Session, own: Loaded) -> None:
    """Compares rows behind one text: alone, beside others, and as a tree."""
    texts, forward, name = own.texts, own.model.forward, own.shape.name
    rows = 2 if session.is_small else 5
    alone = forward(texts.batch(1, rows)).logits.clone()
    beside = forward(texts.batch(texts.count, rows)).logits[:rows].clone()
    session.add(check=f"beside {texts.count - 1} texts", model=name, rows=rows, equal=equal_rows(beside, alone))
    start, nodes = texts.context, random_ids(len(PARENTS) + 1, own.model.description.vocabulary_size, seed=2)
    paths = tree_paths(PARENTS, start + 1)
    tree = forward(RaggedBatch((Chunk(texts.tables[0], start, nodes, len(nodes), paths),))).logits.clone()
    equal = 0
    for node, cells in enumerate([(), *paths]):
        path = [nodes[0], *(nodes[cell - start] for cell in cells)]
        chain = forward(RaggedBatch((Chunk(texts.tables[0], start, path, 1),))).logits
        equal += equal_rows(chain, tree[node : node + 1])
    session.add(check="tree of 8 on 4 paths", model=name, rows=len(nodes), equal=equal)


def equal_rows(ours: torch.Tensor, theirs: torch.Tensor) -> int:
    """How many rows have the same bits, none of them of NaN."""
    bits = torch.int32 if ours.dtype == torch.float32 else torch.int16
    is_equal = (ours.view(bits) == theirs.view(bits)).all(1) & ~ours.isnan().any(1)
    return int(is_equal.sum())


Activated = products.Activation | None


def weights_of(session: Session, shape: Shape) -> Iterator[tuple[str, torch.Tensor, Activated]]:
    """A layer's products of a model, random: name, weight [outputs, inputs], what is computed behind it."""
    sizes: list[tuple[str, int, int, Activated]] = [
        ("out", shape.hidden, shape.hidden, None),
        ("gate_up", 2 * shape.intermediate, shape.hidden, "silu"),
        ("down", shape.hidden, shape.intermediate, None),
    ]
    for index, (name, outputs, inputs, activation) in enumerate(sizes):
        generator = torch.Generator(session.device).manual_seed(index)
        weight = torch.randn(outputs, inputs, generator=generator, device=session.device) * inputs**-0.5
        yield name, weight.to(dtype_of(session)), activation


def extreme_rows(like: torch.Tensor, count: int) -> torch.Tensor:
    """Rows of very different sizes.  # [count, inputs]"""
    generator = torch.Generator(like.device).manual_seed(9)
    rows = torch.randn(count, like.shape[1], generator=generator, device=like.device)
    return (rows * torch.logspace(-3, 2, count, device=like.device)[:, None]).to(like)


def product_of(rows: torch.Tensor, weight: torch.Tensor, activation: Activated, count: int) -> torch.Tensor:
    """The product of the first `count` rows; those beyond are NaN, and so is what is not written."""
    x = torch.where(torch.arange(len(rows), device=rows.device)[:, None] < count, rows, torch.nan)
    out = rows.new_full((len(rows), len(weight) // (2 if activation else 1)), torch.nan)
    products.product(x, weight, out, count, activation=activation)
    if not out[count:].isnan().all():
        raise ValueError(f"a product of {count} rows wrote another row")
    return out[:count]


def check_product(session: Session, model: str, name: str, weight: torch.Tensor, activation: Activated) -> None:
    """Compares rows in steps of fewer rows with those of the widest, and these with float32."""
    counts = SMALL_ROWS if session.is_small else ROWS
    rows = extreme_rows(weight, counts[0])
    widest = product_of(rows, weight, activation, counts[0])
    equal = sum(equal_rows(product_of(rows, weight, activation, count), widest[:count]) for count in counts)
    exact = rows.float() @ weight.float().t()
    if activation:
        gate, up = exact.unflatten(1, (-1, 2)).unbind(2)
        exact = torch.nn.functional.silu(gate) * up
    off = float(((widest.float() - exact).norm(dim=1) / exact.norm(dim=1)).max())
    session.add(check="product", model=model, weight=name, rows=sum(counts), equal=equal, off=off)
