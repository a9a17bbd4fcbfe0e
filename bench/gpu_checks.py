"""The checks of `bench.gpu`: the engine's answers against plain `transformers`, and their drift with the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from bench.gpu_models import SMALL, engine_model, plain_model
from specdec.engine.cuda.backend import DeviceBackend
from specdec.engine.interface import Chunk, RaggedBatch, tree_paths
from specdec.engine.loading.devices import default_block_size
from specdec.engine.transformers_model import TransformersModel

PROMPT_COUNT, NEW_COUNT = 96, 32
SCALE = 8.0  # of weights in the checks, so that texts vary
BLOCK_COUNT = 9
TREE_ROWS, TREE_PATHS = 8, 4
MARGIN_TEXT = 512  # positions of the margin report
# Of the largest logit: another order of additions in float32; a few roundings of 16-bit activations.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 6e-2}


@dataclass(frozen=True, slots=True)
class Check:
    """A claim and the result of its check."""

    claim: str
    passed: bool
    found: str


class Text:
    """One sequence in its own blocks of a model's cache, from block `first` on."""

    def __init__(self, model: TransformersModel, first: int, block_count: int):
        self._model = model
        self.block_ids = range(first, first + block_count)

    def feed(self, start: int, token_ids: Sequence[int], logit_count: int) -> torch.Tensor:
        """Logits of the last rows of these tokens at `start`."""
        chunk = Chunk(self.block_ids, start, token_ids, logit_count)
        return self._model.forward(RaggedBatch((chunk,))).logits.clone()


def open_text(model: TransformersModel, device: torch.device, length: int) -> Text:
    """Returns a text in a model's cache with capacity for it alone."""
    block_size = default_block_size(device)
    block_count = -(-length // block_size)
    model.allocate(max(BLOCK_COUNT, 2 + block_count), block_size)
    return Text(model, 1, block_count)


def random_ids(count: int, vocabulary: int) -> list[int]:
    return torch.randint(1, vocabulary, (count,), generator=torch.Generator().manual_seed(1)).tolist()


def parents_of(rows: int, paths: int) -> list[int]:
    """Returns the shape of a tree of as many rows: a chain, then branches of one token, the last one below the root."""
    return [*range(rows - paths), *reversed(range(paths - 1))] if paths > 1 else []


@torch.inference_mode()
def check_greedy(device: torch.device) -> Check:
    """Greedy text in float32, token for token, with verifications of several widths on the way."""
    plain = plain_model(SMALL, device, torch.float32, SCALE)
    prompt = random_ids(PROMPT_COUNT, SMALL.vocabulary)
    length = PROMPT_COUNT + NEW_COUNT
    its: Any = plain  # `generate` is typed for a protocol that its class does not fit
    output = its.generate(
        torch.tensor([prompt], device=device), max_new_tokens=NEW_COUNT, do_sample=False, pad_token_id=0
    )
    wanted = output[0, PROMPT_COUNT:].tolist()
    text = open_text(engine_model(plain, device, 1), device, length)
    found = [int(text.feed(0, prompt, 1)[0].argmax())]
    while len(found) < len(wanted):
        # Feed the newest token and, as a draft would offer them, up to three more of the text that is wanted.
        width = min(1 + len(found) % 4, len(wanted) - len(found))
        offered = [found[-1], *wanted[len(found) : len(found) + width - 1]]
        found += text.feed(PROMPT_COUNT + len(found) - 1, offered, width).argmax(-1).tolist()
    claim = f"greedy text of {NEW_COUNT} tokens equals transformers' (float32, {len(set(wanted))} distinct)"
    return Check(claim, found == wanted, "equal" if found == wanted else f"{found} instead of {wanted}")


def plain_and_exact(
    device: torch.device, dtype: torch.dtype
) -> tuple[transformers.LlamaForCausalLM, transformers.LlamaForCausalLM]:
    """Returns the plain model, and one with its weights that computes in float32."""
    plain, exact = (plain_model(SMALL, device, each, SCALE) for each in (dtype, torch.float32))
    exact.load_state_dict(plain.state_dict())
    return plain, exact


@torch.inference_mode()
def check_logits(device: torch.device, dtype: torch.dtype) -> Check:
    """Logits at every position of a prompt fed in chunks, against the plain model's in float32."""
    prompt = random_ids(PROMPT_COUNT, SMALL.vocabulary)
    ids = torch.tensor([prompt], device=device)
    plain, exact = plain_and_exact(device, dtype)
    wanted, its_own = exact(ids).logits[0], plain(ids).logits[0].float()
    text = open_text(engine_model(plain, device, 1), device, PROMPT_COUNT)
    found = torch.cat(
        [text.feed(start, prompt[start : start + 40], len(prompt[start : start + 40])) for start in (0, 40, 80)]
    )
    claim = f"logits at {PROMPT_COUNT} positions equal transformers' ({str(dtype).removeprefix('torch.')})"
    return compare(claim, found, its_own, wanted, dtype, "transformers' own")


@torch.inference_mode()
def check_tree(device: torch.device, dtype: torch.dtype) -> Check:
    """Logits of a tree after a text, and of its paths as chains, against the plain model's in
    float32."""
    plain, exact = plain_and_exact(device, dtype)
    model = engine_model(plain, device, TREE_PATHS)
    block_size = default_block_size(device)
    block_count = -(-(PROMPT_COUNT + TREE_ROWS) // block_size)
    model.allocate(1 + 2 * block_count, block_size)
    chain, tree = (Text(model, 1 + index * block_count, block_count) for index in range(2))
    ids = random_ids(PROMPT_COUNT + TREE_ROWS, SMALL.vocabulary)
    prompt, token_ids = ids[:PROMPT_COUNT], ids[PROMPT_COUNT:]
    for text in (chain, tree):
        text.feed(0, prompt, 1)
    paths = tree_paths(parents_of(TREE_ROWS, TREE_PATHS), PROMPT_COUNT + 1)
    chunk = Chunk(tree.block_ids, PROMPT_COUNT, token_ids, TREE_ROWS, paths)
    found = model.forward(RaggedBatch((chunk,))).logits
    chains, wanted = [], []
    for cells in ([], *paths):
        path = [token_ids[0], *(token_ids[cell - PROMPT_COUNT] for cell in cells)]
        chains.append(chain.feed(PROMPT_COUNT, path, 1))
        wanted.append(exact(torch.tensor([[*prompt, *path]], device=device)).logits[0, -1:])
    claim = f"a tree of {TREE_ROWS} rows on {TREE_PATHS} paths has their logits ({str(dtype).removeprefix('torch.')})"
    return compare(claim, found, torch.cat(chains), torch.cat(wanted), dtype, "chains")


def compare(
    claim: str, found: torch.Tensor, others: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, name: str
) -> Check:
    """Compares logits with `wanted`, which are exact; in 16 bits twice the difference of `others` is allowed, too."""
    scale = float(wanted.abs().max())
    ours, theirs = (float((logits - wanted).abs().max()) / scale for logits in (found, others))
    limit = max(TOLERANCES[dtype], 2 * theirs if dtype != torch.float32 else 0.0)
    return Check(claim, ours <= limit, f"{ours:.2g} of the largest away; {name} {theirs:.2g}; limit {limit:.2g}")


@torch.inference_mode()
def margin_measurements(model: TransformersModel) -> dict[str, Any]:
    """How far rows drift with the shape of the step, and how many positions of a random text are decided by less."""
    backend = model.backend
    assert isinstance(backend, DeviceBackend)
    backend.with_graphs = True  # steps as they are served
    count = min(MARGIN_TEXT, model.description.positions_max - 8)
    prompt = random_ids(count + 8, model.description.vocabulary_size)
    text = open_text(model, backend.device, count + 8)
    logits = torch.cat(
        [text.feed(start, prompt[start : start + 64], len(prompt[start : start + 64])) for start in range(0, count, 64)]
    )
    assert backend.margins is not None
    best = logits.topk(2, dim=1).values
    close = int((best[:, 0] - best[:, 1] < backend.margins.drift).sum())
    together = text.feed(count, prompt[count : count + 8], 8)
    equal = []
    for width in (1, 2, 4):
        parts = [text.feed(start, prompt[start : start + width], width) for start in range(count, count + 8, width)]
        if torch.equal(torch.cat(parts), together):
            equal.append(width)
    drift = backend.margins.drift
    return {"way": backend.way.name, "drift": drift, "close": close, "positions": len(logits), "equal_widths": equal}
