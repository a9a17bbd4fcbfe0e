"""The ways of attending agree, the kernel gets its documented arguments, and a wrong one is not used."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.attention.varlen as varlen_module

from specdec.engine.attention import AttentionShape, ScoreRule
from specdec.engine.cuda import attention
from specdec.engine.cuda.attention import (
    DENSE,
    AttentionBackend,
    BlockTables,
    DeviceMetadata,
    Gathered,
    varlen_parameters,
)
from specdec.engine.cuda.plan import StepBuffer, StepShape, exact_shape
from specdec.engine.cuda.select import (
    TOLERANCE,
    TRIED_STEPS,
    Probe,
    candidates,
    first_that_agrees,
    largest_difference,
    make_probe,
    select_backend,
    tried_batch,
)
from specdec.engine.cuda.storage import DeviceStorage
from tests.support.device_models import documented_varlen_attn

CPU = torch.device("cpu")
RULES = (ScoreRule(0.25), ScoreRule(0.25, window=40))
GROUPED = AttentionShape(1, head_count=8, kv_head_count=2, head_size=16, rules=RULES)
DOCUMENTED = frozenset(inspect.signature(documented_varlen_attn).parameters)  # of torch 2.13
ALONE = AttentionShape(1, head_count=3, kv_head_count=3, head_size=24, rules=RULES)


def probe_of(shape: AttentionShape, block_size: int = 256) -> Probe:
    return make_probe(shape, block_size, torch.bfloat16, CPU)


@pytest.fixture(autouse=True)
def own_parameters() -> None:
    """The kernel's parameters are read once in a process: before a test replaces the kernel."""
    varlen_parameters()


def use_kernel(monkeypatch: pytest.MonkeyPatch, kernel: Callable) -> None:
    """Replaces varlen_attn by a kernel with the documented parameters, which an older torch has in part."""
    monkeypatch.setattr(varlen_module, "varlen_attn", kernel)
    monkeypatch.setattr(attention, "varlen_parameters", lambda: DOCUMENTED)


@pytest.fixture
def documented(monkeypatch: pytest.MonkeyPatch) -> None:
    """varlen_attn as its documentation says, for there is no kernel of it on a CPU."""
    use_kernel(monkeypatch, documented_varlen_attn)


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("shape", [GROUPED, ALONE], ids=["grouped", "alone"])
@pytest.mark.parametrize("way, block_size", [(BlockTables(), 256), (Gathered(), 16), (Gathered(), 256)])
def test_every_way_computes_the_same(way: AttentionBackend, block_size: int, shape: AttentionShape) -> None:
    """Claim: decodes, verifications and chunks of several lengths, with windows and without, have the results of the
    plain way in each way. Conclusive: the kernel's stand-in asserts types, shapes and limits of the real one, and
    blocks hold arbitrary numbers beyond a sequence's end, so a key too many or too few shows.
    """
    assert largest_difference(probe_of(shape, block_size), way) < TOLERANCE


@pytest.mark.usefixtures("documented")
@pytest.mark.parametrize("way", [BlockTables(), Gathered()], ids=lambda way: way.name)
def test_padded_steps_compute_the_same(way: AttentionBackend) -> None:
    """Claim: a step padded to a captured shape gives its own rows the results of the exact step, and writes nothing
    else but to the scratch block. Conclusive: compared bit for bit, the storage too.
    """
    probe = probe_of(GROUPED)
    for batch, shape in (
        (tried_batch(TRIED_STEPS[0], 256), StepShape(8, 8, 8, 1, 4096)),
        (tried_batch(TRIED_STEPS[1], 256), StepShape(32, 16, 32, 32, 4096)),
    ):
        rows = torch.randn(shape.row_count, 12, 16, generator=torch.Generator().manual_seed(1)).to(probe.dtype)
        results = []
        for each in (exact_shape(batch), shape):
            storage = DeviceStorage(1, probe.storage.block_count, 256, 2, 16, probe.dtype, CPU)
            storage.layers[0].copy_(probe.storage.layers[0])
            buffer = StepBuffer(256, storage.scratch_slot, CPU)
            buffer.reserve(each)
            buffer.fill(batch, each)
            inputs = rows[: each.row_count].split([8, 2, 2], dim=1)
            output = DeviceMetadata(storage, buffer.send(each), way).attend(*inputs, 0, RULES[0])
            results.append((output[: batch.row_count], storage.layers[0][:, : storage.block_count]))
        (exact, exact_cache), (padded, padded_cache) = results
        assert torch.equal(exact, padded) and torch.equal(exact_cache, padded_cache)
        assert not padded.isnan().any()


def first_sequence_only(*arguments, **options) -> torch.Tensor:
    """The fault of torch issue 194167: rows of later sequences stay as the memory was."""
    output = documented_varlen_attn(*arguments, **options)
    output[int(arguments[3][1]) :] = torch.nan
    return output


def without_window(*arguments, **options) -> torch.Tensor:
    """A kernel that ignores windows."""
    return documented_varlen_attn(*arguments, **options | {"window_size": (-1, 0)})


def refusing(*arguments, **options) -> torch.Tensor:
    """A chip the kernel was not built for."""
    raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.\n(and a long explanation)")


@pytest.mark.parametrize("kernel", [first_sequence_only, without_window, refusing], ids=lambda kernel: kernel.__name__)
def test_a_way_that_is_wrong_here_is_not_used(
    kernel: Callable, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Claim: a kernel that raises, leaves rows unset or ignores a window is not used, with a line that names it, and a
    right one is chosen. Conclusive: the same choice, with the faulty kernel and with the documented one.
    """
    use_kernel(monkeypatch, kernel)
    with caplog.at_level(logging.WARNING, "specdec.engine"):
        assert first_that_agrees(probe_of(GROUPED), [BlockTables(), Gathered()]) is DENSE
    assert "block tables is not used" in caplog.text and "gathered is not used" in caplog.text
    use_kernel(monkeypatch, documented_varlen_attn)
    assert first_that_agrees(probe_of(GROUPED), [BlockTables(), Gathered()]).name == "block tables"


def test_which_ways_a_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: pages are read in place where varlen_attn takes block tables and blocks are a multiple of 256, keys are
    gathered where it takes a scale and windows only (torch 2.11), and float32 or a CPU attend plainly.
    """
    has_tables = "block_table" in varlen_parameters()  # torch 2.13, which the suite installs
    assert [way.name for way in candidates(256)] == ["block tables", "gathered"][not has_tables :]
    assert [way.name for way in candidates(64)] == ["gathered"]
    older = frozenset("query key value cu_seq_q cu_seq_k max_q max_k return_aux scale window_size".split())
    monkeypatch.setattr("specdec.engine.cuda.select.varlen_parameters", lambda: older)
    assert [way.name for way in candidates(256)] == ["gathered"]
    monkeypatch.setattr("specdec.engine.cuda.select.varlen_parameters", frozenset)
    assert candidates(256) == []
    assert select_backend(GROUPED, 256, torch.float32, torch.device("cuda")) is DENSE
    assert select_backend(GROUPED, 256, torch.bfloat16, CPU) is DENSE


@pytest.mark.parametrize("way", [BlockTables(), Gathered()], ids=lambda way: way.name)
def test_the_real_varlen_attn_takes_what_it_is_given(way: AttentionBackend) -> None:
    """Claim: the call fits the signature and the operator's schema of the torch installed. Conclusive: torch's own
    function runs, on tensors without numbers, which its operator's checks and shapes are made for.
    """
    if way.name not in [each.name for each in candidates(256)]:
        pytest.skip(f"torch {torch.__version__} has no {way.name}")
    meta = torch.device("meta")
    batch = tried_batch(TRIED_STEPS[1], 256)
    shape = exact_shape(batch)
    on_host = StepBuffer(256, 0, CPU)
    on_host.reserve(shape)
    on_host.fill(batch, shape)
    step = on_host.send(shape)
    fields = ("input_ids", "positions", "slots", "logit_rows", "query_starts", "key_starts")
    fields += ("key_counts", "tables", "visible", "cell_positions")
    step = type(step)(shape, *(getattr(step, name).to(meta) for name in fields))
    storage = DeviceStorage(1, 20, 256, 2, 16, torch.bfloat16, meta)
    queries, keys, values = torch.empty(shape.row_count, 12, 16, dtype=torch.bfloat16, device=meta).split([8, 2, 2], 1)
    output = DeviceMetadata(storage, step, way).attend(queries, keys, values, 0, RULES[1])
    assert output.shape == queries.shape and output.dtype == queries.dtype and output.device == meta
    if way.name == "block tables":
        assert varlen_parameters() >= DOCUMENTED
    assert attention.TABLE_BLOCK_MULTIPLE == 256
