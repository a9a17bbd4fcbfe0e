"""One rank's share of a `transformers` model: loaded, joined with the others', stepped by rank 0's commands.

`LeaderModel` is the CausalModel of rank 0's engine: it sends each step to the other ranks before it runs it. `follow`
is the loop of the other ranks. A batch is checked before it is sent; a later error would leave the ranks in different
states, so it ends all ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from specdec.engine.backend import check_inputs
from specdec.engine.interface import RaggedBatch, StepOutput, Storage
from specdec.engine.loading.config_check import served_positions
from specdec.engine.loading.fitting import check_weights, empty_model
from specdec.engine.loading.model_folder import ModelFolder, Progress
from specdec.engine.loading.weights import embedding_alone, fill, output_alone
from specdec.engine.parallel.commands import Allocate, CommandSender, CopySlots, Scrub, Step, Stop, pack
from specdec.engine.parallel.exchange import Exchange
from specdec.engine.parallel.group import RankGroup
from specdec.engine.parallel.modules import JoinedShare
from specdec.engine.parallel.split import fit_attention, plan_split
from specdec.engine.transformers_model import (
    TransformersModel,
    backend_for,
    describe,
    dtype_of,
    output_layer,
)
from specdec.engine.vocabulary_map import VOCABULARY_FILE
from specdec.errors import ModelRefused, refusing
from specdec.folders import has_file

if TYPE_CHECKING:
    from specdec.engine.parallel.symmetric import SymmetricExchange

PARTING_S = 2.0  # the time rank 0 waits at its end for the others to end


def check_split(name: str, folder: ModelFolder, rank_count: int, positions_max: int | None = None) -> None:
    """Raises ModelRefused unless the folder's model can be split over `rank_count` ranks, and ConfigError if it has
    fewer positions. Reads no weights."""
    if has_file(folder.path / VOCABULARY_FILE):
        raise ModelRefused(f"{name} has a part of its tokenizer's tokens ({VOCABULARY_FILE}): it can only be a draft")
    if folder.has_encoder:
        raise ModelRefused(
            f"{name}: an encoder-decoder model runs in one process, so --tensor-parallel-size must be 1: to split it, "
            "ranks would have to share the heads of the biases by distance and of three kinds of attention"
        )
    model = empty_model(name, folder, torch.float32)
    served_positions(name, model.config.max_position_embeddings, positions_max)
    check_weights(name, model, folder)
    plan_split(name, model, 0, rank_count)


def load_share(
    name: str,
    folder: ModelFolder,
    dtype_name: str,
    device: torch.device,
    group: RankGroup,
    progress: Progress,
    positions_max: int | None = None,
) -> TransformersModel:
    """Loads this rank's share for `positions_max` positions, as `load_model` does. Raises ModelRefused, also if a file
    differs from rank 0's."""
    dtype = dtype_of(folder.config, dtype_name)
    model = empty_model(name, folder, dtype)
    split = plan_split(name, model, group.place.rank, group.place.rank_count)
    positions_max = served_positions(name, model.config.max_position_embeddings, positions_max)
    description = dataclasses.replace(
        describe(folder, model, dtype, _agreed_digest(name, folder, group, progress), positions_max, device),
        tensor_parallel_size=group.place.rank_count,
    )
    fill(name, model, folder, split.cuts, progress, keeps_packed=device.type == "cpu")
    fit_attention(model, group.place.rank_count)
    model.eval().requires_grad_(False).to(device)
    share = JoinedShare(model.base_model, split, group.exchange)
    agree: Callable[[bool], bool] = bool
    if group.exchange.is_captured:
        exchange = cast("SymmetricExchange", group.exchange)
        agree = exchange.all_agree
        description = dataclasses.replace(description, libraries=f"{description.libraries}, {exchange.numerics}")
    backend = backend_for(device, dtype, positions_max, not group.exchange.is_captured, True, agree=agree)
    with refusing(name):
        return TransformersModel(model, description, backend, share)


def load_output(name: str, folder: ModelFolder, dtype_name: str, model: TransformersModel) -> nn.Module:
    """Returns the whole output layer of the model of which `model` is a share, for rows that rank 0 alone computes."""
    device = model.backend.device
    whole = output_alone(name, folder, dtype_of(folder.config, dtype_name), keeps_packed=device.type == "cpu")
    whole.get_output_embeddings().requires_grad_(False).to(device)
    columns = torch.arange(model.description.vocabulary_size)
    return output_layer(whole, columns, model.backend)


def load_embedding(name: str, folder: ModelFolder, dtype_name: str, model: TransformersModel) -> torch.Tensor:
    """Returns the whole table of embeddings of the model of which `model` is a share, for rank 0 alone."""
    embedding = embedding_alone(name, folder, dtype_of(folder.config, dtype_name)).get_input_embeddings()
    return embedding.get_parameter("weight").detach().to(model.backend.device)


def _agreed_digest(name: str, folder: ModelFolder, group: RankGroup, progress: Progress) -> str:
    """Returns rank 0's digest of the folder, compared with that of ranks on other machines."""
    if group.place.rank == 0:
        digest = folder.digest(progress)
        group.store.set("digest", digest)
        return digest
    if group.is_on_one_machine:
        return ""
    own, digest = folder.digest(progress), group.store.get("digest").decode()
    if own != digest:
        raise ModelRefused(f"{name} on the machine of rank {group.place.rank} differs from rank 0's")
    return digest


class LeaderStorage:
    """Rank 0's storage; the other ranks repeat its operations with the next step."""

    def __init__(self, storage: Storage, sender: CommandSender) -> None:
        self._storage = storage
        self._sender = sender

    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        self._sender.add(pack(CopySlots((*sources, *destinations))))
        self._storage.copy_slots(sources, destinations)

    def scrub(self, block_id: int, start: int, end: int) -> None:
        self._sender.add(pack(Scrub(block_id, start, end)))
        self._storage.scrub(block_id, start, end)


class LeaderModel:
    """The CausalModel of rank 0: its own share, and the commands to the other ranks.

    `load_output` and `load_embedding` load the whole output layer and the whole table: those of the share are parts.
    """

    def __init__(
        self,
        model: TransformersModel,
        group: RankGroup,
        load_output: Callable[[], nn.Module],
        load_embedding: Callable[[], torch.Tensor],
    ) -> None:
        if group.sender is None:
            raise ValueError("only rank 0 leads")
        self.description = model.description
        self.share = model
        self._group = group
        self._sender = group.sender
        self._load_output = load_output
        self._load_embedding = load_embedding
        self._block_count = 0
        self._block_size = 1

    @property
    def exchange(self) -> Exchange:
        """The exchange between the ranks."""
        return self._group.exchange

    @property
    def cache_bytes_per_position(self) -> int:
        """Bytes on all ranks that share this machine's memory."""
        own = self.share.cache_bytes_per_position
        return own * self._group.place.rank_count if self._group.is_on_one_machine else own

    @property
    def hidden_size(self) -> int:
        return self.share.hidden_size

    def return_hidden(self) -> nn.Module:
        """See `HiddenStates`. All ranks have the same hidden states; rank 0 returns its own."""
        self.share.asked.hidden = True
        return self._load_output()

    @property
    def layer_count(self) -> int:
        return self.share.layer_count

    def return_features(self, layer_ids: Sequence[int]) -> None:
        """See `Features`. All ranks have the same features; rank 0 returns its own."""
        self.share.return_features(layer_ids)

    def load_embedding(self) -> torch.Tensor | torch.nn.Module:
        """See `Features`. Of the whole vocabulary: that of the share is a part."""
        return self._load_embedding()

    def allocate(self, block_count: int, block_size: int) -> LeaderStorage:
        self._sender.send(pack(Allocate(block_count, block_size)))
        self._block_count, self._block_size = block_count, block_size
        return LeaderStorage(self.share.allocate(block_count, block_size), self._sender)

    def forward(self, batch: RaggedBatch) -> StepOutput:
        """Runs the batch on all ranks, which plan it at the same time. Raises ValueError for an invalid batch; any
        other error may leave the ranks in different states and ends them all."""
        self._group.watch.check()
        self._check(batch)
        words = pack(Step(batch), self._block_size)
        try:
            self._sender.send(words)
            output = self.share.forward(batch)
        except BaseException as error:
            self._group.watch.fail(0, error)
            raise
        self._group.tighten()
        return output

    def _check(self, batch: RaggedBatch) -> None:
        """Raises ValueError for a batch that cannot be planned or run."""
        check_inputs(batch, has_encoder=False)
        description = self.description
        for chunk in batch.chunks:
            own = chunk.block_ids[: -(-chunk.cell_end // self._block_size)]
            cells = [chunk.start, chunk.cell_end - 1, *(cell for path in chunk.paths for cell in path)]
            is_placed = 0 <= min(cells) and max(cells) < len(own) * self._block_size
            if not (is_placed and chunk.position_max < description.positions_max):
                raise ValueError(f"cells {min(cells)} to {max(cells)} lie beyond {len(own)} blocks or the model")
            if not (0 <= min(own) and max(own) < self._block_count):
                raise ValueError(f"a block of {own} is none of the {self._block_count} there are")
            ids = chunk.token_ids
            if not (0 <= chunk.logit_count <= len(ids) and 0 <= min(ids) and max(ids) < description.vocabulary_size):
                raise ValueError(f"token ids {ids} or their logit count {chunk.logit_count} are none of this model")

    def close(self) -> None:
        """Stops the other ranks and waits up to PARTING_S for their end. No step may be running."""
        self._group.watch.expect_ends()
        self._sender.send(pack(Stop()))
        self._group.watch.stop(PARTING_S)


def follow(model: TransformersModel, group: RankGroup) -> None:
    """Runs rank 0's commands until Stop. After an error, which it raises, all ranks must end."""
    if group.receiver is None:
        raise ValueError("rank 0 does not follow")
    storage: Storage | None = None
    while True:
        for command in group.receiver.receive():
            match command:
                case Stop():
                    group.watch.stop()
                    return
                case Allocate(block_count, block_size):
                    storage = model.allocate(block_count, block_size)
                case Step(batch):
                    model.forward(batch)
                    group.tighten()
                case CopySlots(slots) if storage:
                    storage.copy_slots(slots[: len(slots) // 2], slots[len(slots) // 2 :])
                case Scrub(block_id, start, end) if storage:
                    storage.scrub(block_id, start, end)
