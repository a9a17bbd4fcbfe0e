"""Stage `configurations`: products cut into other tiles: which have the bits of those in use, and take less time.

What may change without a change of bits can be tuned for a card; what cannot is a part of the numerics profile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import torch

from bench.gpu_session.bits import Activated, equal_rows, extreme_rows, product_of, weights_of
from bench.gpu_session.card import l2_bytes
from bench.gpu_session.texts import shapes_of
from bench.gpu_session.timing import each_us
from bench.gpu_session.worker import Session, reason_of
from specdec.engine.cuda.kernels import products
from specdec.engine.cuda.kernels.configs import ProductConfig, product_config

COLD = 4  # times the second cache


def run(session: Session) -> None:
    """Reports `equal_of_16` rows, and `us` of one row, of each configuration of each product."""
    for shape in shapes_of(session):
        for name, weight, activation in weights_of(session, shape):
            check_configurations(session, shape.name, name, weight, activation)


def check_configurations(session: Session, model: str, name: str, weight: torch.Tensor, activation: Activated) -> None:
    """Compares the bits of 16 rows with other configurations, and the times of one row."""
    device, own = session.device, product_config(*weight.shape)
    rows = extreme_rows(weight, 16)
    copies = [weight] * (1 if session.is_small else 1 + -(-COLD * l2_bytes(device) // weight.nbytes))
    copies = [copies[0], *(each.clone() for each in copies[1:])]
    out = rows.new_empty(1, len(weight) // (2 if activation else 1))
    expected = product_of(rows, weight, activation, 16)

    def work(of: torch.Tensor) -> Callable[[], None]:
        return lambda: products.product(rows, of, out, 1, activation=activation)

    for changed, config in {"as used": own, **others(own)}.items():
        row = {"configuration": changed, "model": model, "weight": name, "bytes": weight.nbytes}
        with mock.patch.object(products, "product_config", lambda *_: config):  # noqa: B023  # called within the loop
            try:
                equal = equal_rows(product_of(rows, weight, activation, 16), expected)
                us = each_us(device, [work(each) for each in copies], session.rounds)
                session.add(**row, equal_of_16=equal, us=us)
            except Exception as error:  # what a compiler raises for a chip without the memory, and more
                session.add(**row, reason=reason_of(error))


def others(own: ProductConfig) -> dict[str, ProductConfig]:
    """Configurations that differ in one number, by name; a shorter step may have fewer slices."""
    short = own.step // 2
    changes: list[dict[str, int]] = [{"tile": 2 * own.tile}, {"stages": own.stages + 1}, {"stages": own.stages - 1}]
    changes += [{"warps": 2 * own.warps}, {"slices": max(1, own.slices // 2)}]
    changes += [{"step": short, "slices": max(1, min(own.slices, short // 16))}]
    return {f"{name} {change[name]}": replace(own, **change) for change in changes for name in [next(iter(change))]}
