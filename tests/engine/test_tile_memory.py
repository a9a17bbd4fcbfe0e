"""Remembered tile sizes: used where everything is as it was, never where anything is not."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.engine import tile_memory, tiled_modules
from specdec.engine.attention import AttentionShape, ScoreRule
from specdec.engine.tile_memory import measure, stable_tiles
from specdec.engine.tile_sizes import ALONE, CANDIDATE_WIDTHS, TileSizes
from specdec.engine.tiled_modules import TiledLinear, Weight
from specdec.folders import cache_folder

SHAPE = AttentionShape(2, 4, 2, 16, (ScoreRule(0.25),))


def linear(in_size: int = 32, out_size: int = 48) -> TiledLinear:
    """A product with random weights in float32."""
    return TiledLinear(Weight(torch.randn(out_size, in_size, generator=torch.Generator().manual_seed(1))), None)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_folder()


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[AttentionShape]:
    """The shapes that were measured in full, in order."""
    found: list[AttentionShape] = []

    def recorded(linears, shape):
        found.append(shape)
        return measure(linears, shape)

    monkeypatch.setattr(tile_memory, "measure", recorded)
    return found


def test_the_second_load_measures_nothing(measured: list[AttentionShape]) -> None:
    """Claim: what one load measured, the next one of the same shapes takes over, and both have the same sizes."""
    first = stable_tiles([linear()], SHAPE)
    assert stable_tiles([linear(), linear()], SHAPE) == first and len(measured) == 1
    assert first == measure([linear()], SHAPE)


def changed_threads(monkeypatch: pytest.MonkeyPatch) -> tuple[TiledLinear, AttentionShape]:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    return linear(), SHAPE


def changed_processor(monkeypatch: pytest.MonkeyPatch) -> tuple[TiledLinear, AttentionShape]:
    monkeypatch.setattr(tile_memory, "_processor", lambda: "another")
    return linear(), SHAPE


def changed_library(monkeypatch: pytest.MonkeyPatch) -> tuple[TiledLinear, AttentionShape]:
    monkeypatch.setattr(torch, "__version__", "2.99")
    return linear(), SHAPE


def changed_variable(monkeypatch: pytest.MonkeyPatch) -> tuple[TiledLinear, AttentionShape]:
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    return linear(), SHAPE


def changed_code(monkeypatch: pytest.MonkeyPatch) -> tuple[TiledLinear, AttentionShape]:
    monkeypatch.setattr(tile_memory, "_source_digest", lambda file: "edited")
    return linear(), SHAPE


def other_product(monkeypatch: pytest.MonkeyPatch) -> tuple[TiledLinear, AttentionShape]:
    return linear(out_size=64), SHAPE


def other_layout(monkeypatch: pytest.MonkeyPatch) -> tuple[TiledLinear, AttentionShape]:
    monkeypatch.setattr(tiled_modules, "PACKED_ELEMENTS_MIN", 0)
    changed = linear()
    assert changed.weight.is_packed, "the library packs no weights here"
    return changed, SHAPE


def other_rule(monkeypatch: pytest.MonkeyPatch) -> tuple[TiledLinear, AttentionShape]:
    return linear(), AttentionShape(2, 4, 2, 16, (ScoreRule(0.25, window=9),))


@pytest.mark.parametrize(
    "change",
    [
        changed_threads,
        changed_processor,
        changed_library,
        changed_variable,
        changed_code,
        other_product,
        other_layout,
        other_rule,
    ],
)
def test_any_change_measures_anew(
    measured: list[AttentionShape], monkeypatch: pytest.MonkeyPatch, change: Callable
) -> None:
    """Claim: no measurement is used where a library could pick another kernel: another processor, thread count, library
    version, library setting, product, memory order or attention, or where the measuring code changed."""
    stable_tiles([linear()], SHAPE)
    product, shape = change(monkeypatch)
    stable_tiles([product], shape)
    assert len(measured) == 2


def test_the_spot_probe_finds_a_width_that_no_longer_agrees(
    measured: list[AttentionShape], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: remembered sizes are not trusted: if a product at the least, middle or largest of them differs, all are
    measured again and the new ones are remembered.

    Conclusive: the product is made to differ at one width only, for each of the three.
    """
    before, _ = stable_tiles([linear()], SHAPE)
    assert len(before.widths) >= 3, "the test needs three widths to choose from"
    real = TiledLinear.tile
    for count, width in enumerate((before.widths[0], before.widths[len(before.widths) // 2], before.widths[-1]), 2):

        def tile(self, rows, width=width):
            product = real(self, rows)
            return product * 1.5 if len(rows) == width else product

        monkeypatch.setattr(TiledLinear, "tile", tile)
        widths, _ = stable_tiles([linear()], SHAPE)
        assert width not in widths.widths and len(measured) == count
        monkeypatch.setattr(TiledLinear, "tile", real)
        file = cache_folder() / tile_memory.FILE_NAME
        assert [entry["widths"] for entry in json.loads(file.read_text()).values()] == [list(widths.widths)]
        (entry,) = json.loads(file.read_text()).items()
        file.write_text(json.dumps({entry[0]: {**entry[1], "widths": before.widths}}))


@pytest.mark.parametrize(
    "content",
    ["", "not JSON", "[]", '{"KEY": 1}', '{"KEY": {"widths": [8, 4], "query_tiles": [1]}}']
    + ['{"KEY": {"widths": [5], "query_tiles": [1]}}', '{"KEY": {"widths": [], "query_tiles": []}}']
    + ['{"KEY": {"widths": [1, 4], "query_tiles": [1]}}', '{"KEY": {"widths": "4", "query_tiles": [true]}}'],
)
def test_what_is_no_measurement_is_not_used(measured: list[AttentionShape], folder: Path, content: str) -> None:
    """Claim: a damaged or foreign file, or an entry that no measurement could have made, is replaced."""
    folder.mkdir(parents=True)
    key = tile_memory._key([linear()], SHAPE)
    (folder / tile_memory.FILE_NAME).write_text(content.replace("KEY", key))
    expected = measure([linear()], SHAPE)
    assert stable_tiles([linear()], SHAPE) == expected and len(measured) == 1
    assert stable_tiles([linear()], SHAPE) == expected and len(measured) == 1


def test_without_a_folder_nothing_fails(measured: list[AttentionShape], folder: Path) -> None:
    """Claim: where the folder cannot be made, sizes are measured at every load."""
    folder.parent.mkdir(exist_ok=True)
    folder.write_text("a file in its place")
    assert stable_tiles([linear()], SHAPE) == stable_tiles([linear()], SHAPE) and len(measured) == 2


def test_the_file_stays_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the file holds a bounded number of entries, the latest ones."""
    monkeypatch.setattr(tile_memory, "ENTRIES_MAX", 2)
    monkeypatch.setattr(tile_memory, "measure", lambda linears, shape: (TileSizes(CANDIDATE_WIDTHS), (4,)))
    keys = []
    for size in (16, 32, 48):
        stable_tiles([linear(size)], SHAPE)
        keys.append(tile_memory._key([linear(size)], SHAPE))
    assert list(json.loads((cache_folder() / tile_memory.FILE_NAME).read_text())) == keys[1:]


def test_the_folder_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the folder follows the XDG rule: an absolute $XDG_CACHE_HOME, else ~/.cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == Path(os.path.expanduser("~/.cache/specdec"))


def test_width_1_alone_needs_no_probe(measured: list[AttentionShape], monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: the last resort, one row at a time, is remembered too."""
    monkeypatch.setattr(TiledLinear, "tile", lambda self, rows: torch.rand(len(rows), 48))
    assert stable_tiles([linear()], SHAPE)[0].widths == ALONE
    assert stable_tiles([linear()], SHAPE)[0].widths == ALONE and len(measured) == 1
