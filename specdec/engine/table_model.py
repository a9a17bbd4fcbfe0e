"""The table model: logits read from a table by the last two tokens. For protocol tests only; it is no language model.

It tests the whole system with an exactly known target distribution, on a tiny vocabulary, in microseconds. It stores
token ids in paged storage and reads the last two back through the block table, so an error in rollback, sharing or
block ownership changes its logits. Its name, shown as the model name, states that it is for tests.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from specdec.engine.config_check import TABLE_MODEL_TYPE
from specdec.engine.interface import ModelDescription, RaggedBatch, SequenceChunk, StepOutput
from specdec.engine.model_folder import WEIGHTS_FILE, ModelFolder, warn_of_unknown_ends
from specdec.errors import ModelRefused

MODEL_NAME = "table model (protocol tests only)"
END_TOKEN_ID = 0
LOGITS_NAME = "logits"


class TokenStorage:
    """Token ids in blocks; 0 in unwritten positions."""

    def __init__(self, block_count: int, block_size: int):
        self.token_ids = numpy.zeros((block_count, block_size), dtype=numpy.int64)  # [blocks, block size]

    def copy_block(self, source: int, destinations: Sequence[int]) -> None:
        self.token_ids[list(destinations)] = self.token_ids[source]

    def scrub(self, block_id: int, start: int, end: int) -> None:
        self.token_ids[block_id, start:end] = 0


class TableModel:
    """A CausalModel whose logits after (previous, last) are `table[previous, last]`; index V stands for no token."""

    def __init__(self, table: torch.Tensor, description: ModelDescription):
        self.description = description
        self._table = table  # [V + 1, V + 1, V] float32
        self._before = description.vocabulary_size
        self._storage: TokenStorage | None = None

    @property
    def cache_bytes_per_position(self) -> int:
        return 8

    def allocate(self, block_count: int, block_size: int) -> TokenStorage:
        self._storage = TokenStorage(block_count, block_size)
        return self._storage

    def forward(self, batch: RaggedBatch) -> StepOutput:
        """Writes the batch's token ids, then reads each row's last two tokens back from the cache."""
        if self._storage is None:
            raise RuntimeError("forward was called before allocate")
        cells = self._storage.token_ids
        block_size = cells.shape[1]
        tables = [numpy.asarray(chunk.block_ids, dtype=numpy.int64) for chunk in batch.chunks]
        for chunk, blocks in zip(batch.chunks, tables):
            places = numpy.asarray(chunk.tree.cells if chunk.tree else range(chunk.start, chunk.end))
            cells[blocks[places // block_size], places % block_size] = chunk.token_ids
        token_ids = [token_id for chunk in batch.chunks for token_id in chunk.token_ids]
        for chunk, rows in batch.copied_rows():
            places, blocks = numpy.arange(chunk.start - len(rows), chunk.start), numpy.asarray(chunk.block_ids)
            cells[blocks[places // block_size], places % block_size] = [token_ids[row] for row in rows]
        previous: list[numpy.ndarray] = []
        last: list[numpy.ndarray] = []
        for chunk, blocks in zip(batch.chunks, tables):
            places, before, is_first = _last_two(chunk)
            last.append(cells[blocks[places // block_size], places % block_size])
            found = cells[blocks[before // block_size], before % block_size]
            previous.append(numpy.where(is_first, self._before, found))
        # logits: [sum of logit counts, vocab] float32
        logits = self._table[torch.from_numpy(numpy.concatenate(previous)), torch.from_numpy(numpy.concatenate(last))]
        is_finite = iter(torch.isfinite(logits).all(-1).tolist())
        return StepOutput(logits, tuple(all(list(islice(is_finite, s.logit_count))) for s in batch.chunks))


def _last_two(chunk: SequenceChunk) -> tuple[numpy.ndarray, numpy.ndarray, numpy.ndarray]:
    """Returns for each row with logits its cell, the cell of the token before it, and whether it is at position 0."""
    if chunk.tree is None:
        places = numpy.arange(chunk.end - chunk.logit_count, chunk.end)
        return places, numpy.maximum(places - 1, 0), places == 0
    rows, first = chunk.tree, len(chunk.token_ids) - chunk.logit_count
    places, positions = numpy.asarray(rows.cells)[first:], numpy.asarray(rows.positions)[first:]
    is_before = rows.visible[first:] & (rows.cell_positions[: rows.visible.shape[1]] == positions[:, None] - 1)
    return places, is_before.argmax(axis=1), positions == 0


def load_table_model(folder: ModelFolder, digest: str, positions_max: int) -> TableModel:
    """Loads the table model in a checked folder, written by `write_table_model`. Raises ModelRefused for a table of
    another shape or type."""
    stored = folder.tensors.get(LOGITS_NAME)
    size = stored.shape[-1] if stored and stored.shape else 0
    if stored is None or stored.dtype != "F32" or size < 2 or stored.shape != (size + 1, size + 1, size):
        raise ModelRefused(f"{folder.path / WEIGHTS_FILE}: {LOGITS_NAME} must be float32 [V + 1, V + 1, V], V above 1")
    ends = folder.ends.below(size)
    warn_of_unknown_ends(folder.path, ends, size)
    description = ModelDescription(
        model_digest=digest,
        model_name=MODEL_NAME,
        vocabulary_size=size,
        positions_max=positions_max,
        end_token_ids=ends.ids,
        dtype="float32",
        device="cpu",
        libraries=f"torch {torch.__version__}",
    )
    return TableModel(load_file(folder.path / WEIGHTS_FILE)[LOGITS_NAME], description)


def write_table_model(
    folder: Path,
    vocabulary_size: int,
    positions_max: int = 512,
    seed: int = 0,
    logits: torch.Tensor | None = None,
    end_token_ids: tuple[int, ...] = (END_TOKEN_ID,),
) -> None:
    """Writes a table model folder: config.json, model.safetensors, tokenizer.json.

    `logits` [V + 1, V + 1, V] float32, may contain not-a-number in tests; by default drawn from `seed`. Token 0 is the
    special token "<|end|>", token i the text "<i>", so that any output is readable.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shape = (vocabulary_size + 1, vocabulary_size + 1, vocabulary_size)
    if logits is None:
        logits = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 2
    if tuple(logits.shape) != shape:
        raise ValueError(f"logits have shape {tuple(logits.shape)}; it must be {shape}")
    config = {"model_type": TABLE_MODEL_TYPE, "positions_max": positions_max, "end_token_ids": list(end_token_ids)}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file({LOGITS_NAME: logits.to(torch.float32).contiguous()}, folder / WEIGHTS_FILE)
    _table_tokenizer(vocabulary_size).save(str(folder / "tokenizer.json"))


def _table_tokenizer(vocabulary_size: int) -> Tokenizer:
    """Returns a tokenizer of words "<1>", "<2>", ... without spaces between them; the end token is special."""
    words = {"<|end|>": END_TOKEN_ID} | {f"<{token_id}>": token_id for token_id in range(1, vocabulary_size)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<1>" if vocabulary_size > 1 else "<|end|>"))
    tokenizer.normalizer = normalizers.Replace(Regex(r"\s"), "")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("<[^>]*>"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return tokenizer
