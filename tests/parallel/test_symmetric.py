"""Ranks that add in memory which all of them read: the same kernels and modules as on GPUs, in processes that share a
file in place of the GPUs' memory, and Triton's interpreter in place of the GPUs."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed
from torch import Tensor, nn

from specdec.config import ServeSettings, TargetSettings
from specdec.engine import transformers_model
from specdec.engine.cuda import backend as backend_module
from specdec.engine.cuda.backend import DeviceBackend
from specdec.engine.cuda.graphs import capture_steps
from specdec.engine.cuda.kernels import launch
from specdec.engine.cuda.kernels.products import product
from specdec.engine.cuda.plan import StepShape
from specdec.engine.linears import LinearProduct
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import no_progress, open_model_folder
from specdec.engine.parallel import share as share_module
from specdec.engine.parallel import symmetric
from specdec.engine.parallel.exchange import FOLDER
from specdec.engine.parallel.group import Bounds, RankGroup
from specdec.engine.parallel.modules import SplitEmbedding, SplitOutput, add_in_rank_order
from specdec.engine.parallel.rank import ModelSource, run_follower
from specdec.engine.parallel.rank_config import RankPlace
from specdec.engine.parallel.share import load_share
from specdec.engine.parallel.split import Split
from specdec.engine.parallel.symmetric import MEMORY_BYTES, SymmetricExchange, SymmetricSum, check_symmetric
from specdec.engine.transformers_model import TransformersModel
from specdec.errors import ConfigError
from tests.support.engine_models import Driver, make_tiny_model, random_tokens
from tests.support.interpreter import needs_triton, run_ranks

RANKS = 3  # with two, additions commute: their order would not show
WIDTH, INPUTS, IDS = 40, 48, 11
TURNS_MAX = 100_000  # minutes, in the interpreter
NEAR = 0.03  # of logits: sums are rounded to bfloat16 in another place
STEPS = ((1, 5, 2), (3,), (0, 10, 4, 7, 9))  # token ids of steps: each begins where any other may have ended


class FilePeers:
    """`Peers` of processes that map one file."""

    def __init__(self, path: str, rank_count: int) -> None:
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), rank_count * MEMORY_BYTES)
        start = torch.frombuffer(self._memory, dtype=torch.uint8).data_ptr()
        self.addresses = [start + rank * MEMORY_BYTES for rank in range(rank_count)]

    def view(self, rank: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        count = int(torch.Size(shape).numel())
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=rank * MEMORY_BYTES + start).view(*shape)


def exchange_of(path: str, rank: int, rank_count: int) -> SymmetricExchange:
    return SymmetricExchange(
        FilePeers(path, rank_count), rank, rank_count, torch.device("cpu"), TURNS_MAX, piece_bytes=64
    )


def weights(dtype: torch.dtype) -> tuple[list[Tensor], Tensor, list[Tensor], list[Tensor]]:
    """Each rank's part of a product's weight, of sizes that differ, the bias; parts of the table and the output."""
    generator = torch.Generator().manual_seed(3)

    def part(*shape: int) -> list[Tensor]:
        return [(torch.randn(*shape, generator=generator) * 10.0**rank).to(dtype) for rank in range(RANKS)]

    return part(WIDTH, INPUTS), torch.linspace(-1, 1, WIDTH).to(dtype), part(4, INPUTS), part(4, WIDTH)


def run_rank(rank: int, path: str, dtype: torch.dtype) -> list[bytes]:
    """A rank of a model of one embedding, sum and output layer; returns the bits of what each step found. Parts of more
    than two rows, and of 64 bytes, are exchanged in pieces."""
    parts, bias, tables, outputs = weights(dtype)
    found = []
    with mock.patch.object(symmetric, "GROUP_ROWS", 2), torch.inference_mode():
        exchange = exchange_of(path, rank, RANKS)
        exchange.check()
        assert exchange.all_agree(True) and not exchange.all_agree(rank != 1)
        embedding = nn.Embedding(4, INPUTS, _weight=tables[rank])
        split = SplitEmbedding(embedding, Split(rank, {}, (), (), 4), exchange)
        summed = SymmetricSum(LinearProduct(parts[rank], bias), exchange)
        head = SplitOutput(LinearProduct(outputs[rank], None), IDS, exchange)
        for ids in STEPS:
            x = split(torch.tensor(ids)[None])
            y = summed(x)
            logits = head(y[0])
            found += [bytes(each.contiguous().view(torch.uint8).numpy()) for each in (x, y, logits)]
    return found


def run_alone(dtype: torch.dtype) -> list[bytes]:
    """What the ranks compute, in one process: parts by the same kernel, added in rank order."""
    parts, bias, tables, outputs = weights(dtype)
    found = []
    for ids in STEPS:
        x = torch.cat(tables)[list(ids)]
        sums = torch.empty(RANKS, len(ids), WIDTH)
        for weight, out in zip(parts, sums):
            product(x, weight, out, len(ids))
        y = add_in_rank_order(list(sums)).add_(bias.float()).to(dtype)
        logits = torch.cat([LinearProduct(each, None)(y) for each in outputs], -1)[:, :IDS]
        found += [bytes(each.contiguous().view(torch.uint8).numpy()) for each in (x, y, logits)]
    return found


@needs_triton
def test_processes_add_in_rank_order_with_equal_bits() -> None:
    """Claim: ranks of several processes that write parts where all read them get the same bits, those of the parts
    added in rank order: embedding, sums in pieces with a bias, and logits, in steps of any size after one another.

    Conclusive: real processes, no lock between them but the kernel that meets; a part that was read before it was
    written, or overwritten before it was read, would be another step's. With three ranks of sizes that differ another
    order has other bits (`tests/cuda/kernels/test_ranks.py`).
    """
    dtype = torch.bfloat16
    with tempfile.NamedTemporaryFile(dir=FOLDER) as file:
        file.truncate(RANKS * MEMORY_BYTES)
        first, *others = run_ranks(run_rank, RANKS, file.name, dtype)
    assert all(other == first for other in others)
    (wanted,) = run_ranks(of_one, 1, dtype)
    assert len(first) == 3 * len(STEPS) and first == wanted


def of_one(_rank: int, dtype: torch.dtype) -> list[bytes]:
    return run_alone(dtype)


def logits_of(model: TransformersModel) -> torch.Tensor:
    """Logits of a text: a part of its prompt, the rest, then token by token, in captured steps where there are some."""
    driver, text = Driver(model), random_tokens(9, 1)
    table = driver.open(20)
    with mock.patch.object(backend_module, "measure_drift", lambda *_: 0.0):
        return torch.cat([driver.feed(table, part).clone() for part in (text[:4], text[4:7], text[7:8], text[8:])])


def backend_of(device: torch.device, dtype: torch.dtype, positions_max: int, is_eager: bool, **more: Any) -> Any:
    return DeviceBackend(device, dtype, positions_max, not is_eager, 1, agree=more.get("agree", bool))


def run_share(rank: int, path: str, folder: str) -> tuple[torch.Tensor, str, int]:
    """One rank of two of a model: its logits, its libraries, and the number of captured steps."""
    place = RankPlace(rank, 2, "127.0.0.1", 1)
    store = torch.distributed.FileStore(f"{path}.store", 2)
    none: Any = None  # no watch: these ranks have no commands
    group = RankGroup(place, store, exchange_of(path, rank, 2), none, Bounds(), None, None)
    with mock.patch.object(share_module, "backend_for", lambda *given, **more: backend_of(*given[:4], **more)):
        model = load_share("m", open_model_folder(folder), "bfloat16", torch.device("cpu"), group, no_progress)
    logits = logits_of(model)
    backend = model.backend
    assert isinstance(backend, DeviceBackend)
    assert sum(isinstance(each, SymmetricSum) for each in model._base.modules()) == 4  # two a layer
    return logits, model.description.libraries, backend.graph_count


@pytest.mark.more
@needs_triton
def test_a_model_over_ranks_captures_its_steps_and_has_one_ranks_logits(tmp_path: Path) -> None:
    """Claim: a model over two ranks that add in symmetric memory is captured, gives equal bits on both, and the logits
    of one rank but for roundings; its profile names how parts are added.

    Conclusive: the loading, the modules and the backend of GPUs, with repeated calls as captured steps, in two
    processes; a bias added twice, a part left out or added twice, or one of another step is no rounding.
    """
    folder = make_tiny_model(tmp_path / "qwen2", "qwen2", num_hidden_layers=2)  # with biases
    with tempfile.NamedTemporaryFile(dir=FOLDER) as file:
        file.truncate(2 * MEMORY_BYTES)
        (first, libraries, count), (second, _, other_count) = run_ranks(run_share, 2, file.name, str(folder))
        Path(f"{file.name}.store").unlink(missing_ok=True)
    assert torch.equal(first, second) and count == other_count > 0
    assert "parts of ranks in float32 by triton" in libraries
    with mock.patch.object(transformers_model, "backend_for", lambda *given, **_: backend_of(*given[:4])):
        alone = load_model(str(folder), "bfloat16")
    assert isinstance(alone, TransformersModel)
    wanted = logits_of(alone)
    assert float((first - wanted).norm() / wanted.norm()) < NEAR


def test_what_lacks_symmetric_memory_is_an_error_that_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Claim: the setting is off by default, and refused for one process, several machines, a CPU, an installation
    without Triton or without symmetric memory, each with what is wrong, before a rank reads the folder or joins."""
    cuda = torch.device("cuda", 0)
    assert not TargetSettings(model="m").symmetric_memory and not ServeSettings().symmetric_memory
    with pytest.raises(ValueError, match="give --tensor-parallel-size of at least 2"):
        TargetSettings(model="m", symmetric_memory=True)
    with pytest.raises(ValueError, match="one machine; --nnodes is 2"):
        TargetSettings(model="m", symmetric_memory=True, tensor_parallel_size=2, nnodes=2, master_port=1)
    source = ModelSource(str(tmp_path / "nowhere"), symmetric_memory=True)
    with pytest.raises(ConfigError, match="--symmetric-memory: the model is on cpu; its ranks must be on GPUs of one"):
        run_follower(source, RankPlace(1, 2, "127.0.0.1", 1))
    monkeypatch.setattr(launch, "is_there", lambda: True)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"--symmetric-memory: torch \S+ has no symmetric memory for GPUs"):
            check_symmetric(cuda)
    monkeypatch.setattr(launch, "is_there", lambda: False)
    with pytest.raises(ConfigError, match="--symmetric-memory needs Triton"):
        check_symmetric(cuda)


def test_ranks_capture_the_same_steps() -> None:
    """Claim: a step that one rank cannot capture is captured by none, so that all exchange alike; what was captured
    before stays."""
    shapes = [StepShape(rows, rows, rows, rows, 64) for rows in (1, 2, 4)]

    def prepare(shape: StepShape) -> Callable[[], None]:
        def run() -> None:
            if shape.row_count == 4:
                raise RuntimeError("out of memory")

        return run

    cpu = torch.device("cpu")
    assert list(capture_steps(shapes, prepare, cpu)) == shapes[:2]
    answers = iter([True, True, False])
    assert list(capture_steps(shapes, prepare, cpu, lambda _: next(answers))) == shapes[:1]
    told: list[bool] = []

    def agree(is_willing: bool) -> bool:
        told.append(is_willing)
        return is_willing

    capture_steps(shapes[1:], prepare, cpu, agree)
    assert told == [True, True, False]
