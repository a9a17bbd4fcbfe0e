"""The picture of a trace: drawn from the output of `specdec trace --export`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.trace_picture import lines_until, main
from specdec.errors import ConfigError
from specdec.traces.reader import TraceTree, spans_of

START_NS = 1_700_000_000_000_000_000


def exported(count: int) -> dict:
    """A trace with a root and `count` spans below it, a millisecond each, of names that share no line."""

    def span(number: int, name: str, parent: str, start_ms: int, end_ms: int) -> dict:
        times = {
            "startTimeUnixNano": str(START_NS + start_ms * 10**6),
            "endTimeUnixNano": str(START_NS + end_ms * 10**6),
        }
        return {"traceId": "ab" * 16, "spanId": f"{number:016x}", "parentSpanId": parent, "name": name, **times}

    parts = [span(2 + at, f"part {at}", f"{1:016x}", at, at + 1) for at in range(count)]
    about = {"attributes": [{"key": "service.name", "value": {"stringValue": "specdec-coordinator"}}]}
    spans = [span(1, "Generate", "", 0, count), *parts]
    return {"resourceSpans": [{"resource": about, "scopeSpans": [{"spans": spans}]}]}


def test_a_picture_is_drawn_up_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: the spans that begin before the end are drawn, in order below their parent; too many are refused with a
    remedy, and nothing is written."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    content = exported(100)
    lines = lines_until(TraceTree(spans_of(content["resourceSpans"])), 3.0)
    assert [(line.span.name, line.depth, line.start_ms) for line in lines] == [
        ("Generate", 0, 0.0),
        *((f"part {at}", 1, float(at)) for at in range(3)),
    ]
    file, drawn = tmp_path / "trace.json", tmp_path / "trace.png"
    file.write_text(json.dumps(content), encoding="utf-8")
    assert main([str(file), str(drawn), "--until-ms", "80"]) == 1 and not drawn.exists()
    assert "choose an earlier --until-ms" in capsys.readouterr().err
    assert main([str(file), str(drawn), "--until-ms", "20"]) == 0
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_too_many_spans_are_an_error() -> None:
    """Claim: the limit is an error that names the number of spans."""
    with pytest.raises(ConfigError, match="101 spans"):
        lines_until(TraceTree(spans_of(exported(100)["resourceSpans"])), 1000.0)
