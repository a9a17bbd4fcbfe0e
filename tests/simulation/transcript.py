"""A run as text: one line for everything that leaves, arrives, is computed or goes wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.protocol.items import (
    Close,
    Commit,
    Extend,
    Failure,
    MissingTokens,
    Nodes,
    Open,
    PromptPart,
    Verification,
    VerificationResult,
)
from specdec.protocol.types import DraftNode


def shown(thing: Any) -> str:
    """An item in a few words: `2.1` is session 2 in its first incarnation, `7+3` three tokens from position 7 on."""
    if not hasattr(thing, "incarnation"):
        return str(thing)
    name = f"{type(thing).__name__} {thing.session}.{thing.incarnation}"
    if isinstance(thing, Open):
        return f"{name} {thing.params.rule.name} length_max {thing.length_max}"
    if isinstance(thing, Extend):
        return f"{name} {thing.start_position}+{len(thing.token_ids)} {list(thing.token_ids)}"
    if isinstance(thing, Verification):
        suffix = f"{thing.suffix_start}+{len(thing.suffix_token_ids)} {list(thing.suffix_token_ids)}"
        return (
            f"{name} round {thing.round_index} base {thing.base_position} {suffix} draft {list(thing.draft_token_ids)}"
        )
    if isinstance(thing, Commit):
        suffix = f"{thing.suffix_start}+{len(thing.suffix_token_ids)} {list(thing.suffix_token_ids)}"
        return f"{name} {suffix} window {thing.window} nodes {thing.nodes_per_step}"
    if isinstance(thing, VerificationResult):
        return f"{name} round {thing.round_index} {list(thing.output.recovered_token_ids)}"
    if isinstance(thing, PromptPart):
        return f"{name} prompt {thing.logprobs.first_index}+{len(thing.logprobs.token_ids)}"
    if isinstance(thing, Nodes):
        nodes = " ".join(node_shown(node) for node in thing.nodes)
        return f"{name} epoch {thing.epoch} root {thing.root_length}: {nodes}"
    if isinstance(thing, MissingTokens):
        return f"{name} unknown" if thing.unknown else f"{name} known {thing.known_length}"
    if isinstance(thing, Failure):
        return f"{name} {thing.reason}: {thing.message}"
    assert isinstance(thing, Close)
    return name


def node_shown(node: DraftNode) -> str:
    """`5<3=1!`: node 5 below node 3 is token 1, the proposal child; with `?` a branch child."""
    return f"{node.node_id}<{node.parent_id}={node.token_id}{'!' if node.proposal else '?'}"


@dataclass(slots=True)
class Transcript:
    """The lines of a run."""

    lines: list[str] = field(default_factory=list)

    def note(self, now_s: float, what: str, thing: Any) -> None:
        """Adds a line."""
        self.lines.append(f"{now_s:10.4f}  {what} {shown(thing)}".rstrip())
