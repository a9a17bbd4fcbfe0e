"""The benchmark of a pair: a whole run on a tiny encoder-decoder pair, and the acceptance that it tells."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import pair
from bench.pipeline.variants import OFF, synchronous
from bench.proposers.texts import Text
from bench.step.encoder_decoder import ROWS, measure_stacks
from specdec.v1 import coordinator_service_pb2 as pb
from tests.support.encoder_decoder_models import make_encoder_decoder, make_resembling


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("t5")
    make_resembling(folder / "draft", make_encoder_decoder(folder / "target", "t5-gated", seed=1))
    (folder / "prompts.jsonl").write_text('{"prompt": "def total(values):"}\n{"prompt": "return sum(values)"}\n')
    return folder


def test_an_encoder_decoder_pair_is_measured_beside_the_published_one(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Claim: a run on two folders and a file of prompts tells, for each rule, auto and rounds of a fixed length over
    plain decoding with the acceptance of a draft token, the steps of both stacks, and the published results with their
    settings; results lie in a file of their own, without bars. Conclusive: real services, with a draft that is the
    target's near likeness."""
    told = f"--target {folders / 'target'} --draft {folders / 'draft'} --prompts {folders / 'prompts.jsonl'}"
    monkeypatch.setattr(sys, "argv", ["pair", *told.split(), "--tokens", "16", "--out", str(tmp_path)])
    assert pair.main() == 0
    written = json.loads((tmp_path / "pair-target.json").read_text())
    for rule, rtt_ms in pair.GIVEN:
        for variant in (pair.AUTO, synchronous(7)):
            cell = written[f"{variant.name}, {rule}, RTT {rtt_ms:g} ms"]
            assert cell["pair_count"] == cell["whole"]["pair_count"] == 2 and cell["median"] > 0
            assert 0 <= cell["acceptance"] <= 1
    assert max(written[f"sync 7, {rule}, RTT 0 ms"]["acceptance"] for rule, _ in pair.GIVEN) > 0.1
    assert not written["bars"] and [own["model"] for own in written["steps"]] == ["target", "draft"]
    shown = capsys.readouterr().out
    assert "T5-small, 77M" in shown and "0.75" in shown and "3.4" in shown and OFF.name in shown


def test_flags_of_a_pair_go_together(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: a target without a draft or prompts is refused in one line, before anything is started."""
    monkeypatch.setattr(sys, "argv", ["pair", "--target", "/tmp"])
    assert pair.main() == 1
    assert "--target, --draft or --heads, and --prompts go together" in capsys.readouterr().err


def test_acceptance_is_of_tested_tokens() -> None:
    """Claim: acceptance counts draft tokens whose predecessors were accepted, over all texts together. By hand."""
    texts = [Text(1.0, 1.0, (), pb.Statistics(), tested) for tested in ((3, 4), (0, 2), (0, 0))]
    assert pair.acceptance(texts) == 0.5 and pair.acceptance(texts[2:]) == 0


def test_steps_of_both_stacks_are_told(folders: Path) -> None:
    """Claim: the encoder is timed at the lengths that the model takes, the decoder at every number of rows and in a
    tree. Conclusive: the model has 256 positions for an input, fewer than the longest of the lengths."""
    found = measure_stacks(folders / "target", "float32", turns=2)
    assert list(found.encoder_ms) == [16, 64, 192] and list(found.decoder_ms) == list(ROWS)
    assert min(*found.encoder_ms.values(), *found.decoder_ms.values(), found.tree_ms) > 0
