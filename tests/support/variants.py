"""The compared variants: ways to speculate, and the rules they run under, as requests to a coordinator.

`speculative_policy` is the one place that says a variant in the words of the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.client.request import make_request
from specdec.protocol.types import Rule
from specdec.v1.coordinator_service_pb2 import GenerateRequest

WAIT_MS = 2000.0  # a synchronous round waits for its draft tokens however far the draft is
CHAIN_WINDOW = 8  # further ahead a chain is wrong nearly always
STREAMED_LENGTH_MAX, STREAMED_WINDOW, TREE_NODES_PER_STEP = 16, 16, 8
RULES_DEFAULT = (
    "GREEDY, temperature 0",
    "COUPLED, temperature 0.7",
    "REJECTION, temperature 0.7",
    "COUPLED, temperature 1",
    "REJECTION, temperature 1",
)
RULE_NAMES = ("GREEDY", "COUPLED 0.7", "REJECTION 0.7", "COUPLED 1", "REJECTION 1")  # the same, as cells and tables say
NUCLEUS = "REJECTION, temperature 0.7, top-p 0.95"
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.7},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 1.0},
)
RULES: dict[str, dict[str, Any]] = {
    **dict(zip(RULES_DEFAULT, _SAMPLING)),
    **dict(zip(RULE_NAMES, _SAMPLING)),
    NUCLEUS: {"temperature": 0.7, "top_p": 0.95},
}


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to speculate. `draft_length` absent: the coordinator's own policy chooses; 0: it does not speculate.
    `proposers` by name; of the pipeline the draft model alone."""

    name: str
    draft_length: int | None
    window: int = 0
    nodes_per_step: int = 1
    wait_ms: float = 0.0
    siblings: int = 0
    proposers: tuple[str, ...] = ("draft",)

    @property
    def is_synchronous(self) -> bool:
        return self.wait_ms > 0


OFF = Variant("off", 0)
AUTO = Variant("auto", None)
CHAIN = Variant("chain", CHAIN_WINDOW, CHAIN_WINDOW)
TREE = Variant("tree", STREAMED_LENGTH_MAX, STREAMED_WINDOW, TREE_NODES_PER_STEP)


def synchronous(draft_length: int) -> Variant:
    """Returns rounds that wait for exactly `draft_length` draft tokens, made for that round alone."""
    return Variant(f"sync {draft_length}", draft_length, draft_length, wait_ms=WAIT_MS)


def variants_of(draft_lengths: Sequence[int]) -> list[Variant]:
    """All that are compared, off and auto first: they are measured in pairs."""
    return [OFF, AUTO, CHAIN, TREE, *map(synchronous, draft_lengths)]


def speculative_policy(variant: Variant) -> dict[str, Any]:
    """The variant as fields of a request."""
    if variant.draft_length is None:
        return {"policy": "auto", "proposers": variant.proposers}
    if variant.draft_length == 0:
        return {"policy": "off"}
    return {
        "policy": "fixed",
        "num_speculative_tokens": variant.draft_length,
        "draft_window": variant.window,
        "draft_nodes_per_step": variant.nodes_per_step,
        "draft_wait_ms": variant.wait_ms,
        "draft_siblings": variant.siblings,
        "proposers": variant.proposers,
    }


def request_of(
    variant: Variant, rule: str, prompt: str | Sequence[int], max_tokens: int, **more: Any
) -> GenerateRequest:
    """A generation of exactly `max_tokens` tokens; `more` as for `make_request`."""
    own: dict[str, Any] = {"max_tokens": max_tokens, "ignore_eos": True, **RULES[rule]}
    if rule_of(rule)[0] == Rule.REJECTION:  # without a seed the server would choose
        own["rule"] = "rejection"
    return make_request(prompt, **own | speculative_policy(variant) | more)


def rule_of(rule: str) -> tuple[Rule, float]:
    """(rule, temperature) of a name in RULES."""
    temperature = RULES[rule]["temperature"]
    if temperature == 0:
        return Rule.GREEDY, 0.0
    return (Rule.COUPLED if "seed" in RULES[rule] else Rule.REJECTION), temperature


def is_reproducible(rule: str) -> bool:
    """Whether every variant must give the same text: greedy, or with a seed."""
    return RULES[rule]["temperature"] == 0 or "seed" in RULES[rule]
