"""The facts of one generation, from its trace alone: totals, shares of the time, and events in order, as sentences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from specdec.traces.reader import ReadEvent, ReadSpan, TraceTree

UNAVAILABLE = "draft unavailable"
EACH_MAX = 3  # events of one name with a sentence each; more are counted in one
WAIT_MS_MIN = 100.0  # before the first token: shorter waits are not told
LAST_S = 0.01  # a draft that returns so shortly before the end was not used again
SENTENCES = {
    "moved": "moved to {peer}: {reason}",
    "draft changed": "drafted by {peer} from here on, as the draft was {reason}",
    "policy switched": "speculation {switched} from round {round}: {why}",
    "preempted by the target": "preempted by the target, times: {times}",
    "draft refused": "the draft refused the session: {reason}",
    "wait expired": "waited for draft tokens until the limit",
    "slow round": "round {round} took {round_ms} ms (mean {mean_ms}): {part} {part_ms} ms",
    "sent again": "a verification was sent again",
}
UNTOLD = ("round", "draft lost", "draft connected", "draft tokens arrived")  # told by a span, or of every round


@dataclass(frozen=True, slots=True)
class Happening:
    """A sentence, and its time in milliseconds from the start of the call."""

    at_ms: float
    sentence: str


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the call's time; `share` of the whole call."""

    name: str
    ms: float
    share: float
    meaning: str


@dataclass(frozen=True, slots=True)
class Facts:
    """One generation. `error`: why it failed, or empty; `drafting_ms`: of the draft's steps, beside the rounds;
    `clock_offsets_ms`: by service, ahead of the coordinator."""

    trace_id: str
    model: str
    error: str
    output_tokens: int
    rounds: int
    acceptance: float
    total_ms: float
    happened: tuple[Happening, ...]
    parts: tuple[Part, ...]
    drafting_ms: float
    clock_offsets_ms: dict[str, float]

    @property
    def largest(self) -> Part:
        """The part with the largest share."""
        return max(self.parts, key=lambda part: part.ms)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of the whole call."""
        return 1000 * self.output_tokens / max(self.total_ms, 1e-9)

    def as_json(self) -> dict[str, Any]:
        """The same as values of JSON."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s, "largest": self.largest.name}


def facts_of(tree: TraceTree) -> Facts:
    """Reads the facts of a trace's first generation."""
    root = tree.root
    said = root.attributes
    return Facts(
        trace_id=root.trace_id,
        model=str(said.get("gen_ai.request.model", "?")),
        error=str(said.get("error.type", "?")) if root.is_failed else "",
        output_tokens=int(said.get("gen_ai.usage.output_tokens", 0)),
        rounds=int(said.get("specdec.rounds", 0)),
        acceptance=float(said.get("specdec.draft_acceptance_rate", 0.0)),
        total_ms=root.duration_ms,
        happened=tuple(sorted(_happened(tree), key=lambda one: one.at_ms)),
        parts=tuple(Part(*part) for part in tree.shares()),
        drafting_ms=tree.drafting_ms(),
        clock_offsets_ms=dict(tree.clock_offsets_ms()),
    )


def _happened(tree: TraceTree) -> Iterator[Happening]:
    root, said = tree.root, tree.root.attributes
    if count := said.get("specdec.resumed_tokens"):
        yield Happening(0.0, f"resumed after {count} tokens")
    own = list(tree.below_root())
    for span in own:
        if span.name == UNAVAILABLE:
            yield _loss(root, span)
        elif span.name == "prefill":
            yield from _waits(root, span)
    by_name: dict[str, list[ReadEvent]] = defaultdict(list)
    for span in own:
        for event in span.events:
            if span.name != "round" and event.name not in UNTOLD:
                by_name[event.name].append(event)
    for events in by_name.values():
        for event in events[: EACH_MAX if len(events) <= EACH_MAX else 1]:
            more = "" if len(events) <= EACH_MAX else f"; {len(events)} times in all"
            yield Happening(_ms(root, event.at_ns), _sentence(event) + more)
    if said.get("specdec.cancelled"):
        yield Happening(root.duration_ms, "cancelled by the client")
    elif error := said.get("error.type"):
        yield Happening(root.duration_ms, f"{'failed' if root.is_failed else 'refused'}: {error}")


def _ms(root: ReadSpan, at_ns: int) -> float:
    return (at_ns - root.start_ns) / 1e6


def _waits(root: ReadSpan, prefill: ReadSpan) -> Iterator[Happening]:
    at_ms, queue_ms = _ms(root, prefill.start_ns), float(prefill.attributes.get("specdec.queue_ms", 0.0))
    if at_ms > WAIT_MS_MIN:
        yield Happening(0.0, f"waited {at_ms / 1000:.2f} s at the coordinator before it began")
    if queue_ms > WAIT_MS_MIN:
        yield Happening(at_ms, f"waited {queue_ms / 1000:.2f} s in the target's queue")


def _loss(root: ReadSpan, span: ReadSpan) -> Happening:
    is_back = root.end_ns - span.end_ns > 1e9 * LAST_S
    back = f"back at {_ms(root, span.end_ns) / 1000:.2f} s" if is_back else "not back before the end"
    return Happening(_ms(root, span.start_ns), f"the draft was lost, {back}")


def _sentence(event: ReadEvent) -> str:
    said = {name.removeprefix("specdec."): value for name, value in event.attributes.items()}
    said["switched"] = "on" if said.get("speculating") else "off"
    said["why"] = str(said.get("why", "")).removeprefix("off: ")
    try:
        return SENTENCES[event.name].format(**said)
    except KeyError:  # an event without a sentence, or without what it says
        return event.name
