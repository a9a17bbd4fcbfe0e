"""What the bounds cost a round: its four messages read with their checks and the rates of their streams, and without,
in turns, at both ends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from array import array
from collections.abc import Iterator
from typing import Any
from unittest import mock

from rich.console import Console

from bench.bars import Bar
from specdec.protocol import items
from specdec.protocol.types import DraftNode, DraftProbs, SamplerOutput
from specdec.rpc import convert, convert_items, field_count, link
from specdec.rpc.convert_items import item_from_message, item_to_bytes
from specdec.rpc.rates import Rate
from specdec.v1 import draft_service_pb2 as draft_pb
from specdec.v1 import target_service_pb2 as target_pb

NAME = 1, 1
COST_US_MAX = 50.0  # a third of the CPU that a plain token takes of a coordinator


def add_options(parser: argparse.ArgumentParser) -> None:
    """Its size."""
    parser.add_argument("--rounds", type=int, default=400, help="rounds of a turn (%(default)s)")
    parser.add_argument("--turns", type=int, default=25, help="of each way; medians count (%(default)s)")
    parser.add_argument("--tokens", type=int, default=3, help="draft tokens of a round (%(default)s)")


def messages(count: int, probs: DraftProbs | None) -> list[tuple[type, bytes]]:
    """The messages of one round with `count` draft tokens; `probs`: the distribution of each, under REJECTION."""
    tokens = tuple(range(5, 5 + count))
    nodes = tuple(DraftNode(index + 1, index, token, True, probs) for index, token in enumerate(tokens))
    output = SamplerOutput((*tokens, 9), (0.5,) * count if probs else ())
    return [
        (draft_pb.DraftRequest, item_to_bytes(draft_pb.DraftRequest, items.Commit(*NAME, 100, tokens, 4))),
        (draft_pb.DraftResponse, item_to_bytes(draft_pb.DraftResponse, items.Nodes(*NAME, 1, 100, nodes))),
        (
            target_pb.VerifyRequest,
            item_to_bytes(
                target_pb.VerifyRequest,
                items.Verification(*NAME, 7, 100, tokens, tokens, (probs,) * count if probs else ()),
            ),
        ),
        (target_pb.VerifyResponse, item_to_bytes(target_pb.VerifyResponse, items.VerificationResult(*NAME, 7, output))),
    ]


async def read(received: list[tuple[type, bytes]], rate: Rate) -> None:
    """Reads the messages of a round as both ends do."""
    for message_class, data in received:
        await rate.admit()
        field_count.check_large(message_class, data)
        message: Any = message_class.FromString(data)  # type: ignore[attr-defined]  # a generated class
        link.check_item_count(len(message.items))
        for item in message.items:
            item_from_message(item)


async def unlimited(_: Rate) -> None:
    """Takes the place of `Rate.admit`."""


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Meanwhile nothing is compared with its limit, but for the numbers of draft nodes, where reading and checking are
    one."""
    with contextlib.ExitStack() as stack:
        for owner, name in ((field_count, "check_large"), (link, "check_item_count")):
            stack.enter_context(mock.patch.object(owner, name, lambda *_: None))
        for owner in (convert, convert_items):
            stack.enter_context(mock.patch.object(owner, "bounded", lambda _, value, __: value))
        stack.enter_context(mock.patch.object(convert_items, "check_integer", lambda *_: None))
        stack.enter_context(
            mock.patch.object(convert_items, "numbers_from_bytes", lambda code, data, *_: array(code, data))
        )
        for kind in (items.Verification, items.Commit):
            stack.enter_context(mock.patch.object(kind, "checked", lambda self: self))
        stack.enter_context(mock.patch.object(DraftProbs, "__post_init__", lambda self: None))
        stack.enter_context(mock.patch.object(Rate, "admit", unlimited))
        yield


async def round_us(received: list[tuple[type, bytes]], count: int) -> float:
    """Microseconds of CPU to read a round's messages."""
    rate = Rate(1e12)  # its limit is counted and never reached: reading is quicker than any stream
    began_s = time.thread_time()
    for _ in range(count):
        await read(received, rate)
    return 1e6 * (time.thread_time() - began_s) / count


def prove(asked: argparse.Namespace, console: Console) -> list[Bar]:
    """Reads the messages of rounds with and without draft distributions."""
    costs = {}
    for rule, probs in (("GREEDY or COUPLED", None), ("REJECTION", DraftProbs(tuple(range(5, 37)), (1,) * 32))):
        received, ways = messages(asked.tokens, probs), ([], [])
        for _ in range(asked.turns):
            ways[0].append(asyncio.run(round_us(received, asked.rounds)))
            with unchecked():
                ways[1].append(asyncio.run(round_us(received, asked.rounds)))
        checked_us, unchecked_us = map(statistics.median, ways)
        costs[rule] = statistics.median(a - b for a, b in zip(*ways))
        console.print(
            f"{rule}: {checked_us:.1f} us with checks, {unchecked_us:.1f} without; {costs[rule]:.1f} for them"
        )
    shown = "; ".join(f"{rule} {cost_us:.1f}" for rule, cost_us in costs.items())
    return [Bar("microseconds of checks in a round", COST_US_MAX, max(costs.values()), shown, is_limit=True)]
