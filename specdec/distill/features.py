"""The target's features along labelled texts, on disk: recorded once, read again every pass.

Of a text that the target writes they are kept as it computes them, of others it reads the text. They lie beside their
texts, in bfloat16, a file for each, by the layers they are of: 3.5 KB a token for three layers of
a hidden size of 576, 24 KB for 4,096. A run that is stopped records on with the first file that is missing.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specdec.distill.texts import LabelledTexts
from specdec.distill.training import Data, packed
from specdec.engine.eagle.features import states_entering
from specdec.engine.interface import ModelDescription, RaggedBatch, StepOutput, Storage
from specdec.errors import ConfigError

NAME = "features"
RECORDED_TOKENS_MAX = 2048  # of a forward
SIZED_TOKENS = 4096  # of which the size of features is taken


class Features:
    """The features of texts one after another, of which each file holds some whole ones."""

    def __init__(self, files: Sequence[Path], origins: Sequence[str]) -> None:
        """Opens files that `record_features` wrote. Raises ConfigError for any other."""
        self._parts: list[Any] = []
        self._ends: list[int] = []
        end = 0
        for file, origin in zip(files, origins):
            try:
                opened: Any = safe_open(file, "pt")
                stated, part = (opened.metadata() or {}).get("origin"), opened.get_slice(NAME)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{file} has no features: {error}") from None
            if stated != origin:
                raise ConfigError(f"{file} has features of other texts or layers: remove it")
            end += part.get_shape()[0]
            self._parts.append(part)
            self._ends.append(end)

    @property
    def row_count(self) -> int:
        """Tokens of all texts."""
        return self._ends[-1] if self._ends else 0

    def rows(self, start: int, end: int) -> Tensor:
        """Returns the features of the tokens [start, end) of one text.  # [tokens, layers * hidden] bfloat16"""
        index = next(index for index, last in enumerate(self._ends) if end <= last)
        first = self._ends[index - 1] if index else 0
        found: Tensor = self._parts[index][start - first : end - first]
        return found

    def sizes(self, layer_count: int) -> list[float]:
        """Returns the root mean square of the numbers of each layer, the median of the tokens in the first file: at the
        first token of texts some models have numbers a hundred times larger."""
        rows = self._parts[0][:SIZED_TOKENS].float().unflatten(1, (layer_count, -1))
        found: list[float] = rows.square().mean(2).sqrt().median(0).values.clamp_min(1e-6).tolist()
        return found


def features_file(texts: Path, layer_ids: Sequence[int]) -> Path:
    """Returns the file of the features of a file of texts."""
    return texts.with_suffix(f".{NAME}-{'-'.join(map(str, layer_ids))}.safetensors")


def features_place(texts: Path, texts_origin: str, layer_ids: Sequence[int]) -> tuple[Path, str]:
    """Returns the file of the features of a file of texts, and a digest of everything that decides them."""
    origin = hashlib.sha256(f"{texts_origin} {list(layer_ids)}".encode()).hexdigest()
    return features_file(texts, layer_ids), origin


@torch.no_grad()
def record_features(
    model: Any,
    layer_ids: Sequence[int],
    texts: LabelledTexts,
    file: Path,
    origin: str,
    told: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes the features of texts, whole or not at all; `told(n)` after each forward over n tokens.

    model: the target as `transformers` has it, on the device it computes on
    """
    lengths = texts.lengths.tolist()
    starts = [0, *texts.lengths.cumsum(0).tolist()]
    found = torch.empty(starts[-1], len(layer_ids) * model.config.hidden_size, dtype=torch.bfloat16)
    data, device = Data(texts, texts.learned_from, None), model.get_input_embeddings().weight.device
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    with states_entering(model.base_model, layer_ids) as states:
        for indices in packed(order, lengths, RECORDED_TOKENS_MAX):
            inputs = data.batch(indices).inputs.to(device)
            model.base_model(input_ids=inputs, use_cache=False)
            rows = torch.cat([states[layer_id] for layer_id in layer_ids], -1).to(torch.bfloat16).cpu()
            for row, index in enumerate(indices):
                found[starts[index] : starts[index + 1]] = rows[row, : lengths[index]]
            told(sum(lengths[index] for index in indices))
    save_features(found, file, origin)


def save_features(rows: Tensor, file: Path, origin: str) -> None:
    """Writes the features of texts one after another, whole or not at all.  rows: [tokens, layers * hidden] bfloat16"""
    unfinished = file.with_suffix(".unfinished")
    save_file({NAME: rows}, unfinished, metadata={"origin": origin})
    os.replace(unfinished, file)


class RecordingModel:
    """A CausalModel that keeps the features of its rows, by the first block of their sequence, until they are taken."""

    def __init__(self, model: Any, layer_ids: Sequence[int]) -> None:
        """model: a CausalModel that has `Features`. Raises ModelRefused for one that has none."""
        model.return_features(layer_ids)
        self._model = model
        self._kept: dict[int, list[Tensor]] = {}
        self.description: ModelDescription = model.description

    @property
    def cache_bytes_per_position(self) -> int:
        found: int = self._model.cache_bytes_per_position
        return found

    def allocate(self, block_count: int, block_size: int) -> Storage:
        storage: Storage = self._model.allocate(block_count, block_size)
        return storage

    def forward(self, batch: RaggedBatch) -> StepOutput:
        """See `CausalModel`."""
        output: StepOutput = self._model.forward(batch)
        assert output.features is not None, "the model was asked for features"
        rows = output.features.to(torch.bfloat16).cpu().split([len(chunk.token_ids) for chunk in batch.chunks])
        for chunk, own in zip(batch.chunks, rows):
            kept = self._kept.setdefault(chunk.block_ids[0], [])
            if chunk.start == 0:  # a sequence begins: what is there is of another one, such as the engine's first step
                kept.clear()
            kept.append(own)
        return output

    def take(self, first_block: int) -> Tensor:
        """Returns the features of all rows of a sequence since its first one.  # [rows, layers * hidden] bfloat16"""
        return torch.cat(self._kept.pop(first_block))
