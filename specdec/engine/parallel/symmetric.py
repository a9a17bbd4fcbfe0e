"""Sums over ranks in symmetric memory: memory of every GPU of one machine that the kernels of all ranks read.

Partial sums are float32, added in rank order, by kernels that a captured graph can hold. Behind a setting: not yet run
on two GPUs. What is exchanged first in a step (`begin`) uses the same memory in every step, so that a captured step may
follow any other.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor, nn

from specdec.engine.cuda.items import GROUP_ROWS
from specdec.engine.cuda.kernels import launch
from specdec.engine.cuda.kernels.products import product
from specdec.engine.cuda.kernels.ranks import TURNS_MAX, meet, rank_sum
from specdec.engine.linears import LinearProduct
from specdec.errors import ConfigError

FLAG = "--symmetric-memory"
FLAG_BYTES = 1 << 14  # of a rank's memory: a number for each of up to 1,024 ranks, and more
SLOT_BYTES = 32 << 20  # of a rank's part in one buffer: 128 rows of 65,536 float32; larger parts are sent in pieces
BUFFER_COUNT = 2
MEMORY_BYTES = FLAG_BYTES + BUFFER_COUNT * SLOT_BYTES
TRIED_WIDTH = 1000


class Peers(Protocol):
    """MEMORY_BYTES of every rank, in rank order, all read and written by this rank's kernels. The first FLAG_BYTES are
    zeros before the first use."""

    @property
    def addresses(self) -> Sequence[int]:
        """Of each rank's memory, in this process; multiples of 16."""

    def view(self, rank: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A rank's memory from byte `start` on, as a tensor on this rank's device."""


class SymmetricExchange:
    """An `Exchange` through symmetric memory, and sums of parts that are written there.

    Nothing waits on the host. Two buffers take turns: a rank writes to a buffer again only after all have come to the
    exchange between, hence have read the one before. A rank that does not come within `turns_max` polls of a waiting
    one is an error of its device, which ends the process. `piece_bytes`: most bytes of a part that is gathered at once.
    """

    name = "symmetric memory"
    is_captured = True

    def __init__(
        self,
        peers: Peers,
        rank: int,
        rank_count: int,
        device: torch.device,
        turns_max: int = TURNS_MAX,
        piece_bytes: int = SLOT_BYTES,
    ) -> None:
        self.rank = rank
        self.rank_count = rank_count
        self._peers = peers
        self._turns_max = turns_max
        self._piece_bytes = piece_bytes
        self._round = torch.zeros(1, dtype=torch.int64, device=device)
        starts = [0, *(FLAG_BYTES + index * SLOT_BYTES for index in range(BUFFER_COUNT))]
        tables = ([address + start for address in peers.addresses] for start in starts)
        self._flags, *self._tables = (torch.tensor(table, dtype=torch.int64, device=device) for table in tables)
        self._count = 0

    @property
    def numerics(self) -> str:
        """What decides the bits of its sums."""
        return f"parts of ranks in float32 by triton {launch.version()}"

    def begin(self) -> None:
        """Waits until all ranks have read the parts of the last step; this step uses the buffers from the first on."""
        self.meet()
        self._count = 0

    def meet(self) -> None:
        """Waits on the device for all ranks: what each wrote to its place can be read."""
        meet(self._flags, self._round, self.rank, self._turns_max)

    def place(self, rows: int, width: int) -> tuple[Tensor, Tensor]:
        """Returns this rank's place for a part of the next sum, [rows, width] float32, and the table of all ranks'
        places: see `rank_sum`. Raises ValueError for a part above SLOT_BYTES."""
        if 4 * rows * width > SLOT_BYTES:
            raise ValueError(f"a part of {rows} rows of {width} float32 is above {SLOT_BYTES} bytes")
        buffer = self._next_buffer()
        return self._view(buffer, self.rank, (rows, width), torch.float32), self._tables[buffer]

    def gather(self, part: Tensor) -> Sequence[Tensor]:
        size = part.element_size()
        if part.numel() * size <= self._piece_bytes:
            return self._gather(part)
        pieces = part.contiguous().view(-1).split(self._piece_bytes // size)
        gathered = [[each.clone() for each in self._gather(piece)] for piece in pieces]
        return [torch.cat(of_rank).view(part.shape) for of_rank in zip(*gathered)]

    def set_patience(self, patience_s: float) -> None:
        """The bound is `turns_max`, in captured steps too."""

    def all_agree(self, is_willing: bool) -> bool:
        """Whether all ranks are willing; waits for the device."""
        own = torch.full((4,), is_willing, dtype=torch.int32, device=self._round.device)
        return all(bool(part.all()) for part in self.gather(own))

    def check(self) -> None:
        """Raises ConfigError unless sums are those of rank order, bit for bit, in both buffers. All ranks call it."""
        for seed in range(2 * BUFFER_COUNT):
            generator = torch.Generator().manual_seed(seed)
            sizes = torch.logspace(-3, 3, TRIED_WIDTH)
            parts = torch.randn(self.rank_count, 1, TRIED_WIDTH, generator=generator) * sizes
            own, table = self.place(1, TRIED_WIDTH)
            own.copy_(parts[self.rank])
            self.meet()
            out = torch.full((1, TRIED_WIDTH), torch.nan, device=own.device)
            rank_sum(table, out)
            wanted = parts[0]
            for part in parts[1:]:
                wanted = wanted + part
            if not torch.equal(out.cpu(), wanted):
                raise ConfigError(f"{FLAG}: sums over the GPUs' memory are not those of the ranks' parts; leave it out")

    def _next_buffer(self) -> int:
        self._count += 1
        return (self._count - 1) % BUFFER_COUNT

    def _gather(self, part: Tensor) -> Sequence[Tensor]:
        buffer = self._next_buffer()
        parts = [self._view(buffer, rank, part.shape, part.dtype) for rank in range(self.rank_count)]
        parts[self.rank].copy_(part)
        self.meet()
        return parts

    def _view(self, buffer: int, rank: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self._peers.view(rank, FLAG_BYTES + buffer * SLOT_BYTES, shape, dtype)


class SymmetricSum(nn.Module):
    """As `RankSum`: each rank writes its product in float32 where all ranks read it, whatever the model's type."""

    def __init__(self, linear: LinearProduct, exchange: SymmetricExchange) -> None:
        super().__init__()
        self.bias = linear.take_bias()
        linear.weight = linear.weight.contiguous()
        self.linear = linear
        self._exchange = exchange

    def forward(self, x: Tensor) -> Tensor:
        """x [..., rows, in / ranks] -> [..., rows, out], the same on every rank."""
        rows = x.reshape(-1, x.shape[-1])
        out = x.new_empty(len(rows), len(self.linear.weight))
        for start in range(0, len(rows), GROUP_ROWS):
            part, its = rows[start : start + GROUP_ROWS], out[start : start + GROUP_ROWS]
            own, table = self._exchange.place(*its.shape)
            self._write(part, own)
            self._exchange.meet()
            rank_sum(table, its, bias=self.bias)
        return out.view(*x.shape[:-1], -1)

    def _write(self, x: Tensor, place: Tensor) -> None:
        weight = self.linear.weight
        if weight.dtype == torch.float32:
            torch.mm(x, weight.t(), out=place)
        else:
            product(x, weight, place, len(x))


def check_symmetric(device: torch.device) -> None:
    """Raises ConfigError unless this installation has symmetric memory for a model on `device`."""
    if device.type != "cuda":
        raise ConfigError(f"{FLAG}: the model is on {device}; its ranks must be on GPUs of one machine")
    if not launch.is_there():
        raise ConfigError(f"{FLAG} needs Triton, which torch's wheels for CUDA bring; it is not installed")
    try:
        from torch.distributed import _symmetric_memory

        backend = _symmetric_memory.get_backend(device)
    except (ImportError, AttributeError, RuntimeError) as error:
        raise ConfigError(f"{FLAG}: torch {torch.__version__} has no symmetric memory: {error}") from None
    if backend is None:
        raise ConfigError(f"{FLAG}: torch {torch.__version__} has no symmetric memory for GPUs")


def open_symmetric(
    store: torch.distributed.Store, rank: int, rank_count: int, device: torch.device
) -> SymmetricExchange:
    """Maps every rank's memory on every rank's device, and tries the sums. All ranks call it. Raises ConfigError."""
    try:
        peers = DevicePeers(store, rank, rank_count, device)
    except RuntimeError as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ConfigError(f"{FLAG}: the ranks' GPUs do not read each other's memory: {reason}") from error
    exchange = SymmetricExchange(peers, rank, rank_count, device)
    exchange.check()
    return exchange


class DevicePeers:
    """`Peers` of GPUs, by torch. They meet in the store, under a name that rank 0 chooses."""

    def __init__(self, store: torch.distributed.Store, rank: int, rank_count: int, device: torch.device) -> None:
        from torch._C import _distributed_c10d as c10d
        from torch.distributed import _symmetric_memory

        if rank == 0:
            store.set("symmetric", f"specdec-{secrets.token_hex(8)}")
        name = store.get("symmetric").decode()
        own_store = torch.distributed.PrefixStore(f"{name}/", store)
        library: Any = c10d
        self._group = library.ProcessGroup(own_store, rank, rank_count)  # torch knows it by its name alone
        library._register_process_group(name, self._group)
        library._SymmetricMemory.set_group_info(name, rank, rank_count, own_store)
        self._memory = _symmetric_memory.empty(MEMORY_BYTES, dtype=torch.uint8, device=device)
        self._memory[:FLAG_BYTES].zero_()
        torch.cuda.synchronize(device)
        self._handle: Any = library._SymmetricMemory.rendezvous(self._memory, name)

    @property
    def addresses(self) -> Sequence[int]:
        found: list[int] = self._handle.buffer_ptrs
        return found

    def view(self, rank: int, start: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        found: Tensor = self._handle.get_buffer(rank, list(shape), dtype, start // dtype.itemsize)
        return found
