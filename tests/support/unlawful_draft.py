"""A real draft whose masks under a grammar are false: it draws illegal tokens only, or end tokens only, wherever there
are any, or masks nothing, and sends its tokens with their distribution as if it had masked; or one that declares under
REJECTION a flatter distribution than the one that it draws from. For tests of what a target accepts.

Run as `python -m tests.support.unlawful_draft illegal FLAGS`, `ends FLAGS`, `all FLAGS` or `flat FLAGS`, as
`specdec draft` is.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from specdec.cli.main import main
from specdec.decoding import proposal
from specdec.decoding.host_copy import HostCopy
from specdec.decoding.proposal import KnownTokens, Proposal, ProposalRequest
from specdec.grammar.matcher import ALL, MaskRows, PathMatcher
from specdec.protocol.types import Rule

LIES = ("illegal", "ends")

rows_of_paths = PathMatcher.rows_of_paths
draw = proposal.rejection_proposals


def illegal(matcher: PathMatcher, output: Sequence[int], paths: Iterable[Sequence[int]]) -> MaskRows:
    """The complement of `PathMatcher.rows_of_paths`."""
    found = rows_of_paths(matcher, output, paths)
    return MaskRows(bytearray(octet ^ ALL[0] for octet in found.bits), found.dead)


def ends(matcher: PathMatcher, output: Sequence[int], paths: Iterable[Sequence[int]]) -> MaskRows:
    """Rows of the end tokens alone."""
    row = bytearray(matcher._row_bytes)
    for token_id in matcher._ends:
        row[token_id >> 3] |= 1 << (token_id & 7)
    return MaskRows(row * len(list(paths)))


def everything(matcher: PathMatcher, output: Sequence[int], paths: Iterable[Sequence[int]]) -> MaskRows:
    """Rows of all tokens."""
    return MaskRows(bytearray(ALL) * (matcher._row_bytes * len(list(paths))))


def flat(
    requests: Sequence[ProposalRequest], logits: Tensor, known: KnownTokens | None, host_copy: HostCopy
) -> Callable[[], list[Proposal]]:
    """`rejection_proposals` with the distributions of twice the temperature, which have the drawn tokens too."""
    drawn, declared = draw(requests, logits, known, host_copy), draw(requests, logits / 2, known, host_copy)
    return lambda: [own._replace(draft_probs=other.draft_probs) for own, other in zip(drawn(), declared())]


@contextlib.contextmanager
def lying(lie: str, model: Path, target_model: Path) -> Iterator[str]:
    """Starts such a draft; gives its address, once it serves, and ends it."""
    flags = ["--model", str(model), "--target-tokenizer", str(target_model), "--port", "0", "--threads", "1"]
    command = [sys.executable, "-m", "tests.support.unlawful_draft", lie, *flags, "--log-level", "error"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield child.stdout.readline().split()[-1]
        finally:
            child.kill()


if __name__ == "__main__":
    masks: dict[str, Callable[..., MaskRows]] = {"illegal": illegal, "ends": ends, "all": everything}
    if (told := sys.argv.pop(1)) == "flat":
        proposal.WAYS[Rule.REJECTION] = flat
    else:
        PathMatcher.rows_of_paths = masks[told]
    main("draft")
