"""Models shared by the tests of the engine, loaded once, and the torch thread count of each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from specdec.engine.loading.model import load_model
from specdec.engine.table_model import write_table_model
from specdec.folders import EMBEDDED_MODELS
from tests.support.encoder_decoder_models import KINDS, make_encoder_decoder
from tests.support.engine_bench import VOCABULARY_SIZE, Bench
from tests.support.engine_models import ARCHITECTURES, Driver, make_tiny_model, without_kernels
from tests.support.packed import KINDS as VALUES
from tests.support.packed import packed_weights
from tests.support.threads import one_thread  # noqa: F401

SHIPPED = EMBEDDED_MODELS
# Sizes that fill no vector register: they would show any kernel that treats the end of a run differently.
ODD = {"hidden_size": 72, "head_dim": 18, "intermediate_size": 75, "num_key_value_heads": 4}
LONG = {"max_position_embeddings": 1200}  # beyond two splits of attention, of 512 positions
TINY: dict[str, tuple[str, dict]] = {name: (name, {}) for name in ARCHITECTURES} | {
    "odd": ("llama", ODD),
    "gemma3-wide": ("gemma3", {"sliding_window": 150, "final_logit_softcapping": 8.0}),
    "llama-long": ("llama", LONG),
    "gemma2-long": ("gemma2", LONG),
}


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A model folder by name: a tiny one of TINY, or of KINDS, or "target" and "draft", the shipped pair."""
    made: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in TINY and name not in KINDS:
            return SHIPPED / name
        if name not in made and name in KINDS:
            made[name] = make_encoder_decoder(tmp_path_factory.mktemp(name), name)
        if name not in made:
            architecture, overrides = TINY[name]
            made[name] = make_tiny_model(tmp_path_factory.mktemp(name), architecture, **overrides)
        return made[name]

    return find


@pytest.fixture(scope="session")
def driver_of(folder_of: Callable[[str], Path]) -> Callable[..., Driver]:
    """A driver by name, dtype, and whether its model has the native kernels; loaded once. Tests release the tables they
    open. Of a name with a kind of packed values behind it, as "llama-int4", all linear layers are rounded to such."""
    loaded: dict[tuple[str, str, bool], Driver] = {}

    def find(name: str, dtype: str = "float32", with_kernels: bool = True) -> Driver:
        key = name, dtype, with_kernels
        if key not in loaded:
            folder, _, kind = name.rpartition("-")
            folder, kind = (folder, kind) if kind in VALUES else (name, "")
            with nullcontext() if with_kernels else without_kernels(), packed_weights(kind):
                loaded[key] = Driver.load(folder_of(folder), dtype, block_count=200)
        return loaded[key]

    return find


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A running engine on a table model; its cache is sound at the end."""
    write_table_model(tmp_path, VOCABULARY_SIZE, positions_max=200, seed=4)
    bench = Bench(load_model(str(tmp_path)), chunk_size=8, rows_max=24, prompt_rows_max=16)
    bench.engine.start()
    yield bench
    bench.engine.stop()
    bench.engine.cache.check_integrity()
