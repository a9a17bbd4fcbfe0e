"""A whole step of our own kernels, in Triton's interpreter: it computes the model, or the modules do.

Models are tiny; kernels, plan, buffers and checks at loading are those of a GPU, and captured steps are repeated calls.
"""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from specdec.engine.cuda import backend as backend_module
from specdec.engine.cuda import item_attention, near_ties, parts, step_check
from specdec.engine.cuda import step as step_module
from specdec.engine.cuda.backend import DeviceBackend
from specdec.engine.cuda.kernels.launch import version
from specdec.engine.cuda.step import DeviceStep
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths
from specdec.protocol.tree_shape import branches, path_tokens
from tests.engine.test_target_trees import NODE_COUNT
from tests.engine.test_target_trees import PARENTS as SIX_PATHS
from tests.support.device_models import device_driver
from tests.support.engine_models import ARCHITECTURES, Driver, make_tiny_model, model_class, random_tokens
from tests.support.interpreter import interpreted

FOLDERS = tempfile.TemporaryDirectory(prefix="specdec-step-")
PARENTS = (0, 1, 1, 0)  # two branches at the root, and two below the first node
# Rows fed to each of two sequences, step by step: prompts, decodes, chains of several widths, one alone.
ROUNDS = ((5, 9), (1, 1), (3, 1), (0, 4))
FEW_ROUNDS = ((3, 2), (1, 1), (0, 3))
FAMILIES = [("qwen2", "bfloat16", False), ("gemma", "bfloat16", False), ("gemma3", "float16", True)]
FAMILIES += [(name, "float16", False) for name in ("llama", "qwen3", "mistral", "gemma2")]
TRIED_STEPS = (((0, 1), (129, 3)),)  # of attention, where it is tried by itself
# Models with fewer programs of kernels a row, for `make test` and for steps of many rows: architecture and entries.
NARROW = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
OWN_MODELS = {
    "narrow": ("llama", NARROW),
    "shallow": ("llama", NARROW | {"num_hidden_layers": 1}),
    "windowed": ("gemma3", NARROW),
    "normed": ("olmo2", NARROW | {"num_hidden_layers": 1}),
}


def model_of(name: str) -> tuple[str, dict[str, object]]:
    """The architecture of a model of these tests, and its entries: an architecture's own name has two layers."""
    architecture, entries = OWN_MODELS.get(name, (name, {"num_hidden_layers": 2}))
    if types := ARCHITECTURES[architecture][1].get("layer_types"):
        entries = entries | {"layer_types": types[:2]}
    return architecture, entries


@functools.cache
def folder_of(name: str) -> Path:
    architecture, entries = model_of(name)
    return make_tiny_model(Path(FOLDERS.name) / name, architecture, **entries)


def driver_of(
    architecture: str,
    dtype: str,
    with_graphs: bool = False,
    widths: Sequence[int] = (3, 1),
) -> Driver:
    """A driver of a model that was tried at loading in few steps, and without the measurement of the first step: with
    both in full the interpreter takes a minute."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(step_check, "WIDTHS", widths))
        patches.enter_context(mock.patch.object(step_check, "TOKEN_COUNT", 4))
        patches.enter_context(mock.patch.object(parts, "TRIED_STEPS", TRIED_STEPS))
        patches.enter_context(mock.patch.object(backend_module, "measure_drift", lambda *_: 0.0))
        driver = device_driver(folder_of(architecture), with_graphs, dtype, 1)
        driver.feed(driver.open(4), [1], 1)
    return driver


def call_of(driver: Driver) -> DeviceStep | None:
    backend = driver.model.backend
    assert isinstance(backend, DeviceBackend)
    return backend._call


def check_logits(architecture: str, dtype: str, tokens: Sequence[int], found: torch.Tensor) -> None:
    """Raises AssertionError unless the last rows of a text are no farther from the model's logits, computed in float32
    with its 16-bit weights, than three times what `transformers` is in 16 bits."""
    kind, folder = model_class(model_of(architecture)[0]), folder_of(architecture)
    model = kind.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation="eager").eval()

    def logits() -> torch.Tensor:
        return model(torch.tensor([tokens])).logits[0, -len(found) :, : found.shape[1]].float()

    with torch.inference_mode():
        rounded = logits()
        model.float()
        exact = logits()
    off, usual = float((found - exact).norm()), float((rounded - exact).norm())
    assert off <= 3 * usual, f"{off:.3g} off, transformers {usual:.3g}"


def run_rounds(driver: Driver, architecture: str, dtype: str, rounds: Sequence[Sequence[int]] = ROUNDS) -> None:
    """Feeds two sequences; every step's logits are the model's."""
    texts = [random_tokens(sum(counts), seed) for seed, counts in enumerate(zip(*rounds))]
    tables = [driver.open(40) for _ in texts]
    found: list[list[torch.Tensor]] = [[], []]
    for counts in rounds:
        fed = [place for place, count in enumerate(counts) if count]
        feeds = [(tables[i], texts[i][tables[i].length : tables[i].length + counts[i]], counts[i]) for i in fed]
        output = driver.step(feeds)
        assert list(output.is_finite) == [True] * len(fed)
        assert (
            output.readback is not None
            and output.readback.best_ids()[: len(output.logits)] == output.logits.argmax(1).tolist()
        )
        for place, rows in zip(fed, output.logits.clone().split([counts[i] for i in fed])):
            found[place].append(rows)
    for text, rows in zip(texts, found):
        check_logits(architecture, dtype, text, torch.cat(rows))


@interpreted
def test_a_step_computes_the_model() -> None:
    """Claim: a Llama in bfloat16 runs as a step of our own kernels, found to have equal bits in steps of 1 and 17 rows;
    prompts, decodes and chains of two sequences have the logits that `transformers` has, and the lowest id of the
    largest is the step's own. Conclusive: judged by the model in float32, beside the roundings of `transformers`."""
    driver = driver_of("narrow", "bfloat16", widths=(17, 1))
    call = call_of(driver)
    assert call is not None and call.has_equal_rows
    assert f"triton {version()}, equal bits in every step" in driver.model.description.libraries
    run_rounds(driver, "narrow", "bfloat16", FEW_ROUNDS)


@pytest.mark.more
@pytest.mark.parametrize("architecture, dtype, with_graphs", FAMILIES)
@interpreted
def test_other_families_run_as_a_step(architecture: str, dtype: str, with_graphs: bool) -> None:
    """Claim: as above for biases, norms of heads, norms behind products, scaled embeddings, capped scores, windows and
    angles by the kind of layer; of its own shape and padded to a captured one. And a tree's rows are those of paths."""
    driver = driver_of(architecture, dtype, with_graphs)
    assert call_of(driver) is not None and bool(driver.model.backend.graph_count) == with_graphs
    run_rounds(driver, architecture, dtype)
    table, text, nodes = driver.open(60), random_tokens(44, 3), random_tokens(len(PARENTS), 4)
    driver.feed(table, text[:-1], 0)
    driver.cache.prepare_write(table, 48)
    chunk = Chunk(table.block_ids, 43, [text[-1], *nodes], 5, tree_paths(PARENTS, 44))
    rows = driver.model.forward(RaggedBatch((chunk,))).logits.clone()
    for path, last in (([], 0), ([0], 1), ([0, 1], 2), ([0, 2], 3), ([3], 4)):
        check_logits(architecture, dtype, [*text, *(nodes[node] for node in path)], rows[last : last + 1])


@pytest.mark.more
@pytest.mark.parametrize("name, dtype", [("narrow", "bfloat16"), ("windowed", "float16")])
@interpreted
def test_a_row_has_the_same_bits_in_every_step(name: str, dtype: str) -> None:
    """Claim: alone, in chains of 2, 4 and 8, beside another sequence and as a node of a tree a row's logits have the
    same bits. Conclusive: the engine's own measurement of drift finds exactly 0, and a tree of ten nodes on six paths,
    on both sides of a split's border and behind a chain, has the bits of its paths as chains after the same keys."""
    with (
        mock.patch.multiple(near_ties, PREFIX_COUNT=12, NEIGHBOUR_COUNT=1),
        mock.patch.object(step_check, "WIDTHS", (1,)),
    ):
        driver = device_driver(folder_of(name), False, dtype)
        driver.feed(driver.open(4), [1], 1)
    backend, forward = driver.model.backend, driver.model.forward
    assert isinstance(backend, DeviceBackend) and backend.margins is not None and backend._storage is not None
    assert backend.margins.drift == 0.0
    for layer in backend._storage.layers:
        layer[:, 1:] = torch.randn(layer[:, 1:].shape, generator=torch.Generator().manual_seed(0))
    tokens, base, blocks = random_tokens(NODE_COUNT, 4), 126, range(1, 12)
    tree = Chunk(blocks, base - 1, [5, *tokens], NODE_COUNT + 1, tree_paths(SIX_PATHS, base))
    rows = forward(RaggedBatch((Chunk([13], 9, [1, 2, 3], 3), tree))).logits[3:].clone()
    parts = branches(SIX_PATHS, NODE_COUNT)
    for part, path in zip(parts, path_tokens(parts, tokens)):
        chain = forward(RaggedBatch((Chunk(blocks, base - 1, [5, *path], len(path) + 1),))).logits
        first = part.start + 1 if part.start else 0
        assert torch.equal(rows[first : part.end + 1], chain[part.depth + (part.start > 0) :]), part


@pytest.mark.more
@interpreted
def test_wide_steps_and_graphs_have_the_bits_of_single_rows() -> None:
    """Claim: a prompt of 140 rows, more than the fixed memory holds, has the bits of the same prompt in pieces, and so
    has one in captured steps with padding."""
    text = random_tokens(140, 5)
    found = []
    for with_graphs, pieces in ((False, [140]), (False, [64, 64, 12]), (True, [2, 1, 1, 2, 134])):
        driver = driver_of("shallow", "bfloat16", with_graphs)
        table = driver.open(150)
        rows = [driver.feed(table, text[table.length : table.length + count]).clone() for count in pieces]
        found.append(torch.cat(rows))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.more
@interpreted
def test_hidden_states_and_features_are_those_of_the_modules() -> None:
    """Claim: hidden states of rows with logits, features of all rows at any layers in any order, and the output
    layer alone agree with those that the modules return. Conclusive: the same folder with the step refused."""
    outputs = []
    for is_refused in (False, True):
        have_kernels = (lambda *_: False) if is_refused else step_check.have_kernels
        with mock.patch.object(backend_module, "have_kernels", have_kernels):
            driver = driver_of("narrow", "bfloat16")
        assert (call_of(driver) is None) == is_refused
        driver = Driver(driver.model)
        layer_alone = driver.model.return_hidden()
        driver.model.return_features([2, 0, 1])
        with mock.patch.object(backend_module, "measure_drift", lambda *_: 0.0):
            output = driver.step([(driver.open(20), random_tokens(9, 6), 4), (driver.open(20), random_tokens(3, 7), 0)])
        assert output.hidden is not None and output.features is not None
        outputs.append(
            [each.clone() for each in (output.logits, output.hidden, output.features, layer_alone(output.hidden))]
        )
    for ours, theirs in zip(*outputs):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        step_check.expect_near("a result", ours, theirs)
    logits, _, features, again = outputs[0]
    assert features.shape == (12, 3 * 64)
    step_check.expect_near("the output layer alone", again, logits)


@pytest.mark.more
@interpreted
def test_not_a_number_is_reported_for_its_sequence_only() -> None:
    """Claim: not-a-number in one sequence's cache marks that sequence's flag and no other. Conclusive: the neighbour's
    logits have the bits of a clean step."""
    driver = driver_of("narrow", "bfloat16")
    tables = [driver.open(20) for _ in range(2)]
    for table in tables:
        driver.feed(table, random_tokens(3, 1))
    feeds = [(table, [5, 6], 2) for table in tables]
    clean = driver.step(feeds).logits.clone()
    for table in tables:
        driver.cache.truncate(table, 3)
    backend = driver.model.backend
    assert isinstance(backend, DeviceBackend) and backend._storage is not None
    backend._storage.layers[1][:, tables[1].block_ids[0], 1] = torch.nan
    output = driver.step(feeds)
    assert tuple(output.is_finite) == (True, False)
    assert torch.equal(output.logits[:2], clean[:2])


def raising(*_: object, **__: object) -> None:
    raise RuntimeError("out of resource: shared memory\nand a long explanation")


def scaled_residual(*arguments: object, **options: object) -> None:
    """A product whose residual is 0.9 of itself."""
    if options.get("residual") is not None:
        options["residual"] = options["residual"] * 0.9
    PRODUCT(*arguments, **options)


def shifted_angles(*arguments: object, **options: object) -> None:
    """Queries and keys rotated by the angles of the position after theirs."""
    x, weight, cosines, sines, positions, *others = arguments
    QKV_ROPE(x, weight, cosines, sines.neg(), positions, *others, **options)


PRODUCT, QKV_ROPE = step_module.product, step_module.qkv_rope
FAULTS: dict[str, tuple[str, Callable[..., None], str]] = {
    "raises": ("combine", raising, "out of resource: shared memory"),
    "residual": ("product", scaled_residual, "layer 0 is"),
    "rotation": ("qkv_rope", shifted_angles, "layer 0 is"),
}


@pytest.mark.parametrize(
    "fault", [pytest.param(name, marks=[pytest.mark.more] * (name != "raises")) for name in FAULTS]
)
@interpreted
def test_a_faulty_kernel_is_replaced_by_the_modules(fault: str) -> None:
    """Claim: a kernel that raises, or with another result, is found at loading; one line names it, and the modules give
    the results they give where there are no kernels. Conclusive: equal bits, after weights were exchanged and brought
    back. Single parts by kernels are left out: `test_parts`."""
    name, broken, reason = FAULTS[fault]
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("specdec.engine")
    logger.addHandler(handler)
    module = item_attention if name == "combine" else step_module
    try:
        with (
            mock.patch.object(module, name, broken),
            mock.patch.object(backend_module, "kernel_parts", lambda *_: None),
        ):
            driver = driver_of("narrow", "bfloat16")
    finally:
        logger.removeHandler(handler)
    assert call_of(driver) is None and "triton" not in driver.model.description.libraries
    assert len(lines) == 1 and reason in lines[0] and "\n" not in lines[0] and "runs module by module" in lines[0]
    with mock.patch.object(backend_module, "have_kernels", lambda *_: False):
        plain = driver_of("narrow", "bfloat16")
    tokens = random_tokens(9, 8)
    assert torch.equal(driver.feed(driver.open(20), tokens), plain.feed(plain.open(20), tokens))


def other_bits_of_wide_steps(*arguments: Any, **options: Any) -> None:
    """A product that in steps of 3 rows and more is off by a rounding in one number of each row."""
    PRODUCT(*arguments, **options)
    _, _, out, rows = arguments
    if rows >= 3:
        out[:rows, 0] *= 1 + torch.finfo(out.dtype).eps


@pytest.mark.more
@interpreted
def test_a_step_whose_bits_depend_on_its_width_says_so() -> None:
    """Claim: where a row's bits depend on the number of rows, the step serves all the same, for its results are right,
    but the numerics profile and the kernels' name do not promise equal bits."""
    with mock.patch.object(step_module, "product", other_bits_of_wide_steps):
        driver = driver_of("narrow", "float16")
    call, description = call_of(driver), driver.model.description
    assert call is not None and not call.has_equal_rows
    assert description.kernels in description.libraries and "bits of a row by its step" in description.kernels
