"""What a model folder says of an encoder-decoder model: how an output begins, and how many positions it has."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from specdec.engine.loading.config_check import whole
from specdec.engine.loading.folder_files import GENERATION_FILE
from specdec.errors import ConfigError
from specdec.folders import has_file, read_json, refuse

POSITIONS_DEFAULT = 512  # of an input and of an output each, where config.json has no n_positions: T5's in training
START, FORCED = "decoder_start_token_id", "forced_bos_token_id"


@contextmanager
def without_warning_of_ties() -> Iterator[None]:
    """In this context `transformers` does not warn of a folder whose output layer is its own: its class of T5 says that
    it never is, and published folders of T5 1.1 have one."""
    logger = logging.getLogger("transformers.modeling_utils")

    def is_of_others(record: logging.LogRecord) -> bool:
        return "NOT tie" not in record.getMessage()

    logger.addFilter(is_of_others)  # its level would not do: by that it decides what else to warn of
    try:
        yield
    finally:
        logger.removeFilter(is_of_others)


def beginning_tokens(folder: Path, config: Mapping[str, Any], size: int) -> tuple[int, ...]:
    """Returns the tokens with which an output begins: the decoder's start token, then a forced first one, if any; of
    generation_config.json, else of the checked config.json. Raises ModelRefused unless they are below `size`."""
    file = folder / GENERATION_FILE
    generation = read_json(file) if has_file(file) else {}
    ids: list[int] = []
    for name in (START, FORCED):
        is_generation = generation.get(name) is not None
        value = generation[name] if is_generation else config.get(name)
        found = whole(value)
        if found is not None and 0 <= found < size:
            ids.append(found)
        elif value is not None or name == START:
            place = file if is_generation else folder / "config.json"
            raise refuse(place, name, value, f"a token id below {size}, with which an output begins")
    return tuple(ids)


def served_pair_positions(config: Mapping[str, Any], asked: int | None) -> int:
    """Returns the positions of a sequence, input and output together: those asked for, since a model with relative
    positions has no table of them; else the configuration's for each of the two. Raises ConfigError for fewer than
    two."""
    if asked is not None and asked < 2:
        raise ConfigError(f"--max-model-len is {asked}; an encoder-decoder model needs at least 2")
    return asked or 2 * _own_positions(config)


def encoder_positions(config: Mapping[str, Any], positions_max: int) -> int:
    """Returns the most tokens of an input: those that the configuration gives to it, and all that a sequence of
    `positions_max` has beyond the configuration's for input and output; one is left for the output."""
    own = _own_positions(config)
    return max(min(own, positions_max - 1), positions_max - own)


def check_encoder_decoder(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ConfigError for a type or a device on which encoder-decoder models do not run."""
    if device.type != "cpu":
        raise ConfigError(f"device is {device}; encoder-decoder models such as {name} run on the CPU backend: give cpu")
    if dtype is torch.float16:
        limit = "float32 or bfloat16: in float16 its layers are clamped by values of other rows"
        raise ConfigError(f"dtype is float16; for {name}, an encoder-decoder model, it must be {limit}")


def _own_positions(config: Mapping[str, Any]) -> int:
    return int(config.get("n_positions") or POSITIONS_DEFAULT)
