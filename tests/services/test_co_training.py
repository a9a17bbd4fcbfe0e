"""A draft learns on from what its own services recorded, and is served again."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.engine_models import make_tiny_model, random_tokens
from tests.support.services import Outcome, fixed, running

ACCEPTED, RECOVERED = 1, 2  # kinds of tokens on the wire
TOKENS = 30
CHANNELS_LEFT = 8  # of 64
ASKED = [
    {"prompt": random_tokens(8, seed), "temperature": temperature, "seed": 5, "max_tokens": TOKENS, "ignore_eos": True}
    for seed in range(8)
    for temperature in (0.7, 0)
]


def spoil(folder: Path) -> None:
    """Has the output layer of a model see a few channels of its last hidden state."""
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][CHANNELS_LEFT:] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def served(target: Path, draft: Path, **coordinator: object) -> list[Outcome]:
    """The texts of ASKED with no other proposer than the draft; the first is recorded first, so it is held out."""
    first, *others = [own | {"speculative": fixed(3, proposers=["PROPOSER_DRAFT"])} for own in ASKED]
    with running(target, draft, coordinator, threads=1) as services:
        return [services.client.generate(**first), *services.client.generate_all(others, 4)]


def acceptance(outcomes: Sequence[Outcome]) -> float:
    """Accepted draft tokens by those tested."""
    kinds = [kind for own in outcomes for kind in own.kinds]
    return kinds.count(ACCEPTED) / (kinds.count(ACCEPTED) + kinds.count(RECOVERED))


@pytest.mark.more
def test_a_draft_learns_from_its_record(tmp_path: Path) -> None:
    """Claim: a draft that is nearly always wrong is served and recorded; `specdec distill --start` with this record
    alone, and nothing else to learn from, makes of it a draft that is served in its place: of the same prompts most
    draft tokens are accepted, and no text changes. The command tells the acceptance of the record, as the client saw
    it. Conclusive: the draft is the target with a final norm that lets an eighth of the channels pass, so it is nearly
    always wrong, and nothing but training changes that."""
    target, start = make_tiny_model(tmp_path / "target", "llama"), make_tiny_model(tmp_path / "start", "llama")
    spoil(start)
    out, file = tmp_path / "out", tmp_path / "record.jsonl"
    before = served(target, start, record=file, record_notice=True)
    assert len(file.read_text().splitlines()) == len(ASKED) and acceptance(before) < 0.1
    told = f"--target {target} --start {start} --from-record {file} --out {out} --text-count 64 --tokens 60000"
    more = "--evaluate-tokens 20000 --batch-tokens 512 --learning-rate 0.003 --threads 1 --device cpu"
    command = [sys.executable, "-m", "specdec.cli", "distill", *told.split(), *more.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    greedy = acceptance([own for own, ask in zip(before, ASKED) if not ask["temperature"]])
    assert f"recorded acceptance, of all proposers: {greedy:.3f} at 0 (" in done.stderr, done.stderr
    after = served(target, out)
    print(f"acceptance {acceptance(before):.2f} before, {acceptance(after):.2f} after")
    assert [own.comparable for own in after] == [own.comparable for own in before]
    assert acceptance(after) > 0.5
