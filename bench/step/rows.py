"""The step of one sequence by its rows, beside reading its weights once; and the same with a feature head loaded.

The limit is the time to read the weights as they are stored, at the rate at which the same threads sum a gigabyte with
torch in the same turn, the fastest of three times: of the reading loops tried (products with a vector, maxima, numpy's
sum) it reads fastest, so the limit is the hardest to reach.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

import torch

from bench.engine.steps import cache_text, load, time_step, verification
from bench.runner import Values
from specdec.distill.eagle import head_sizes
from specdec.engine.eagle.folder import load_eagle, target_facts
from specdec.engine.eagle.model import EagleTarget
from specdec.engine.eagle.network import EagleHead, default_layers
from specdec.engine.loading.fitting import config_of
from specdec.engine.loading.folder_files import WEIGHTS_FILE
from specdec.engine.loading.gguf import read_gguf
from specdec.engine.loading.model_folder import open_model_folder, stored_tensors
from specdec.folders import GGUF_SUFFIX
from specdec.target_service.feature_head import FeatureHeadDrafter

READ_BYTES, READS = 10**9, 3  # larger than any cache
BYTES = {"F32": 4, "F8_E4M3": 1}  # of numbers in files of weights, where they are not 2
CONTEXT = 100  # cached tokens
SHAPES = {"1 row": (1, 1), "2 rows": (2, 1), "4 rows": (4, 1), "8 rows": (8, 1), "8 on 4 paths": (8, 4)}
READING = "reading"
PASSES = {"pass of 1": 1, "pass of 4": 4, "pass of 8": 8}  # of a head, by rows
HEAD_TOKENS = 8192  # that a head of random weights proposes


class Reading:
    """Numbers that are larger than any cache, and the rate of reading them."""

    def __init__(self, byte_count: int = READ_BYTES) -> None:
        self._numbers = torch.ones(byte_count // 4)

    def bytes_per_s(self) -> float:
        seconds = []
        for _ in range(READS):
            began_s = time.perf_counter()
            self._numbers.sum()
            seconds.append(time.perf_counter() - began_s)
        return self._numbers.numel() * 4 / min(seconds)


def stored_bytes(folder: Path) -> int:
    """The bytes of the weights that every step reads, as the folder or GGUF file stores them; an embedding that is no
    output layer is not among them: a step reads single rows of it."""
    if folder.suffix == GGUF_SUFFIX:
        sizes = {name: tensor.byte_count for name, tensor in read_gguf(folder).tensors.items()}
        embedding, output = "token_embd.weight", "output.weight"
    else:
        tensors = stored_tensors([folder / WEIGHTS_FILE])
        sizes = {name: math.prod(own.shape) * BYTES.get(own.dtype, 2) for name, own in tensors.items()}
        embedding, output = "model.embed_tokens.weight", "lm_head.weight"
    return sum(size for name, size in sizes.items() if name != embedding or output not in sizes)


class Rows:
    """A loaded model after a text. Raises ModelRefused."""

    def __init__(self, folder: Path, reading: Reading) -> None:
        self._model, self._reading, self._bytes = load(folder, "bfloat16"), reading, stored_bytes(folder)
        cache_text(self._model, CONTEXT, max(rows for rows, _ in SHAPES.values()))
        self._batches = {name: verification(*shape, CONTEXT) for name, shape in SHAPES.items()}

    def times_ms(self, turn: int) -> Values:
        """Of a step of every shape, and of reading the weights."""
        found = {READING: self._bytes / self._reading.bytes_per_s() * 1e3}
        self._model.forward(self._batches["1 row"])  # not timed: caches hold what was read
        return found | {name: time_step(self._model, batch) for name, batch in self._batches.items()}


class WithHead:
    """A loaded model with a feature head, after a text: the one in a folder, or one of a layer of the model's sizes and
    random weights, on which times do not depend. Raises ModelRefused."""

    def __init__(self, model: Path, head: Path | None) -> None:
        self._model = EagleTarget(load(model, "bfloat16"), head_of(model, head))
        self._drafter = FeatureHeadDrafter(self._model)
        cache_text(self._model, CONTEXT, 1)
        self._batch = verification(1, 1, CONTEXT)

    def times_ms(self, turn: int) -> Values:
        """Of a step of one row, and of passes with what they propose."""
        self._model.forward(self._batch)
        found = {"1 row": time_step(self._model, self._batch)}
        size = self._model.description.vocabulary_size
        return found | {name: 1e3 * self._drafter.time_pass(rows, size) for name, rows in PASSES.items()}


def head_of(model: Path, head: Path | None) -> EagleHead:
    folder = open_model_folder(str(model))
    facts = target_facts(folder)
    if head is not None:
        return load_eagle(head, facts)
    torch.manual_seed(0)
    token_count = min(HEAD_TOKENS, facts.vocabulary_size)
    sizes = head_sizes(config_of(folder), facts, default_layers(facts.layer_count), token_count)
    return EagleHead(sizes, torch.arange(token_count)).requires_grad_(False)
