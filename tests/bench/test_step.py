"""The benchmarks of a step and of a start: what they count, their bars."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from bench import startup
from bench.results import Results, read_results
from bench.step.__main__ import BENCHMARK
from bench.step.gguf_file import in_pairs, write_gguf
from bench.step.models import DENSE, FOUR
from bench.step.rows import PASSES, READING, SHAPES, Reading, Rows, WithHead, stored_bytes
from specdec.errors import ConfigError
from tests.support.harness import DRAFT_MODEL, TARGET_MODEL
from tests.support.threads import one_thread  # noqa: F401


def test_rotated_rows_keep_their_products() -> None:
    """Claim: an element of a head stands beside the one that it is rotated with.

    Conclusive: llama.cpp rotates neighbours and `transformers` halves of a head; both are written out here, and the
    rows rotated by the one, in its order, are those rotated by the other.
    """
    heads, size, angle = 3, 8, torch.arange(1, 5).float()
    rows = torch.randn(heads * size, 1)
    low, high = rows.reshape(heads, 2, size // 2).unbind(1)
    halves = torch.stack([low * angle.cos() - high * angle.sin(), low * angle.sin() + high * angle.cos()], 1)
    first, second = in_pairs(rows, heads).reshape(heads, size // 2, 2).unbind(2)
    pairs = torch.stack([first * angle.cos() - second * angle.sin(), first * angle.sin() + second * angle.cos()], 2)
    assert torch.equal(in_pairs(halves.reshape(-1, 1), heads), pairs.reshape(-1, 1))


def test_the_file_for_llama_cpp_has_the_same_weights(tmp_path: Path) -> None:
    """Claim: llama.cpp gets every weight of the folder, bit for bit, and sizes that fit.

    Conclusive: `transformers` reads the file by its own reverse of the conversion, and finds the folder's model.
    """
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    from transformers import AutoModelForCausalLM

    write_gguf(DRAFT_MODEL, tmp_path / "draft.gguf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="draft.gguf", dtype=torch.bfloat16)
    folder = AutoModelForCausalLM.from_pretrained(DRAFT_MODEL, dtype=torch.bfloat16)
    expected, found = folder.state_dict(), read.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())
    for key in ("num_attention_heads", "num_key_value_heads", "rms_norm_eps", "rope_parameters"):
        assert getattr(read.config, key) == pytest.approx(getattr(folder.config, key))


def test_another_class_is_not_written(tmp_path: Path) -> None:
    """Claim: a model that llama.cpp would compute otherwise is refused by its class, and no file is left."""
    pytest.importorskip("gguf")
    config = json.loads((DRAFT_MODEL / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3ForCausalLM"]}))
    with pytest.raises(ConfigError, match="Qwen3ForCausalLM"):
        write_gguf(tmp_path, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_a_step_reads_every_stored_weight(tmp_path: Path) -> None:
    """Claim: the limit counts all weights of a folder as they are stored, a tied embedding once, another one not.

    Conclusive: the shipped target's are all of its file but the header; an output layer of its own replaces the
    embedding.
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(TARGET_MODEL / "model.safetensors")
    total = sum(weight.numel() * weight.element_size() for weight in weights.values())
    assert stored_bytes(TARGET_MODEL) == total
    shutil.copytree(TARGET_MODEL, tmp_path / "untied")
    output = weights["model.embed_tokens.weight"].float()
    save_file(weights | {"lm_head.weight": output}, tmp_path / "untied" / "model.safetensors")
    assert stored_bytes(tmp_path / "untied") == total + output.numel() * 2


def test_every_shape_is_timed_beside_a_reading() -> None:
    """Claim: a turn has a time of every shape and of reading the weights. Conclusive: of the smallest model."""
    found = Rows(DRAFT_MODEL, Reading(10**7)).times_ms(1)
    assert found.keys() == {READING, *SHAPES} and 0 < min(found.values()) and max(found.values()) < 1000


def test_a_head_is_timed_beside_its_target() -> None:
    """Claim: a turn has a step of one row with the head loaded, and passes of every number of rows."""
    found = WithHead(TARGET_MODEL, None).times_ms(1)
    assert found.keys() == {"1 row", *PASSES} and 0 < min(found.values())


def measured(one: float, reading: float, eight: float, of_pass: float) -> Results:
    """Made-up turns of one thread, every second of them ten times slower."""
    results, cell = Results({}), {"threads": 1}
    for slow in (1.0, 10.0, 1.0):
        times = {"1 row": one, READING: reading, "4 rows": one, "8 rows": eight, "8 on 4 paths": eight}
        results.add(cell, DENSE, {name: slow * ms for name, ms in times.items()})
        results.add(cell, FOUR, {name: slow * ms / 2 for name, ms in times.items()})
        results.add(cell, f"{DENSE}, head", {"1 row": slow * one, "pass of 1": slow * of_pass})
    return results


def test_bars_are_of_the_same_turn() -> None:
    """Claim: ratios are of the same turn, a packed model's is over bfloat16's, a pass is over a step without a head;
    what was not measured is neither met nor missed. Conclusive: turns that differ tenfold give the ratio of each."""
    bars = {bar.claim: bar for bar in BENCHMARK.bars(measured(1.0, 0.5, 1.5, 0.1))}
    reached = {claim: bar.reached for claim, bar in bars.items() if bar.reached is not None}
    assert list(reached.values()) == [2.0, 1.0, 1.5, 1.0, 0.5, 0.1, 1.0]
    assert [bars[claim].state for claim in reached] == ["missed", "stretch", "met", "met", "met", "met", "met"]
    assert {bar.state for bar in BENCHMARK.bars(Results({}))} == {"not measured"}


def test_eight_rows_have_a_stricter_bar_where_bfloat16_is_multiplied() -> None:
    """Claim: 8 rows may take 1.15 of one row's time with such instructions, 1.7 without, by the kernels that the
    results name."""
    results = measured(1.0, 1.0, 1.5, 0.1)
    for family, bound in (("fma", 1.7), ("avx512_bf16", 1.15)):
        results.notes["kernels"] = family
        assert BENCHMARK.bars(results)[2].bound == bound


def test_tables_are_made_from_what_was_written(tmp_path: Path) -> None:
    """Claim: the tables of results that were read back are those of the results."""
    results = measured(1.0, 0.5, 1.5, 0.1)
    results.write(tmp_path / "step.json")
    assert BENCHMARK.tables(read_results(tmp_path / "step.json")) == BENCHMARK.tables(results)
    rows, heads = BENCHMARK.tables(results)
    assert len(rows.rows) == 2 and rows.rows[0][0] == f"{DENSE}, 1 thread" and "**2.00**" in rows.rows[0][7]
    assert all(len(row) == len(table.columns) for table in (rows, heads) for row in table.rows)


@pytest.mark.more
def test_a_start_is_timed_and_its_memory_read() -> None:
    """Claim: phases and the whole are timed, and a replica that serves has its weights in memory, at most no less.

    Conclusive: less memory than half of its file would be that of a model that is not there.
    """
    found = startup.start_once("draft", DRAFT_MODEL)
    phases = [ms for name, ms in found.items() if name.startswith("phase ")]
    assert 0 < sum(phases) <= 1.1 * found["total"] and found["beyond"] < found["total"]
    assert found["most_mb"] >= 0.99 * found["serving_mb"] and found["serving_mb"] > found["files_mb"] / 2
