"""A student that is a draft already, such as the live one of a record: it keeps its shape, weights and tokens, and
learns on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from specdec.engine.loading.encoder_decoder import served_pair_positions
from specdec.engine.loading.fitting import config_of
from specdec.engine.loading.model_folder import ModelFolder, open_model_folder
from specdec.engine.transformers_model import read_weights
from specdec.engine.vocabulary_map import VocabularyMap
from specdec.errors import ConfigError
from specdec.protocol.types import kind_of


@dataclass(frozen=True, slots=True)
class Start:
    """The draft of --start. `token_ids`: the target's ids of its tokens, [tokens] int64; None: all."""

    name: str
    folder: ModelFolder
    token_ids: Tensor | None
    positions_max: int

    def check_length(self, longest: int) -> None:
        """Raises ConfigError if it has fewer positions than the longest text has tokens."""
        if longest > self.positions_max:
            limit = f"--start {self.name} has {self.positions_max} positions"
            raise ConfigError(f"the longest text has {longest} tokens; {limit}: give a smaller --text-tokens")

    def load(self) -> transformers.PreTrainedModel:
        """Returns the model in float32. Raises ModelRefused for weights that are not those of its configuration."""
        model = read_weights(self.name, self.folder, self.folder.digest, torch.float32)
        model.generation_config = transformers.GenerationConfig.from_model_config(model.config)  # valid when saved
        return model


def open_start(name: str, target: ModelFolder) -> Start:
    """Returns a draft by folder or hub id; its weights are not read. Raises ModelRefused for one that cannot be served,
    and ConfigError for one of another kind than the target, with another tokenizer or too few tokens."""
    folder = open_model_folder(name)
    if folder.has_encoder is not target.has_encoder:
        kinds = kind_of(folder.has_encoder), kind_of(target.has_encoder)
        raise ConfigError(f"--start {name} is {kinds[0]}, the target {kinds[1]}: a draft must be of its target's kind")
    if folder.tokenizer.fingerprint != target.tokenizer.fingerprint:
        raise ConfigError(f"--start {name} has another tokenizer than the target: only a draft with the same learns on")
    config = config_of(folder)
    fewer = VocabularyMap.read(folder.path, target.token_string_count, config.vocab_size)
    if fewer is None and config.vocab_size < target.token_string_count:
        limit = f"it must have the target's {target.token_string_count}, or name its own in a draft_vocabulary.json"
        raise ConfigError(f"--start {name} has {config.vocab_size} tokens; {limit}")
    positions = served_pair_positions(folder.config, None) if folder.has_encoder else config.max_position_embeddings
    return Start(name, folder, None if fewer is None else fewer.target_token_ids, positions)
