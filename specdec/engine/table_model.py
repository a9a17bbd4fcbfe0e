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

from specdec.engine.interface import Chunk, ModelDescription, RaggedBatch, StepOutput
from specdec.engine.loading.config_check import TABLE_MODEL_TYPE
from specdec.engine.loading.folder_files import WEIGHTS_FILE
from specdec.engine.loading.model_folder import ModelFolder, warn_of_unknown_ends
from specdec.errors import ModelRefused

MODEL_NAME = "table model (protocol tests only)"
END_TOKEN_ID = 0
LOGITS_NAME = "logits"


class TokenStorage:
    """Token ids in blocks; 0 in unwritten positions."""

    def __init__(self, block_count: int, block_size: int):
        self.token_ids = numpy.zeros((block_count, block_size), dtype=numpy.int64)  # [blocks, block size]

    def copy_slots(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        slots = self.token_ids.reshape(-1)
        slots[list(destinations)] = slots[list(sources)]

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
        slots, block_size = self._storage.token_ids.reshape(-1), self._storage.token_ids.shape[1]
        seen: list[numpy.ndarray] = []
        for chunk in batch.chunks:
            blocks = numpy.asarray(chunk.block_ids, dtype=numpy.int64)
            pairs = _last_two(chunk)
            seen.append(numpy.where(pairs < 0, -1, blocks[pairs // block_size] * block_size + pairs % block_size))
            slots[seen[-1][:, 1]] = chunk.token_ids
        wanted = numpy.concatenate([pairs[len(pairs) - s.logit_count :] for pairs, s in zip(seen, batch.chunks)])
        previous = numpy.where(wanted[:, 0] < 0, self._before, slots[wanted[:, 0]])
        # logits: [sum of logit counts, vocab] float32
        logits = self._table[torch.from_numpy(previous), torch.from_numpy(slots[wanted[:, 1]])]
        is_finite = iter(torch.isfinite(logits).all(-1).tolist())
        return StepOutput(logits, tuple(all(list(islice(is_finite, s.logit_count))) for s in batch.chunks))


def _last_two(chunk: Chunk) -> numpy.ndarray:
    """Returns for each row the cell of the token before it, -1 at position 0, and its own.  # [rows, 2]"""
    chain = [(position - 1, position) for position in range(chunk.start, chunk.base)]
    nodes = [(path[-2] if len(path) > 1 else chunk.base - 1, path[-1]) for path in chunk.paths]
    return numpy.array(chain + nodes, dtype=numpy.int64)


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
