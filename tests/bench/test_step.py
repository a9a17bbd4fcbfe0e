"""The benchmark of the step: its file for llama.cpp, what it counts, its bars, and a whole run of few tokens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bench.step.results import CHAT, CHAT_4, DEEPENED, row_bars, served_bars
from bench.step.served import ServedMeasurement, long_prompts_of
from bench.step.served import measurement_of as served_of
from bench.step.timing import Timed

from bench.step.__main__ import bars_in, main
from bench.step.gguf_file import in_pairs, write_gguf
from bench.step.rows import CHAINS, TREE, Reading, measure_rows, measurement_of, stored_bytes
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


def test_rows_and_trees_are_timed_in_turns() -> None:
    """Claim: every chain and the tree are timed once a turn beside a reading; ratios are of the same turn.

    Conclusive: with made-up times, of which every second turn is ten times slower, all ratios are those of one turn;
    a real run of the smallest model has a time of every shape.
    """
    shapes = [(rows, 1) for rows in CHAINS] + [TREE]
    times_ms = {(rows, paths): [rows * paths * slow for slow in (1.0, 10.0, 1.0)] for rows, paths in shapes}
    made_up = measurement_of(CHAT, 1, 2_000_000, 4.0, times_ms)
    assert {rows: own.low for rows, own in made_up.over_one_row.items()} == {2: 2.0, 4: 4.0, 8: 8.0}
    assert (made_up.tree_over_chain.low, made_up.tree_over_chain.high) == (4.0, 4.0)
    assert (made_up.reading_ms, made_up.over_reading, made_up.least_ms) == (0.5, 2.0, 1.0)
    run = measure_rows(DRAFT_MODEL, "draft", 1, 2, Reading(10**7))
    assert 0 < run.least_ms <= run.chain_ms[1] < 1000 and list(run.chain_ms) == list(CHAINS)
    assert run.gb_per_s > 0.1 and run.tree_ms > 0


def test_servers_are_compared_prompt_by_prompt() -> None:
    """Claim: a request counts whole, ratios are of the same prompt, equal texts are counted; without llama.cpp its part
    is empty."""
    both = [[Timed(1.0, (1, 2)), Timed(2.0, (1, 2))], [Timed(10.0, (1, 2)), Timed(5.0, (1, 3))]]
    found = served_of(CHAT, 1, both, both[:1])
    assert found.gain is not None and (found.gain.low, found.gain.high) == (0.5, 2.0)
    assert found.long_ratio is not None and found.long_ratio.median == 0.5
    assert found.seconds == ((1.0, 2.0), (10.0, 5.0)) and found.long_seconds == ((1.0, 2.0),)
    assert (found.tokens_per_s, found.their_tokens_per_s, found.equal_texts, found.text_count) == (1.1, 0.7, 1, 2)
    alone = served_of(CHAT, 1, [own[:1] for own in both], [own[:1] for own in both])
    assert alone.tokens_per_s == 1.1 and alone.gain is None and alone.long_ratio is None
    assert len(set(map(tuple, long_prompts_of(TARGET_MODEL, 3, 100)))) == 3


def test_bars_are_of_the_worst_thread_count() -> None:
    """Claim: the slower of one and two threads counts; a packed model's step is over that of as many threads; what was
    not measured is neither met nor missed."""
    times_ms = {(rows, paths): [1.0, 1.0] for rows, paths in [(rows, 1) for rows in CHAINS] + [TREE]}
    runs = [measurement_of(CHAT, threads, 10**6, gb_per_s, times_ms) for threads, gb_per_s in ((1, 1.0), (2, 2.0))]
    limit, *flat = row_bars([*runs, measurement_of(DEEPENED, 1, 10**6, 9.0, times_ms)], has_bfloat16=False)
    assert limit.reached == 2.0 and limit.state == "missed"
    assert {bar.state for bar in flat} == {"stretch", "met", "not measured"}
    half = {shape: [own / 2 for own in times] for shape, times in times_ms.items()}
    packed = row_bars([*runs, measurement_of(CHAT_4, 1, 10**6, 9.0, half)], has_bfloat16=False)
    assert [bar.reached for bar in packed[-3:]] == [0.5, None, None]
    rows8 = {has: row_bars([], has)[2].bound for has in (False, True)}
    assert rows8 == {False: 1.7, True: 1.15}
    alone = ServedMeasurement(CHAT, 1, 10.0, None, None, 100.0, None, None, 0, 1, (), ())
    assert {bar.state for bar in served_bars([alone])} == {"not measured"}
    assert {bar.state for bar in bars_in({})} == {"not measured"}


@pytest.mark.more
def test_a_run_without_llama_cpp_measures_the_rest(tmp_path: Path) -> None:
    """Claim: the command measures rows and services, keeps what an earlier run measured, and leaves llama.cpp's bars
    unmeasured where it is left out."""
    few = ["--models", "deepened", "--threads", "1", "--turns", "1", "--prompts", "1", "--long-prompts", "1"]
    few += ["--tokens", "8", "--no-llama", "--out", str(tmp_path), "--check"]
    assert main([*few, "--parts", "served"]) == 0
    assert main([*few, "--parts", "parts"]) == 0
    written = json.loads((tmp_path / "step.json").read_text(encoding="utf-8"))
    (served,), (part,) = written["served"]["measurements"], written["parts"]["measurements"]
    assert served["tokens_per_s"] > 0 and served["gain"] is None and served["long_ms"] > 0
    assert min(part[f"{name}_ms"] for name in ("planning", "products", "attention", "rest", "sampling")) > 0
    assert {bar["reached"] for bar in written["bars"]} == {None}
