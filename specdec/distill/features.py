"""The target's features along labelled texts, on disk: recorded once, read again every pass.

They lie beside their texts, in bfloat16, a file for each, by the layers they are of: 3.5 KB a token for three layers of
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


def features_origin(texts_origin: str, layer_ids: Sequence[int]) -> str:
    """Returns a digest of everything that decides the features of a file of texts."""
    return hashlib.sha256(f"{texts_origin} {list(layer_ids)}".encode()).hexdigest()


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
    unfinished = file.with_suffix(".unfinished")
    save_file({NAME: found}, unfinished, metadata={"origin": origin})
    os.replace(unfinished, file)
