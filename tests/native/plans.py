"""Plans for driver.c from a seed: sizes of small models, rows of steps that fit them, and rows that do not.

A plan is a list of integers in the order in which the driver reads them. Sound plans are built as the planner builds
them, with trees, shared and reused blocks, and sizes that fill no register; a hostile plan is a sound one with
one index changed to a value that no check may let through.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields

MODEL_TYPES = (0, 1, 2)
PACKED_TYPES = (3, 4, 5)  # of products whose inputs are a multiple of 8
EXTREMES = (-(2**31), -(2**31) + 1, 2**31 - 1, -1)
# Flags of driver.c.
TIED, INPUTS, EXCHANGE, FAILING, ABANDONED, HEAD_NORMS, AFTER_NORMS, CENTERED, BIASES, NANS, HIDDEN = (
    1 << i for i in range(11)
)
SPANS, DISTANCES = 1 << 11, 1 << 12
CROSS, UNGATED, SECONDS, FEATURES = 1 << 13, 1 << 14, 1 << 15, 1 << 16
DRAWN = INPUTS, HEAD_NORMS, AFTER_NORMS, CENTERED, BIASES, NANS, HIDDEN, DISTANCES, CROSS, UNGATED, SECONDS, FEATURES


@dataclass(slots=True)
class Sizes:
    """The first fields of a plan, in the driver's order."""

    seed: int
    type: int
    weight_type: int
    activation: int
    block_size: int
    block_count: int
    kv_heads: int
    group: int
    head_size: int
    hidden: int
    between: int
    layers: int
    rotated: int
    vocabulary: int
    positions_max: int
    window: int
    softcap: int
    threads: int
    flags: int


@dataclass(slots=True)
class Plan:
    """A step over a model of these sizes; the arrays are those of sd_rows. `is_sound`: to be accepted."""

    sizes: Sizes
    sequence: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    base: list[int] = field(default_factory=list)
    path_start: list[int] = field(default_factory=lambda: [0])
    path: list[int] = field(default_factory=list)
    table_start: list[int] = field(default_factory=lambda: [0])
    table: list[int] = field(default_factory=list)
    first: list[int] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logit_rows: list[int] = field(default_factory=list)
    is_sound: bool = True

    @property
    def slot_count(self) -> int:
        return self.sizes.block_size * self.sizes.block_count

    def add_row(self, sequence: int, base: int, path: list[int], slot: int) -> None:
        """A row after the last: it sees `base` positions of its table, then the slots of its path."""
        self.sequence.append(sequence)
        self.position.append(base + len(path) - 1)
        self.slot.append(slot)
        self.base.append(base)
        self.path += path
        self.path_start.append(len(self.path))

    def text(self) -> str:
        """As the driver reads it."""
        sizes = [getattr(self.sizes, one.name) for one in fields(self.sizes)]
        counts = [len(self.sequence), len(self.table_start) - 1]
        counts += [len(self.path), len(self.table), len(self.logit_rows)]
        arrays = [
            *(self.sequence, self.position, self.slot, self.base, self.path_start, self.path),
            *(self.table_start, self.table, self.first, self.ids, self.logit_rows),
        ]
        return "\n".join(" ".join(map(str, numbers)) for numbers in (sizes, counts, *arrays)) + "\n"


def sound_plan(seed: int) -> Plan:
    """A plan that the check accepts. The same for the same seed."""
    chance = random.Random(seed)
    plan = Plan(random_sizes(chance, seed))
    blocks = list(range(plan.sizes.block_count))
    chance.shuffle(blocks)
    while blocks and len(plan.table_start) < 5:
        add_sequence(plan, chance, [blocks.pop() for _ in range(min(len(blocks), chance.randint(1, 5)))])
    if chance.random() < (0.8 if plan.sizes.flags & CROSS else 0.3):
        add_spans(plan, chance)
    rows = len(plan.sequence)
    plan.ids = [
        chance.choice((0, plan.sizes.vocabulary - 1, chance.randrange(plan.sizes.vocabulary))) for _ in range(rows)
    ]
    plan.logit_rows = sorted(chance.sample(range(rows), chance.randint(0, rows)))
    return plan


def random_sizes(chance: random.Random, seed: int) -> Sizes:
    """Sizes of a model and its cache; blocks reach to the last slot."""
    head_size = chance.choice((2, 4, 6, 8, 10, 16, 18, 32, 40, 64, 66, 80, 96))
    kind = chance.choice(MODEL_TYPES)
    block_size = chance.choice((8, 8, 16, 16, 32, 64))
    flags = sum(flag for flag in DRAWN if chance.random() < 0.3)
    flags |= chance.choice((0, 0, 0, 0, EXCHANGE, EXCHANGE, EXCHANGE | FAILING, ABANDONED))
    weight_type = chance.choice((kind, kind, *MODEL_TYPES, *PACKED_TYPES))
    if weight_type in (kind, *PACKED_TYPES) and chance.random() < 0.5:
        flags |= TIED
    block_count = chance.choice((1, 2, 3, 7, 20, 640 // block_size + 3))
    return Sizes(
        seed=seed,
        type=kind,
        weight_type=weight_type,
        activation=chance.randrange(4),
        block_size=block_size,
        block_count=block_count,
        kv_heads=chance.randint(1, 3),
        group=chance.choice((1, 1, 2, 3, 4, 9)),
        head_size=head_size,
        hidden=chance.choice((1, 2, 15, 16, 17, 33, 64, 72, 300, 530)),  # the last two: longer than a block of a sum
        between=chance.choice((1, 15, 16, 31, 75, 130, 1100)),
        layers=chance.randint(1, 2),
        rotated=chance.choice((0, 2, head_size // 4 * 2, head_size)),
        vocabulary=chance.choice((1, 2, 16, 17, 100, 257)),
        positions_max=2 * block_size * block_count + 20,
        window=chance.choice((0, 0, 0, 1, 7, 16, 100, 513)),
        softcap=chance.choice((0, 0, 0, 30)),
        threads=chance.choice((2, 2, 3, 4, 7)),
        flags=flags,
    )


def add_sequence(plan: Plan, chance: random.Random, blocks: list[int]) -> None:
    """A sequence with these blocks: a chain, or a tree whose nodes lie behind them."""
    size = plan.sizes.block_size
    index, capacity = len(plan.table_start) - 1, len(blocks) * size
    plan.table += blocks
    plan.table_start.append(len(plan.table))
    slots = [block * size + offset for block in blocks for offset in range(size)]
    rows = min(capacity, chance.choice((1, 1, 2, 3, 5, 8, 9, 17, 40, 70)))
    start = chance.choice((0, capacity - rows, chance.randint(0, capacity - rows)))
    if chance.random() < 0.5:
        for position in range(start, start + rows):
            plan.add_row(index, position + 1, [], slots[position])
    else:
        paths: list[list[int]] = []
        for row in range(rows):
            before = chance.choice([[], *paths])
            paths.append([*before, slots[start + row]])
            plan.add_row(index, start, paths[-1], slots[start + row])


def add_spans(plan: Plan, chance: random.Random) -> None:
    """Lets every row see from a first position on, some up to the end of their tables, wherever their own is."""
    plan.sizes.flags |= SPANS
    least = 1 if plan.sizes.flags & CROSS and chance.random() < 0.9 else 0  # cross attention is to what lies before
    for row, sequence in enumerate(plan.sequence):
        capacity = (plan.table_start[sequence + 1] - plan.table_start[sequence]) * plan.sizes.block_size
        path_count = plan.path_start[row + 1] - plan.path_start[row]
        if not path_count:
            plan.base[row] = chance.choice((plan.base[row], capacity, chance.randint(1, capacity)))
        last = min(plan.base[row], plan.base[row] + path_count - 1)
        plan.first.append(max(min(least, last), chance.choice((0, last, chance.randint(0, last)))))
        plan.position[row] = chance.choice((plan.position[row], chance.randrange(plan.sizes.positions_max)))


def hostile_plan(seed: int) -> Plan:
    """A sound plan with one index that lies outside of what it points into, or a path that reaches beyond all paths up
    to a position that agrees with it."""
    chance = random.Random(seed)
    while True:
        plan = sound_plan(chance.randrange(2**32))
        if plan.first:  # other indices of these may have other values
            where = chance.randrange(len(plan.first))
            end = plan.base[where] + plan.path_start[where + 1] - plan.path_start[where]
            plan.first[where] = chance.choice((end, plan.base[where] + 1, *EXTREMES))
            plan.is_sound = False
            return plan
        if len(plan.sequence) > 1 and chance.random() < 0.1:
            where, beyond = chance.randrange(len(plan.sequence) - 1), chance.choice((100, 10**6))
            plan.path_start[where + 1] += beyond
            plan.position[where] += beyond
            plan.is_sound = False
            return plan
        names = [name for name in OUTSIDE if getattr(plan, name)]
        name = chance.choice(names)
        numbers = getattr(plan, name)
        where = chance.randrange(len(numbers))
        value = chance.choice([*OUTSIDE[name](plan, where), *EXTREMES])
        if value != numbers[where]:
            numbers[where] = value
            plan.is_sound = False
            return plan


# For each array the nearest values that are wrong, given the plan and an index.
OUTSIDE = {
    "sequence": lambda plan, where: [len(plan.table_start) - 1],
    "position": lambda plan, where: [plan.position[where] + 1, plan.position[where] - 1],
    "slot": lambda plan, where: [plan.slot_count, plan.slot_count + 1],
    "base": lambda plan, where: [plan.base[where] + 1, plan.base[where] - 1],
    "path_start": lambda plan, where: [plan.path_start[where] - 1, len(plan.path) + 1, len(plan.path) + 10**6],
    "path": lambda plan, where: [plan.slot_count, plan.slot_count + 1],
    "table_start": lambda plan, where: [len(plan.table) + 1, len(plan.table) + 10**6],
    "table": lambda plan, where: [plan.sizes.block_count],
}
