"""A step over packed weights as one native call: the bits of the modules, and the answers of the dense weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.engine.cpu.kernels import kernels
from specdec.engine.cpu.llama_parts import PackedEmbedding
from specdec.engine.cpu.structs import FLOAT8, INT4, INT8
from tests.engine.cpu.test_step import LOGIT_TOLERANCE, LONG, VOCABULARY_SIZE, Rig, batches, chain, load, same
from tests.support.engine_models import random_tokens
from tests.support.packed import KINDS, pack_linears, unpack_linears

pytestmark = pytest.mark.skipif(kernels() is None, reason="native kernels are off")
GROUP = 8  # divides the sizes of the tiny models


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma3", "phi3"])
def test_the_call_has_the_bits_of_the_modules(
    architecture: str, kind: str, dtype: torch.dtype, folder_of: Callable[[str], Path]
) -> None:
    """Claim: prompts, mixed steps, trees and long steps over packed weights have the bits of the kernels one by one,
    and rows those of the same rows fed one by one; all products of the call are packed.

    Conclusive: another weight, scale or order in the call shows in a bit; the type of each of its weights is read.
    """
    model = load(architecture, folder_of, dtype)
    pack_linears(model, kind, GROUP)
    rig = Rig(model, dtype)
    struct, number = rig.call._parts.struct, {"int4": INT4, "int8": INT8, "float8": FLOAT8}[kind]
    own = [getattr(struct.layers[0], name).type for name in ("qkv", "out", "gate", "up", "down")]
    assert [*own, struct.output.type] == 6 * [number]
    for chunks in batches():
        step = rig.step(*chunks)
        logits, hidden = rig.by_modules(*chunks)
        assert same(step.logits, logits) and same(step.hidden, hidden)
    ids = random_tokens(20, 7)
    together = rig.reset().step(chain(LONG, 0, ids)).logits
    rig.reset()
    alone = [rig.step(chain(LONG, index, [one])).logits for index, one in enumerate(ids)]
    assert same(together, torch.cat(alone))


@pytest.mark.parametrize("kind", KINDS)
def test_the_call_is_near_the_dense_weights(kind: str, folder_of: Callable[[str], Path]) -> None:
    """Claim: in float32 the logits are those of the dense weights that the packed ones mean.

    Conclusive: the tolerance is that of dense weights against `transformers`; rounding to 8 bits alone moves the logits
    by more.
    """
    ids, dtype = random_tokens(60, 4), torch.float32
    packed, dense, before = (load("llama", folder_of, dtype) for _ in range(3))
    for model in (packed, dense):
        pack_linears(model, kind, GROUP)
    unpack_linears(dense, dtype)
    ours, theirs, others = (Rig(model, dtype).step(chain(LONG, 0, ids)).logits for model in (packed, dense, before))
    assert (ours - theirs).abs().max() < LOGIT_TOLERANCE < (ours - others).abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["int4", "float8"])
def test_a_tied_packed_table_is_in_memory_once(kind: str, dtype: torch.dtype, folder_of: Callable[[str], Path]) -> None:
    """Claim: a table of embeddings that the output layer has packed is given up for a lookup in it, bit for bit.

    Conclusive: the table is gone, and the call has the bits of a model that keeps it.
    """
    models = [load("llama", folder_of, dtype) for _ in range(2)]
    for model in models:
        pack_linears(model, kind, GROUP)
        table = model.lm_head.read().dense().to(dtype)
        model.model.embed_tokens.weight = torch.nn.Parameter(table, requires_grad=False)
    used = {token for chunks in batches() for chunk in chunks for token in chunk.token_ids}
    spare = next(token for token in range(VOCABULARY_SIZE) if token not in used)
    models[1].model.embed_tokens.weight[spare] += 1  # no longer the output layer's
    tied, kept = (Rig(model, dtype) for model in models)
    assert isinstance(tied.base.get_submodule("embed_tokens"), PackedEmbedding)
    assert not isinstance(kept.base.get_submodule("embed_tokens"), PackedEmbedding)
    for chunks in batches():
        assert same(tied.step(*chunks).logits, kept.step(*chunks).logits)
        assert same(tied.step(*chunks).logits, tied.by_modules(*chunks)[0])
