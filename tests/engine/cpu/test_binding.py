"""The boundary of the native kernels: what does not fit is refused in Python, before the library is called."""

from __future__ import annotations

import ctypes
import logging
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from specdec.engine.cpu import kernels as binding
from specdec.engine.cpu.arguments import (
    ROW_ARRAYS,
    LayerCache,
    Norm,
    Rows,
    ScoreRule,
    WeightPanels,
)
from specdec.engine.cpu.compile_kernels import SOURCES, NotCompiled, find_compiler
from specdec.engine.cpu.kernels import Kernels
from specdec.engine.cpu.packing import Packer
from specdec.engine.cpu.step_arguments import StepArguments, StepModel
from specdec.engine.cpu.structs import DONE, STRUCTS, LayerStruct, ModelStruct, WeightStruct
from specdec.errors import ConfigError

HEADER = (SOURCES / "kernels.h").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def kernels() -> Kernels:
    """Those of this machine."""
    found = binding.kernels()
    if found is None:
        pytest.skip("no native kernels here: no compiler, or a processor without AVX2 and NEON")
    return found


class Uncalled:
    """Stands for the library where it must not be reached."""

    def __getattr__(self, name: str) -> object:
        raise AssertionError(f"{name} was called")


def row_arrays(**changes: numpy.ndarray) -> dict[str, numpy.ndarray]:
    """Two rows at positions 0 and 1 of a sequence with the blocks 2 and 0, in blocks of 8."""
    arrays = {
        "sequence": [0, 0],
        "position": [0, 1],
        "slot": [16, 17],
        "base": [1, 2],
        "path_start": [0, 0, 0],
        "path": [],
        "table_start": [0, 2],
        "table": [2, 0],
    }
    return {name: numpy.array(arrays[name], dtype) for name, dtype in ROW_ARRAYS.items()} | changes


def some_cache(dtype: torch.dtype = torch.float32) -> LayerCache:
    """Three blocks of 8 positions, two heads of 4 elements."""
    return LayerCache(torch.zeros(3, 2, 4, 8, dtype=dtype), torch.zeros(3, 2, 8, 4, dtype=dtype))


def some_rows() -> Rows:
    return Rows(**row_arrays(), block_count=3, block_size=8)


X = torch.zeros(2, 5)
HALF = X.to(torch.float16)
ELSEWHERE = torch.zeros(2, 5, device="meta")
HEADS = torch.zeros(2, 2, 4)
WRONG: dict[str, tuple[Callable[[Kernels, WeightPanels], object], str]] = {
    "packed integers": (lambda k, w: k.pack(X.to(torch.int8)), "weight.dtype is torch.int8"),
    "a packed vector": (lambda k, w: k.pack(X[0]), r"weight.shape is \[5\]; it must be \[out, in\]"),
    "nothing to pack": (lambda k, w: k.pack(X[:0]), r"weight.shape is \[0, 5\]"),
    "a weight elsewhere": (lambda k, w: k.pack(ELSEWHERE), "weight.device is meta; it must be cpu"),
    "a bias of another size": (lambda k, w: k.pack(X, X[0]), r"bias.shape is \[5\]; it must be \[2\]"),
    "inputs of another size": (lambda k, w: k.product(w, X[:, :4]), r"x.shape is \[2, 4\]; it must be \[..., 5\]"),
    "a number as input": (lambda k, w: k.product(w, X[0, 0]), r"x.shape is \[\]"),
    "inputs of float64": (lambda k, w: k.product(w, X.double()), "x.dtype is torch.float64"),
    "inputs elsewhere": (lambda k, w: k.product(w, ELSEWHERE), "x.device is meta"),
    "results of float64": (lambda k, w: k.product(w, X, torch.float64), "result.dtype is torch.float64"),
    "a gain of float16": (lambda k, w: Norm(HALF[0]), "gain.dtype is torch.float16; it must be torch.float32"),
    "a gain of two dimensions": (lambda k, w: Norm(X), r"gain.shape is \[2, 5\]"),
    "a gain with gaps": (lambda k, w: Norm(X.T[0]), "gain.stride"),
    "a bias with gaps": (lambda k, w: Norm(torch.zeros(2), X.T[0]), "bias.stride"),
    "a negative epsilon": (lambda k, w: Norm(X[0], epsilon=-1.0), "epsilon is -1.0; it must be 0 or more"),
    "an epsilon that is no number": (lambda k, w: Norm(X[0], epsilon=float("nan")), "epsilon is nan"),
    "a norm of another size": (lambda k, w: k.normalize(Norm(torch.zeros(4)), X), r"x.shape is \[2, 5\]"),
    "an unknown activation": (lambda k, w: k.activate("swish", X), "activation is 'swish'; it must be one of silu"),
    "tanh of float16": (lambda k, w: k.tanh(HALF), "x.dtype is torch.float16; it must be torch.float32"),
    "argmax of float16": (lambda k, w: k.argmax(HALF), "x.dtype is torch.float16; it must be torch.float32"),
    "argmax of nothing": (lambda k, w: k.argmax(X[:, :0]), r"x.shape is \[2, 0\]"),
    "a cache of three dimensions": (lambda k, w: LayerCache(HEADS, HEADS), r"keys.shape is \[2, 2, 4\]"),
    "blocks of 12 positions": (
        lambda k, w: LayerCache(torch.zeros(3, 2, 4, 12), torch.zeros(3, 2, 12, 4)),
        "positions of a block, is 12; it must be 8 or a multiple of 16",
    ),
    "heads of 513 elements": (
        lambda k, w: LayerCache(torch.zeros(1, 1, 513, 8), torch.zeros(1, 1, 8, 513)),
        "the head size, is 513; it must be at most 512",
    ),
    "values laid out like keys": (
        lambda k, w: LayerCache(torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 4, 8)),
        r"values.shape is \[3, 2, 4, 8\]; it must be \[3, 2, 8, 4\]",
    ),
    "values of another type": (
        lambda k, w: LayerCache(torch.zeros(3, 2, 4, 8), torch.zeros(3, 2, 8, 4).half()),
        "values.dtype is torch.float16",
    ),
    "keys with gaps": (
        lambda k, w: LayerCache(torch.zeros(3, 2, 8, 4).mT, torch.zeros(3, 2, 8, 4)),
        "keys.stride",
    ),
    "slots beyond int32": (
        lambda k, w: LayerCache(torch.zeros(1).expand(2**27, 1, 1, 16), torch.zeros(1).expand(2**27, 1, 16, 1)),
        "is 2147483648; it must be at most 2147483647",
    ),
    "an infinite scaling": (lambda k, w: ScoreRule(float("inf")), "scaling is inf"),
    "a negative soft cap": (lambda k, w: ScoreRule(1.0, softcap=-1.0), "softcap is -1.0"),
    "a negative window": (lambda k, w: ScoreRule(1.0, window=-1), "window is -1; it must be 0 or more"),
    "a bias of an even width": (
        lambda k, w: ScoreRule(1.0, bias=torch.zeros(2, 4)),
        r"bias.shape is \[2, 4\]; it must",
    ),
    "a bias without heads": (lambda k, w: ScoreRule(1.0, bias=torch.zeros(5)), r"bias.shape is \[5\]; it must be"),
    "a bias of float16": (lambda k, w: ScoreRule(1.0, bias=HALF), "bias.dtype is torch.float16; it must be"),
    "a bias with gaps of heads": (lambda k, w: ScoreRule(1.0, bias=torch.zeros(5, 3).T), "bias.stride"),
    "a bias of other heads": (
        lambda k, w: k.attend(some_cache(), some_rows(), ScoreRule(1.0, bias=torch.zeros(3, 5)), HEADS),
        r"bias.shape is \[3, 5\]; it must be \[2 heads, 2 reach \+ 1\]",
    ),
    "keys of one row too many": (
        lambda k, w: k.write(some_cache(), some_rows(), torch.zeros(3, 2, 4), HEADS),
        r"keys.shape is \[3, 2, 4\]; it must be \[2, 2, 4\] \[rows, heads, head size\]",
    ),
    "values of other heads": (
        lambda k, w: k.write(some_cache(), some_rows(), HEADS, torch.zeros(2, 3, 4)),
        r"values.shape is \[2, 3, 4\]",
    ),
    "keys of another type than the cache": (
        lambda k, w: k.write(some_cache(torch.bfloat16), some_rows(), HEADS, HEADS),
        "keys.dtype is torch.float32; it must be torch.bfloat16, the cache's",
    ),
    "a cache of fewer blocks than the rows'": (
        lambda k, w: k.write(some_cache(), Rows(**row_arrays(), block_count=4, block_size=8), HEADS, HEADS),
        "cache is of 3 blocks of 8 positions; it must be of 4 blocks of 8 or more, as its rows",
    ),
    "a cache of other blocks than the rows'": (
        lambda k, w: k.attend(some_cache(), Rows(**row_arrays(), block_count=3, block_size=16), ScoreRule(1.0), HEADS),
        "cache is of 3 blocks of 8 positions",
    ),
    "three heads over two": (
        lambda k, w: k.attend(some_cache(), some_rows(), ScoreRule(1.0), torch.zeros(2, 3, 4)),
        r"queries.shape is \[2, 3, 4\]; it must be \[rows, a multiple of 2 kv heads, head size\]",
    ),
    "queries of two dimensions": (
        lambda k, w: k.attend(some_cache(), some_rows(), ScoreRule(1.0), torch.zeros(2, 8)),
        r"queries.shape is \[2, 8\]",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused(what: str, kernels: Kernels) -> None:
    """Claim: a wrong shape, type, stride, device or number is a ValueError that names field, value and limit.

    Conclusive: in place of the library is an object that fails when any function of it is called.
    """
    weight = kernels.pack(torch.zeros(2, 5))
    refusing = Kernels.__new__(Kernels)
    refusing._library = Uncalled()  # type: ignore[assignment]  # stands in its place
    refusing._packer = Packer(refusing._library)
    attempt, message = WRONG[what]
    with pytest.raises(ValueError, match=message):
        attempt(refusing, weight)


WRONG_ROWS: dict[str, tuple[dict[str, numpy.ndarray], str]] = {
    "slots of int64": ({"slot": numpy.array([16, 17])}, "slot.dtype is int64; it must be int32"),
    "two dimensions": ({"base": numpy.zeros((2, 1), numpy.int32)}, r"base.shape is \(2, 1\)"),
    "gaps": ({"base": numpy.zeros(4, numpy.int32)[::2]}, r"base.shape is \(2,\), strides \(8,\)"),
    "a position too few": ({"position": numpy.zeros(1, numpy.int32)}, "length of position is 1; it must be 2"),
    "a start too few": ({"path_start": numpy.zeros(2, numpy.int64)}, "length of path_start is 2; it must be 3"),
    "a path without its end": ({"path": numpy.zeros(1, numpy.int32)}, "last of path_start is 0; it must be 1"),
    "a table without its end": ({"table": numpy.zeros(1, numpy.int32)}, "last of table_start is 2; it must be 1"),
    "no table": ({"table_start": numpy.zeros(0, numpy.int64)}, "length of table_start is 0; it must be 1 or more"),
    "first positions of int64": ({"first": numpy.zeros(2, numpy.int64)}, "first.dtype is int64; it must be int32"),
    "a first position too few": ({"first": numpy.zeros(1, numpy.int32)}, "length of first is 1; it must be 2"),
}


@pytest.mark.parametrize("what", WRONG_ROWS)
def test_rows_of_other_lengths_are_refused(what: str) -> None:
    """Claim: arrays of rows that do not fit together are refused before the library reads one of them."""
    changes, message = WRONG_ROWS[what]
    with pytest.raises(ValueError, match=message):
        Rows(**row_arrays(**changes), block_count=3, block_size=8)


OUTSIDE = {
    "a slot beyond the cache": {"slot": [16, 24]},
    "a negative slot": {"slot": [16, -1]},
    "a sequence without a table": {"sequence": [0, 1]},
    "a negative sequence": {"sequence": [-1, 0]},
    "a block beyond the cache": {"table": [2, 3]},
    "a negative block": {"table": [-1, 0]},
    "a base beyond the table": {"base": [1, 17], "position": [0, 16]},
    "a negative base": {"base": [-1, 2]},
    "a negative position": {"base": [0, 2], "position": [-1, 1]},
    "a row that does not see itself": {"base": [1, 1]},
    "starts that fall": {"path_start": [0, 1, 0]},
    "a path beyond the cache": {"path": [24], "path_start": [0, 0, 1], "base": [1, 1]},
    "a negative first position": {"first": [-1, 0]},
    "a first position behind its row's last": {"first": [0, 2]},
    "a first position on a path": {"first": [0, 2], "path": [17], "path_start": [0, 0, 1], "base": [1, 1]},
    "nothing to see": {"first": [0, 0], "base": [1, 0]},
    "a base beyond the table with a first position": {"first": [0, 0], "base": [1, 17]},
}


@pytest.mark.parametrize("what", OUTSIDE)
def test_an_index_out_of_range_is_refused(what: str, kernels: Kernels) -> None:
    """Claim: rows with any index outside of the cache or of their own tables are refused before anything is computed;
    the same rows with indices inside are not."""
    assert kernels.rows(**row_arrays(), block_count=3, block_size=8).count == 2
    types = ROW_ARRAYS | {"first": numpy.int32}
    changes = {name: numpy.array(values, types[name]) for name, values in OUTSIDE[what].items()}
    with pytest.raises(ValueError, match="rows for 3 blocks of 8 positions: "):
        kernels.rows(**row_arrays(**changes), block_count=3, block_size=8)


def test_inputs_of_any_strides_are_read_right(kernels: Kernels) -> None:
    """Claim: weights and inputs that are views of others, by columns, by steps or broadcast, have the results of their
    contiguous copies, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    wide = torch.randn(40, 90, generator=generator)
    x = torch.randn(7, 3, 90, generator=generator)
    for weight in (wide[:, ::2], wide[::3], wide.T, wide.T[5:, ::2], wide[:1].expand(40, 90)):
        views = [x[..., : weight.shape[1]], x[:, 1, : weight.shape[1]], x.flip(0)[::2, :, -weight.shape[1] :]]
        packed, copied = kernels.pack(weight), kernels.pack(weight.contiguous())
        for view in views:
            assert view.shape[-1] == weight.shape[1]
            assert torch.equal(kernels.product(packed, view), kernels.product(copied, view.contiguous()))


def test_a_packed_weight_is_a_copy(kernels: Kernels) -> None:
    """Claim: a packed weight and its bias keep their numbers when the originals change or go."""
    weight, bias = torch.ones(3, 4), torch.ones(3)
    packed = kernels.pack(weight, bias)
    weight.zero_(), bias.zero_()
    assert kernels.product(packed, torch.ones(1, 4)).tolist() == [[5.0, 5.0, 5.0]]
    assert packed.byte_count == packed.panels.numel() + 12 >= 48 + 12


def test_nothing_is_a_result_too(kernels: Kernels) -> None:
    """Claim: no rows give no results, and no error."""
    empty = torch.zeros(0, 5)
    assert kernels.product(kernels.pack(torch.zeros(2, 5)), empty).shape == (0, 2)
    assert kernels.normalize(Norm(torch.ones(5)), empty).shape == (0, 5)
    assert kernels.activate("silu", empty).shape == (0, 5)
    assert kernels.argmax(empty).shape == (0,)


def some_model(kernels: Kernels) -> ModelStruct:
    """A model of one layer: hidden size 6, two heads of 4 elements over two, nine ids, ten positions."""
    dtype, kept = torch.float32, []

    def weight(out_size: int, in_size: int) -> WeightStruct:
        kept.append(kernels.pack(torch.ones(out_size, in_size)))
        return kept[-1].struct

    norm, cache = Norm(torch.ones(6)), some_cache(dtype)
    layer = LayerStruct(before_attention=norm.struct, before_mlp=norm.struct, cache=cache.struct)
    layer.rule = ScoreRule(1.0).struct
    layer.qkv, layer.out = weight(24, 6), weight(6, 8)
    layer.gate, layer.up, layer.down = weight(5, 6), weight(5, 6), weight(6, 5)
    model = ModelStruct(layer_count=1, hidden_size=6, intermediate_size=5, heads=2, kv_heads=2, head_size=4)
    model.layers = (LayerStruct * 1)(layer)
    model.embedding_scale = model.residual_scale = model.logit_scale = 1.0
    model.last, model.output = norm.struct, weight(9, 6)
    model.vocabulary_size, model.positions_max = 9, 10
    model.kept = [*kept, norm, cache, layer]
    return model


IDS = torch.tensor([[0, 8]])
WRONG_MODELS: dict[str, tuple[Callable[[ModelStruct], object], str]] = {
    "an unknown type": (lambda m: setattr(m, "type", 3), "type is 3; it must be SD_FLOAT32"),
    "no layers": (lambda m: setattr(m, "layer_count", 0), "layer_count is 0; it must be 1 or more"),
    "three heads over two": (lambda m: setattr(m, "heads", 3), "heads is 3; it must be a multiple of 2 kv_heads"),
    "an odd rotation": (lambda m: setattr(m, "rotated_size", 3), "rotated_size is 3; it must be even"),
    "a rotation beyond the head": (lambda m: setattr(m, "rotated_size", 6), "rotated_size is 6"),
    "another hidden size": (lambda m: setattr(m, "hidden_size", 7), r"output is \[9, 6\]; it must be \[9, 7\]"),
    "another inner size": (
        lambda m: setattr(m, "intermediate_size", 6),
        r"gate of layer 0 is \[5, 6\]; it must be \[6, 6\]",
    ),
    "no packed weight": (lambda m: setattr(m.layers[0].gate, "panels", None), "gate of layer 0.panels is None"),
    "cosines without sines": (lambda m: setattr(m.layers[0], "cosines", 64), "cosines and sines of layer 0"),
    "a cache of another type": (lambda m: setattr(m.layers[0].cache, "type", 1), "cache of layer 0 is"),
    "an embedding of another type": (lambda m: setattr(m.output, "type", 1), "output.type, without an embedding, is 1"),
}


@pytest.mark.parametrize("what", WRONG_MODELS)
def test_a_model_that_does_not_fit_is_refused(what: str, kernels: Kernels) -> None:
    """Claim: a model whose sizes or types do not fit together is refused once, when it is made."""
    model = some_model(kernels)
    StepModel(model, ())
    change, message = WRONG_MODELS[what]
    change(model)
    with pytest.raises(ValueError, match=message):
        StepModel(model, ())


WRONG_STEPS: dict[str, tuple[Callable[[Kernels, StepModel], object], str]] = {
    "ids of int32": (lambda k, m: StepArguments(m, IDS.int(), IDS[:, :0]), "ids.dtype is torch.int32"),
    "an id too large": (
        lambda k, m: StepArguments(m, IDS + 1, IDS[:, :0]),
        "ids is from 1 to 9; it must be from 0 to 8",
    ),
    "a negative id": (lambda k, m: StepArguments(m, IDS - 1, IDS[:, :0]), "ids is from -1 to 7"),
    "a row of logits too large": (lambda k, m: StepArguments(m, IDS, IDS), "logit_rows is from 0 to 8"),
    "a row beyond int32": (lambda k, m: StepArguments(m, IDS, IDS[0, :1] + 2**32), "logit_rows is from 4294967296"),
    "rows of float32": (lambda k, m: StepArguments(m, IDS, torch.zeros(1)), "logit_rows.dtype is torch.float32"),
    "inputs of another size": (
        lambda k, m: StepArguments(m, IDS, IDS[:, :0], inputs=torch.zeros(2, 5)),
        r"inputs.shape is \[2, 5\]; it must be \[2, 6\]",
    ),
    "inputs of another type": (
        lambda k, m: StepArguments(m, IDS, IDS[:, :0], inputs=torch.zeros(2, 6).half()),
        "inputs.dtype is torch.float16",
    ),
    "an id too few": (
        lambda k, m: k.step(m, some_rows(), StepArguments(m, IDS[:, :1], IDS[:, :0])),
        "the length of ids is 1; it must be 2",
    ),
    "rows for another cache": (
        lambda k, m: k.step(m, Rows(**row_arrays(), block_count=4, block_size=8), StepArguments(m, IDS, IDS[:, :0])),
        "the cache is of 3 blocks",
    ),
    "a position beyond the tables": (
        lambda k, m: k.step(
            m,
            Rows(**row_arrays(position=numpy.array([0, 10], numpy.int32)), block_count=3, block_size=8),
            StepArguments(m, IDS, IDS[:, :0]),
        ),
        "the last position is 10; it must be below 10, the model's",
    ),
}


@pytest.mark.parametrize("what", WRONG_STEPS)
def test_a_step_that_does_not_fit_is_refused(what: str, kernels: Kernels) -> None:
    """Claim: ids, rows, positions and inputs that the model does not have are refused before the library is called; a
    step that fits is run."""
    model = StepModel(some_model(kernels), ())
    rows = kernels.rows(**row_arrays(), block_count=3, block_size=8)
    sound = StepArguments(model, IDS, IDS[:, :1], keeps_hidden=True)
    assert kernels.step(model, rows, sound) == DONE
    assert sound.logits.shape == (1, 9) and sound.hidden is not None and sound.is_finite.tolist() == [True, True]
    refusing = Kernels.__new__(Kernels)
    refusing._library = Uncalled()  # type: ignore[assignment]  # stands in its place
    refusing._packer = Packer(refusing._library)
    attempt, message = WRONG_STEPS[what]
    with pytest.raises(ValueError, match=message):
        attempt(refusing, model)


def choose(monkeypatch: pytest.MonkeyPatch, choice: str | None) -> Kernels | None:
    """What a new process with this SPECDEC_KERNELS would have."""
    if choice is None:
        monkeypatch.delenv(binding.CHOICE_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(binding.CHOICE_VARIABLE, choice)
    return binding.kernels.__wrapped__()


def test_the_variable_chooses(monkeypatch: pytest.MonkeyPatch, kernels: Kernels, caplog) -> None:
    """Claim: SPECDEC_KERNELS=off leaves the kernels out, in one line; the name of an instruction set chooses it; a
    name that is none, or that this machine cannot run, ends the start with the names there are."""
    with caplog.at_level(logging.WARNING):
        assert choose(monkeypatch, "off") is None
    assert len(caplog.records) == 1 and "off" in caplog.text
    chosen = choose(monkeypatch, kernels.instructions)
    assert chosen is not None and chosen.instructions == kernels.instructions
    with pytest.raises(ConfigError, match="SPECDEC_KERNELS is 'sse'; it must be one of avx2, avx512, "):
        choose(monkeypatch, "sse")
    foreign = "neon" if kernels.instructions != "neon" else "avx2"
    with pytest.raises(ConfigError, match=f"SPECDEC_KERNELS is '{foreign}', which this processor or library"):
        choose(monkeypatch, foreign)


@pytest.mark.parametrize("content", [b"no library", b"", None], ids=["garbage", "empty", "absent"])
def test_a_library_that_cannot_be_loaded_is_left_out(content: bytes | None, tmp_path, monkeypatch, caplog) -> None:
    """Claim: without a library, or with a file that is none, there are no kernels and one line of the log says so; with
    SPECDEC_KERNELS set to an instruction set, that is an error."""
    library = tmp_path / "_kernels.so"
    if content is not None:
        library.write_bytes(content)
    monkeypatch.setattr(binding, "LIBRARY", library)
    with caplog.at_level(logging.WARNING):
        assert choose(monkeypatch, None) is None
    assert len(caplog.records) == 1 and "no native kernels" in caplog.text and "_kernels.so" in caplog.text
    with pytest.raises(ConfigError, match="SPECDEC_KERNELS is 'avx2', but .* cannot be loaded"):
        choose(monkeypatch, "avx2")


def test_a_library_older_than_its_sources_says_so(tmp_path: Path, monkeypatch, caplog, kernels: Kernels) -> None:
    """Claim: in a checkout whose sources changed after the library was compiled, one line names them and the remedy;
    the kernels are used."""
    monkeypatch.setattr(binding, "SOURCES", tmp_path)
    (tmp_path / "products.h").write_text("", encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert choose(monkeypatch, None) is not None
    assert len(caplog.records) == 1 and "products.h" in caplog.text and "make install" in caplog.text


def test_structures_are_those_of_the_header(tmp_path: Path) -> None:
    """Claim: every structure has the size in Python that C gives it, and every field its place and size.

    Conclusive: a C program prints sizeof and offsetof of each, by names taken from the Python classes, so that a field
    that one side lacks is an error of the compiler or another size; and it names all structures of the header.
    """
    try:
        compiler = find_compiler()
    except NotCompiled as error:
        pytest.skip(str(error))
    assert set(re.findall(r"\} (sd_\w+);", HEADER)) == set(STRUCTS)
    lines = []
    for name, struct in STRUCTS.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, *_ in struct._fields_:
            place = f"offsetof({name}, {field}), sizeof((({name} *)0)->{field})"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", {place});')
    body = "\n".join(lines)
    program = f'#include <stdio.h>\n#include "kernels.h"\nint main(void) {{\n{body}\nreturn 0;\n}}\n'
    (tmp_path / "sizes.c").write_text(program, encoding="utf-8")
    compiler.run("-std=c11", f"-I{SOURCES}", str(tmp_path / "sizes.c"), "-o", str(tmp_path / "sizes"))
    printed = subprocess.run([tmp_path / "sizes"], capture_output=True, text=True, check=True).stdout.splitlines()
    expected = []
    for name, struct in STRUCTS.items():
        expected.append(f"{name} {ctypes.sizeof(struct)}")
        fields = [(field, getattr(struct, field)) for field, *_ in struct._fields_]
        expected += [f"{name}.{field} {place.offset} {place.size}" for field, place in fields]
    assert printed == expected


def test_functions_are_those_of_the_header() -> None:
    """Claim: every public function is called with the parameters and the result that kernels.h declares.

    Conclusive: the header's declarations are read, and all functions of both sides compared.
    """
    kinds = {"int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}
    declared = re.findall(r"SD_PUBLIC ([\w ]+?\**)(sd_\w+)\((.*?)\);", HEADER, re.DOTALL)
    assert {name for _, name, _ in declared} == set(binding._PARAMETERS)
    for result, name, inside in declared:
        parameters = [part.strip() for part in inside.split(",") if part.strip() != "void"]
        found = binding._PARAMETERS[name]
        assert len(found) == len(parameters), name
        for parameter, kind in zip(parameters, found):
            if "*" not in parameter:
                assert kind is kinds[parameter.split()[-2]], (name, parameter)
            elif (structure := re.search(r"sd_\w+", parameter)) is not None:
                assert kind is ctypes.POINTER(STRUCTS[structure[0]]), (name, parameter)
            else:
                assert kind in (ctypes.c_void_p, ctypes.c_char_p), (name, parameter)
        results = {"void": None, "const char *": ctypes.c_char_p}
        assert binding._RESULTS.get(name) is (kinds | results)[result.strip()], name


def test_one_fingerprint_for_one_order(kernels: Kernels) -> None:
    """Claim: eight hexadecimal digits stand for the bits that a machine computes: the same at every call and with any
    number of threads."""
    found = set()
    for count in (1, 3):
        torch.set_num_threads(count)
        again = Kernels(binding.LIBRARY)
        found.add(again.fingerprint)
    assert len(found) == 1 and re.fullmatch("[0-9a-f]{8}", found.pop())


def test_results_are_new_and_contiguous(kernels: Kernels) -> None:
    """Claim: no result shares memory with an argument, also of a transposed input."""
    x = torch.randn(5, 6).T

    def check(result: Tensor) -> None:
        assert result.is_contiguous() and result.data_ptr() != x.data_ptr()

    check(kernels.activate("relu", x))
    check(kernels.tanh(x))
    check(kernels.normalize(Norm(torch.ones(5)), x))
    check(kernels.product(kernels.pack(torch.ones(2, 5)), x))
