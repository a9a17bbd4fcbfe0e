"""Short form of the bombs: each once, refused; their times and memory belong to the command, on a quiet machine."""

from __future__ import annotations

import pytest
from rich.console import Console

from tests.chaos.bomb_list import all_bombs
from tests.chaos.proofs import bombs

MEASURED = ("milliseconds", "bytes held", "microseconds")


@pytest.mark.more
def test_every_bomb_is_refused() -> None:
    """Claim: every bomb of the proof `bombs` is answered by a refusal, no process ends, health stays SERVING, texts
    generated afterwards are equal and nothing is left behind. Conclusive: real processes and sockets; empty entries go
    to every repeated field that the descriptors of the requests hold."""
    assert len(all_bombs()) > 80
    costs, witness = bombs.send_all(1, bombs.RETURNED_AT_ONCE, Console(quiet=True))
    bars = bombs.bars(costs, [witness])
    assert [bar.claim for bar in bars if bar.state == "missed" and not bar.claim.startswith(MEASURED)] == []
