"""The mutable objects that belong to one running request alone, and their fields, by a walk over its references.

The walk knows of the product the classes of shared objects, in `SHARED`, at which it ends; what two requests both reach
is shared too, and a walk that comes to another request is refused.
"""

from __future__ import annotations

import enum
import sys
from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import specdec
from specdec.errors import SpecdecError

ROOT = Path(specdec.__file__).resolve().parents[1]
PRODUCT_FOLDERS = tuple(ROOT / name for name in ("specdec", "coordinator", "target_service", "draft_service"))
# Objects of the service that a request refers to: tables, peers, metrics, spans. The walk over a request ends at them.
SHARED = frozenset(
    "Coordinator CoordinatorMetrics Draft Fleet Link Peer Peers Recorder Replica Speculation Target Tokenizer".split()
) | {"SdkTracing", "Tracing"}


@lru_cache(4096)
def is_product(file: str) -> bool:
    """Whether a file lies in the product's folders, links followed."""
    path = Path(file).resolve()
    return any(path.is_relative_to(folder) for folder in PRODUCT_FOLDERS)


class Holding(NamedTuple):
    """A class with mutable objects that belong to one request, and the fields of one of them."""

    name: str
    fields: int


def fields_of(held: object) -> dict[str, Any]:
    """Returns the fields of an instance, in its dictionary or in slots."""
    slots = [name for kind in type(held).__mro__ for name in getattr(kind, "__slots__", ())]
    named = {name: getattr(held, name) for name in slots if name != "__weakref__" and hasattr(held, name)}
    return {**named, **getattr(held, "__dict__", {})}


def is_own_kind(held: object) -> bool:
    """Whether an object is an instance of a product class, and no constant."""
    module = sys.modules.get(type(held).__module__)
    file = getattr(module, "__file__", None)
    return file is not None and not isinstance(held, enum.Enum | type) and is_product(file)


def is_mutable(held: object) -> bool:
    """Whether an instance of a product class may change: no named tuple, no frozen dataclass."""
    params = getattr(type(held), "__dataclass_params__", None)
    return not isinstance(held, tuple) and not (params is not None and params.frozen)


def reached(root: object) -> dict[int, object]:
    """Returns the instances of product classes that an object refers to, itself included, by id. Raises SpecdecError
    where the walk comes to another object of its class."""
    found: dict[int, object] = {}
    seen: set[int] = set()
    waiting: deque[tuple[str, object]] = deque([("", root)])
    while waiting:
        way, held = waiting.popleft()
        if id(held) in seen or type(held).__name__ in SHARED:
            continue
        seen.add(id(held))
        if isinstance(held, Mapping):
            waiting += [(way, own) for pair in held.items() for own in pair]
        elif isinstance(held, list | tuple | set | frozenset | deque):
            waiting += [(way, own) for own in held]
        if is_own_kind(held):
            if type(held) is type(root) and held is not root:
                raise SpecdecError(f"{way} leads to the objects of another request: name its class in SHARED")
            found[id(held)] = held
            waiting += [(f"{type(held).__name__}.{name}", own) for name, own in fields_of(held).items()]
    return found


def holdings(one: object, other: object) -> list[Holding]:
    """Returns what belongs to the first of two requests alone, those with most fields first. Objects of one class, such
    as the nodes of a tree, count once."""
    shared = reached(other)
    own = [held for key, held in reached(one).items() if key not in shared and is_mutable(held)]
    widths = {type(held).__name__: len(fields_of(held)) for held in own}
    return [Holding(*pair) for pair in sorted(widths.items(), key=lambda pair: -pair[1]) if pair[1]]
