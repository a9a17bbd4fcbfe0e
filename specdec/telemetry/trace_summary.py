"""What a trace of a generation says: its tree of spans on one clock, and where the time went.

The root's totals say it for every round, whatever was recorded in detail. Pure: spans in, numbers out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from specdec.errors import SessionUnknown
from specdec.telemetry.trace_reader import ReadSpan

CLIENT, SERVER = 3, 2
OFFSET = "specdec.clock_offset_ms"


@dataclass(frozen=True, slots=True)
class Share:
    """One kind of time: milliseconds, and their share of the whole call."""

    name: str
    milliseconds: float
    share: float
    meaning: str


# In the order they are shown: name, the root's attributes summed, what it means.
KINDS = (
    ("draft", ("specdec.wait_ms",), "held back for draft tokens"),
    ("network", ("specdec.network_ms",), "on the way to the target and back"),
    ("queue", ("specdec.queue_ms",), "at the target, before its step"),
    ("forward", ("specdec.forward_ms", "specdec.evidence_ms"), "the target's model and its evidence"),
    ("rule", ("specdec.rule_ms",), "the coordinator's own work"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the waterfall: a span, how deep it stands, and when it began by the root's clock."""

    span: ReadSpan
    depth: int
    start_ms: float


class TraceTree:
    """The spans of one generation. Raises SessionUnknown where there is no `Generate` among them."""

    def __init__(self, spans: list[ReadSpan]) -> None:
        roots = [span for span in spans if span.name == "Generate"]
        if not roots:
            raise SessionUnknown(f"none of the {len(spans)} spans is a Generate: its end has not arrived yet")
        self.roots = roots
        self.root = roots[0]
        self._children: dict[str, list[ReadSpan]] = defaultdict(list)
        for span in spans:
            self._children[span.parent_id].append(span)

    def lines(self, root: ReadSpan | None = None) -> Iterator[Line]:
        """The tree in order, parents before children, each machine's times moved to the coordinator's clock."""
        root = root or self.root
        yield from self._lines(root, 0, 0.0, root)

    def _lines(self, span: ReadSpan, depth: int, skew_ms: float, root: ReadSpan) -> Iterator[Line]:
        yield Line(span, depth, (span.start_ns - root.start_ns) / 1e6 - skew_ms)
        for child in self._children[span.span_id]:
            own_ms = skew_ms
            if span.kind == CLIENT and child.kind == SERVER:  # the hop to another machine, and to its clock
                own_ms += float(span.attributes.get(OFFSET, 0.0))
            yield from self._lines(child, depth + 1, own_ms, root)

    def shares(self) -> list[Share]:
        """Where the time of the call went; the parts add up to it."""
        total_ms = max(self.root.duration_ms, 1e-9)
        parts = []
        for name, attributes, meaning in KINDS:
            spent_ms = sum(float(self.root.attributes.get(key, 0.0)) for key in attributes)
            parts.append(Share(name, spent_ms, spent_ms / total_ms, meaning))
        rest_ms = max(0.0, total_ms - sum(part.milliseconds for part in parts))
        parts.append(Share("waiting", rest_ms, rest_ms / total_ms, "before the first round, and for the reader"))
        return parts

    def drafting_ms(self) -> float:
        """Time of the draft steps that are recorded; they run beside the rounds."""
        return sum(span.duration_ms for span in self._all() if span.name == "draft" and span.kind == SERVER)

    def _all(self) -> Iterator[ReadSpan]:
        for spans in self._children.values():
            yield from spans

    def clock_offsets_ms(self) -> Mapping[str, float]:
        """By service, how far its machine's clock is ahead of the coordinator's, as the link's stamps say."""
        clients = [span for span in self._all() if span.kind == CLIENT and OFFSET in span.attributes]
        return {"draft" if span.name == "draft" else "target": float(span.attributes[OFFSET]) for span in clients}
