"""The engine's benchmark: what it counts and leaves out, and a whole run on tiny shapes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from bench.engine.bandwidth import limit_ms, step_bytes
from bench.engine.products import ROWS as PRODUCT_ROWS
from bench.engine.streams import Block, StreamMeasurement, Streams, gain, measurement_of

from bench.engine.__main__ import bars_of, main
from bench.engine.sampler import ALL_PARAMS, made_up_logits, noise_of, request_of
from bench.engine.steps import BLOCK_SIZE, CachedTexts, Shape, StepMeasurement, shapes_of
from specdec.decoding.verification import verify
from specdec.engine.loading.model import load_model
from specdec.engine.transformers_model import TransformersModel
from tests.support.engine_models import Driver
from tests.support.harness import DRAFT_MODEL
from tests.support.threads import one_thread  # noqa: F401


def shipped_draft(dtype: str = "float32") -> TransformersModel:
    """The smallest shipped model."""
    model = load_model(str(DRAFT_MODEL), dtype)
    assert isinstance(model, TransformersModel)
    return model


def test_every_count_is_measured_at_every_context_and_none_twice() -> None:
    """Claim: rows of one sequence, and sequences of 1 and 5 rows, each with each context; no shape twice."""
    shapes = shapes_of((1, 5, 8), (1, 4), (64, 256))
    assert len(shapes) == len(set(shapes)) == 2 * (3 + 2)
    assert {shape for shape in shapes if shape.context == 256} == {
        Shape(1, 1, 256),
        Shape(1, 5, 256),
        Shape(1, 8, 256),
        Shape(4, 1, 256),
        Shape(4, 5, 256),
    }


def test_a_step_must_read_every_weight_once_and_what_is_cached() -> None:
    """Claim: the limit counts the bytes of all matrix products and of the sequences' cached positions.

    Conclusive: counted by hand from the shipped draft's configuration: one layer, 256 wide, 704 inside, 4 heads of 64
    that share 2 key heads, and an output layer, all float32; a position keeps 2 heads of keys and values.
    """
    layer = 256 * (4 * 64 + 2 * 2 * 64) + 4 * 64 * 256 + 3 * 256 * 704
    model = shipped_draft()
    vocabulary_size = model.description.vocabulary_size
    assert model.product_bytes == 4 * (layer + 256 * vocabulary_size)
    assert step_bytes(model, 3, 10) == model.product_bytes + 3 * 10 * (2 * 2 * 64 * 4)
    assert limit_ms(2_000_000, 4.0) == 0.5
    assert StepMeasurement("m", "t", 1, 1, 64, step_ms=2.0, limit_ms=0.5).limit_share == 0.25


def test_a_step_runs_on_real_cached_text_of_its_own() -> None:
    """Claim: every sequence of a batch has valid content in blocks of its own, so the step has a real step's cost.

    Conclusive: the logits of the last sequence, whose blocks were copied, are bit for bit those of the same tokens fed
    to an engine from the beginning, and no block occurs twice.
    """
    model = shipped_draft()
    texts = CachedTexts(model, 3, 70)
    batch = texts.batch(Shape(3, 2, 66))
    logits = model.forward(batch).logits
    ids = [block_id for chunk in batch.chunks for block_id in chunk.block_ids]
    assert len(ids) == len(set(ids)) == 3 * -(-70 // BLOCK_SIZE)
    driver = Driver(model)
    assert torch.equal(logits[4:], driver.feed(driver.open(70), texts.token_ids[:68], 2))
    assert [chunk.token_ids for chunk in batch.chunks] == [texts.token_ids[66:68]] * 3


def test_streams_decode_what_one_alone_decodes() -> None:
    """Claim: a block decodes the tokens it counts, the greedy ones, and frees its cache blocks.

    Conclusive: 9 tokens by hand through the same model; every step but the first is timed.
    """
    streams = Streams(shipped_draft(), 3, 9)
    try:
        blocks = [streams.block(count) for count in (3, 1, 3)]
        driver = Driver(shipped_draft())
        for text in streams.texts:
            assert text[-10:] == driver.greedy(text[:-10], 10)
        assert [len(block.steps_s) for block in blocks] == [8, 8, 8]
        assert all(step_s > forward_s > 0 for block in blocks for step_s, forward_s, _ in block.steps_s)
        assert streams.free_share == 1.0
    finally:
        streams.stop()


def test_time_outside_is_the_rest_beside_forward_and_sampler() -> None:
    """Claim: times are medians over all steps of all blocks; throughput is the sum of all streams."""
    blocks = [Block(100.0, ((0.010, 0.007, 0.001),)), Block(120.0, ((0.020, 0.015, 0.002),)), Block(90.0, ())]
    measurement = measurement_of("m", "t", 4, blocks)
    assert (measurement.tokens_per_s, measurement.streams) == (100.0, 4)
    assert measurement.outside_ms == pytest.approx(2.5) and measurement.forward_ms == pytest.approx(11.0)
    one = StreamMeasurement("m", "t", 1, 20.0, 0, 0, 0, 0)
    assert gain([measurement, one], "m", "t", 4) == 5.0
    assert gain([measurement], "m", "t", 4) is None and gain([measurement, one], "m", "other", 4) is None


@pytest.mark.parametrize("rule", ALL_PARAMS)
def test_verification_is_of_a_real_request_and_noise_is_part_of_it(rule: str) -> None:
    """Claim: the timed request passes the real `verify` and yields a recovered token for every row; only GREEDY has no
    noise."""
    logits = made_up_logits(3, 500)
    request = request_of(ALL_PARAMS[rule], logits)
    (found,) = verify([request], [3], logits)
    assert len(found.recovered_token_ids) == 3
    assert (noise_of(request, logits) is None) == (rule == "GREEDY")
    assert logits.softmax(-1).topk(16).values.sum(-1).min() > 0.95


def test_the_goal_is_judged_by_the_worst_model() -> None:
    """Claim: one model below the bar misses the goal; without measurements nothing counts as met."""
    measurements = [
        StreamMeasurement(model, "bfloat16", streams, rate, 0, 0, 0, 0)
        for model, rates in (("a", (10.0, 90.0)), ("b", (10.0, 49.0)))
        for streams, rate in zip((1, 16), rates)
    ]
    assert [bar.state for bar in bars_of(measurements)] == ["missed"]
    assert [bar.state for bar in bars_of(measurements[:2])] == ["stretch"]
    assert [bar.state for bar in bars_of([])] == ["not measured"]


def test_the_whole_command_on_tiny_shapes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Claim: the command runs all its parts, prints their tables and writes every measurement it shows."""
    arguments = "--models draft --dtypes float32 --rows 1 4 --sequences 2 --contexts 64 --streams 1 2 --tokens 4"
    arguments += f" --vocabularies 4096 --rounds 1 --out {tmp_path}"
    assert main(arguments.split()) == 0
    run = json.loads((tmp_path / "engine.json").read_text())
    assert {(step["sequences"], step["rows"]) for step in run["steps"]} == {(1, 1), (1, 4), (2, 1), (2, 5)}
    assert [one["rows"] for one in run["products"]] in ([], list(PRODUCT_ROWS))  # none without kernels
    assert [stream["streams"] for stream in run["streams"]] == [1, 2]
    assert all(step["step_ms"] > 0 and step["limit_ms"] > 0 for step in run["steps"])
    assert len(run["sampler"]) == 2 * len(ALL_PARAMS)
    printed = capsys.readouterr().out
    for title in ("One sequence", "Products of a step", "Plain decoding", "SamplerOutput, of which noise", "bars"):
        assert title in printed
