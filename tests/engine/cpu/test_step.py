"""A step of the Llama family as one native call has the bits of the kernels called one by one, and so the answers of
`transformers`.

The calls one by one are those of the unaltered control flow of `transformers` over modules that each call one kernel
(`products`), so an operation left out, in another order or rounded at another place shows in a bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_int32
from pathlib import Path
from threading import Barrier, Thread
from typing import Any, cast

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn

from specdec.engine import attention
from specdec.engine.attention import measure_shape
from specdec.engine.cpu.backend import CpuBackend, KernelAttention
from specdec.engine.cpu.kernels import Kernels, LayerCache, Rows, ScoreRule, kernels
from specdec.engine.cpu.llama import LlamaModel, LlamaStep, SumOverRanks, llama_model
from specdec.engine.cpu.llama_parts import PackedEmbedding
from specdec.engine.cpu.plan import plan_step
from specdec.engine.interface import Chunk, RaggedBatch, StepAbandoned, tree_paths
from specdec.engine.parallel.modules import RankSum, add_in_rank_order
from specdec.engine.transformers_model import output_layer
from tests.support.engine_models import ARCHITECTURES, make_tiny_model, model_class, random_tokens
from tests.support.reference import Reference

FAMILY = ("llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3", "phi3", "granite", "smollm3")
DTYPES = ("float32", "bfloat16", "float16")
LOGIT_TOLERANCE = 2e-4  # as in test_transformers_equality
BLOCK_COUNT, BLOCK_SIZE = 40, 16
VOCABULARY_SIZE, POSITIONS_MAX = 288, 512  # of the tiny models

pytestmark = pytest.mark.skipif(kernels() is None, reason="native kernels are off")
FolderOf = Callable[[str], Path]


def load(architecture: str, folder_of: FolderOf, dtype: torch.dtype = torch.float32) -> transformers.PreTrainedModel:
    """A tiny model in the hands of `transformers`, but for its attention."""
    kind = model_class(architecture)
    model: transformers.PreTrainedModel = kind.from_pretrained(
        folder_of(architecture), dtype=dtype, attn_implementation=attention.NAME
    )
    return model.eval().requires_grad_(False)


class ThreadExchange:
    """An exchange between ranks that are threads of one process."""

    is_captured = False

    def __init__(self, rank: int, rank_count: int, slots: list[Tensor | None], meeting: Barrier) -> None:
        self.rank, self.rank_count, self.name = rank, rank_count, "threads"
        self._slots, self._meeting = slots, meeting

    def begin(self) -> None:
        pass

    def gather(self, part: Tensor) -> list[Tensor]:
        self._slots[self.rank] = part.clone()
        self._meeting.wait()
        parts = [each for each in self._slots if each is not None]
        self._meeting.wait()
        return parts

    def set_patience(self, patience_s: float) -> None:
        pass


class Rig:
    """A model, its call, and caches of its own for each of the two."""

    def __init__(
        self,
        model: transformers.PreTrainedModel,
        dtype: torch.dtype,
        sum_over_ranks: SumOverRanks | None = None,
        exchange: ThreadExchange | None = None,
    ):
        """`exchange`: of the modules' sums over ranks; `sum_over_ranks`: of those of the call."""
        found = kernels()
        assert found is not None
        self.kernels: Kernels = found
        backend = CpuBackend(dtype, POSITIONS_MAX)
        self.base: nn.Module = model.base_model
        self.output = output_layer(model, torch.arange(VOCABULARY_SIZE), backend)
        backend.replace_modules(self.base)
        if exchange is not None:
            for layer in model.base_model.layers:
                layer.self_attn.o_proj = RankSum(layer.self_attn.o_proj, exchange)
                layer.mlp.down_proj = RankSum(layer.mlp.down_proj, exchange)
        self.shape = measure_shape(self.base)
        self.rules = {rule: ScoreRule(rule.scaling, rule.softcap or 0, rule.window or 0) for rule in self.shape.rules}
        self.dtype = dtype
        sizes = self.shape, dtype, POSITIONS_MAX, VOCABULARY_SIZE
        self.found = llama_model(self.kernels, self.base, self.output, *sizes, sum_over_ranks)
        self.caches, self.module_caches = self.new_caches(), self.new_caches()
        if self.found:
            self.found.attach(self.caches)

    @property
    def call(self) -> LlamaModel:
        assert self.found is not None
        return self.found

    @classmethod
    def load(cls, folder: Path, architecture: str, dtype: str) -> Rig:
        number = getattr(torch, dtype)
        return cls(load(architecture, lambda _: folder, number), number)

    def new_caches(self) -> list[LayerCache]:
        """Zeros."""
        heads, size = self.shape.kv_head_count, self.shape.head_size
        sizes = (BLOCK_COUNT, heads, size, BLOCK_SIZE), (BLOCK_COUNT, heads, BLOCK_SIZE, size)
        pairs = [[torch.zeros(one, dtype=self.dtype) for one in sizes] for _ in range(self.shape.layer_count)]
        return [LayerCache(*pair) for pair in pairs]

    def reset(self) -> Rig:
        """Zeroes all caches."""
        for cache in (*self.caches, *self.module_caches):
            cache.keys.zero_()
            cache.values.zero_()
        return self

    def rows(self, *chunks: Chunk) -> tuple[Rows, Tensor, Tensor]:
        """The rows of a step, their ids, and those with logits."""
        plan = plan_step(RaggedBatch(chunks), BLOCK_SIZE)
        rows = self.kernels.rows(block_count=BLOCK_COUNT, block_size=BLOCK_SIZE, **plan.rows._asdict())
        return rows, plan.input_ids, plan.logit_rows

    def step(self, *chunks: Chunk, is_abandoned: c_int32 | None = None) -> LlamaStep:
        """One call."""
        return self.call.step(*self.rows(*chunks), is_abandoned=is_abandoned, keeps_hidden=True)

    @torch.inference_mode()
    def by_modules(self, *chunks: Chunk) -> tuple[Tensor, Tensor]:
        """Logits and hidden states of the same rows by the modules, in caches of their own."""
        rows, ids, logit_rows = self.rows(*chunks)
        plan = KernelAttention(self.kernels, self.module_caches, self.rules, rows, None)
        positions = torch.from_numpy(rows.position.astype(numpy.int64))[None]
        hidden = self.base(input_ids=ids, position_ids=positions, use_cache=False, plan=plan).last_hidden_state[0]
        return self.output(hidden[logit_rows]), hidden[logit_rows]


def same(left: Tensor, right: Tensor) -> bool:
    """Whether two tensors have the same bits."""
    return left.shape == right.shape and torch.equal(
        left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8)
    )


def chain(blocks: Sequence[int], start: int, ids: Sequence[int], logit_count: int | None = None) -> Chunk:
    return Chunk(blocks, start, ids, len(ids) if logit_count is None else logit_count)


def tree(blocks: Sequence[int], start: int, ids: Sequence[int], parents: Sequence[int]) -> Chunk:
    """Nodes below the cached positions [0, start), in cells from `start` on; parent -1: none."""
    return Chunk(blocks, start, ids, len(ids), tree_paths([parent + 1 for parent in parents], start))


@pytest.fixture(scope="module")
def rig_of(folder_of: FolderOf) -> Callable[..., Rig]:
    """A rig by (architecture, dtype), loaded once; its caches are zero."""
    made: dict[tuple[str, str], Rig] = {}

    def find(architecture: str, dtype: str = "float32") -> Rig:
        key = architecture, dtype
        if key not in made:
            made[key] = Rig.load(folder_of(architecture), architecture, dtype)
        return made[key].reset()

    return find


LEFT, RIGHT, LONG = tuple(range(1, 9)), (12, 10, 11), tuple(range(20, 36))
PROMPT, OTHER = random_tokens(53, 1), random_tokens(21, 2)
PARENTS = (-1, -1, 0, 0, 1, 2, 5)


def batches() -> Iterable[tuple[Chunk, ...]]:
    """Steps that each see what the ones before wrote: prompts, a mixed step, a tree beside a chain, a long step."""
    yield (chain(LEFT, 0, PROMPT), chain(RIGHT, 0, OTHER[:9], 0))
    yield (chain(LEFT, 53, [7]), chain(RIGHT, 9, OTHER[9:], 3))
    yield (chain(RIGHT, 21, [5, 6]), tree(LEFT, 54, random_tokens(7, 3), PARENTS))
    yield (chain(LONG, 0, random_tokens(130, 4), 130),)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", FAMILY)
def test_the_call_has_the_bits_of_the_kernels_one_by_one(
    architecture: str, dtype: str, rig_of: Callable[..., Rig]
) -> None:
    """Claim: logits, hidden states and caches of prompts, mixed steps, trees and long steps have the same bits as
    `transformers`' own control flow over one kernel a module.

    Source: "the order and the roundings of `transformers`". Conclusive: every bit is compared, in every architecture
    and type, on 213 rows, and any operation that is left out, moved or rounded elsewhere changes most of them.
    """
    rig = rig_of(architecture, dtype)
    for chunks in batches():
        ours = rig.step(*chunks)
        logits, hidden = rig.by_modules(*chunks)
        assert ours.hidden is not None and same(ours.hidden, hidden)
        assert same(ours.logits, logits)
        assert ours.is_finite.all()
    for mine, theirs in zip(rig.caches, rig.module_caches):
        assert same(mine.keys, theirs.keys) and same(mine.values, theirs.values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", FAMILY)
def test_the_call_is_near_transformers(
    architecture: str, dtype: str, folder_of: FolderOf, rig_of: Callable[..., Rig]
) -> None:
    """Claim: logits at every position of a text are those of `transformers` itself, but for the order of sums.

    Source: tests/engine/test_transformers_equality.py, whose tolerances these are. Conclusive: in 16 bits the error
    against float32 has the size of that of `transformers`, so no rounding is missing or added.
    """
    folder, ids = folder_of(architecture), random_tokens(150, 4)
    ours = rig_of(architecture, dtype).step(chain(LONG, 0, ids)).logits
    truth = Reference(folder, architecture).logits(ids)
    if dtype == "float32":
        assert (ours - truth).abs().max() < LOGIT_TOLERANCE
        return
    theirs = (Reference(folder, architecture, dtype=getattr(torch, dtype)).logits(ids) - truth).abs()
    error = (ours - truth).abs()
    assert 0.5 * theirs.mean() < error.mean() < 1.2 * theirs.mean()
    assert error.max() < 2 * theirs.max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma2"])
def test_a_row_has_the_same_bits_in_every_step(architecture: str, dtype: str, rig_of: Callable[..., Rig]) -> None:
    """Claim: a row's bits do not depend on its neighbours, its chunk, the shape of its tree or the number of threads.

    Source: docs/exactness.md. Conclusive: one text row by row, in chunks of several sizes (up to 130, where the norms
    are shared), beside other sequences, as a path of a tree, each with one to four threads: equal bits of every logit.
    """
    rig = rig_of(architecture, dtype)
    ids = random_tokens(130, 5)
    alone = torch.cat([rig.step(chain(LONG, at, ids[at : at + 1])).logits for at in range(130)])
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        for size in (130, 64, 3) if threads < 3 else (130,):
            rig.reset()
            rig.step(chain(RIGHT, 0, OTHER))
            parts = [
                rig.step(chain(RIGHT, 21, [3]), chain(LONG, at, ids[at : at + size])).logits[1:]
                for at in range(0, 130, size)
            ]
            assert same(torch.cat(parts), alone)
        rig.reset().step(chain(LONG, 0, ids[:120]))
        nodes = [9, ids[120], 8, ids[121], 7, ids[122]]  # the text is the path 1, 3, 5
        assert same(rig.step(tree(LONG, 120, nodes, (-1, -1, 0, 1, 1, 3))).logits[[1, 3, 5]], alone[120:123])


def test_an_abandoned_step_writes_no_later_layer(rig_of: Callable[..., Rig], folder_of: FolderOf) -> None:
    """Claim: the flag is read in each layer before its keys are written; what is not written stays as it was.

    Source: `RaggedBatch.should_abandon`. Conclusive: the flag is set by the exchange within layer 1 of 3, at a known
    point, so layers 0 and 1 have new keys and layer 2 has none; a flag set before the call leaves all layers alone.
    """
    flag = c_int32(0)
    calls: list[int] = []

    def one_rank(part: Tensor) -> Tensor:
        calls.append(len(part))
        if len(calls) == 3:  # the first of two in layer 1
            flag.value = 1
        return part

    rig = Rig(load("llama", folder_of), torch.float32, one_rank)
    calls.clear()  # those of the probe at loading
    flag.value = 0
    with pytest.raises(StepAbandoned):
        rig.step(chain(RIGHT, 0, OTHER), is_abandoned=flag)
    assert [bool(cache.keys.any()) for cache in rig.caches] == [True, True, False]
    assert [bool(cache.values.any()) for cache in rig.caches] == [True, True, False]
    plain = rig_of("llama")
    with pytest.raises(StepAbandoned):
        plain.step(chain(RIGHT, 0, OTHER), is_abandoned=c_int32(1))
    assert not any(cache.keys.any() or cache.values.any() for cache in plain.caches)
    flag.value = 0
    calls.clear()
    calls.extend([0] * 9)  # past the one that sets the flag
    assert same(rig.step(chain(RIGHT, 0, OTHER), is_abandoned=flag).logits, plain.step(chain(RIGHT, 0, OTHER)).logits)


@pytest.mark.parametrize("dtype", DTYPES)
def test_not_a_number_in_one_cache_fails_its_rows_alone(dtype: str, rig_of: Callable[..., Rig]) -> None:
    """Claim: rows that see a not-a-number, or infinity, in their cache have their flags at 0; all others keep flags and
    bits.

    Source: the finite flags of `StepOutput`. Conclusive: one value of the first sequence's last layer is planted, in
    turn in keys and values; its later rows fail with and without logits, its neighbour has the bits of a step alone.
    """
    rig = rig_of("llama", dtype)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for bad in (torch.nan, torch.inf):
            for part in ("keys", "values"):
                rig.reset().step(chain(LEFT, 0, PROMPT), chain(RIGHT, 0, OTHER))
                expected = rig.step(chain(RIGHT, 21, [5, 6])).logits
                getattr(rig.caches[-1], part)[LEFT[0], 0, 3, 3] = bad
                step = rig.step(chain(LEFT, 53, [7, 8], 1), chain(RIGHT, 21, [5, 6]))
                assert step.is_finite.tolist() == [False, False, True, True], (bad, part)
                assert same(step.logits[1:], expected)


def test_infinite_logits_fail_their_row(rig_of: Callable[..., Rig], folder_of: FolderOf) -> None:
    """Claim: a row whose hidden state is finite and whose logits are not has its flag at 0 if its logits are asked.

    Source: the finite flags of `StepOutput`. Conclusive: one output weight is infinite; the same row without logits
    has its flag at 1.
    """
    model = load("llama", folder_of)
    model.get_output_embeddings().weight.data[17, 3] = torch.inf
    rig = Rig(model, torch.float32)
    assert rig.step(chain(RIGHT, 0, OTHER[:4], 2)).is_finite.tolist() == [True, True, False, False]


def test_rows_with_logits_are_any_rows(rig_of: Callable[..., Rig]) -> None:
    """Claim: logits and hidden states come in the order of the rows asked for, repeated ones too; none is possible.

    Source: `sd_step_arguments`. Conclusive: rows 3, 0, 3 of a step beside all rows of the same step.
    """
    rig = rig_of("qwen2", "bfloat16")
    every = rig.step(chain(RIGHT, 0, OTHER))
    rows, ids, _ = rig.rows(chain(RIGHT, 0, OTHER))
    some = rig.call.step(rows, ids, torch.tensor([3, 0, 3]), keeps_hidden=True)
    assert every.hidden is not None and some.hidden is not None
    assert same(some.logits, every.logits[[3, 0, 3]]) and same(some.hidden, every.hidden[[3, 0, 3]])
    none = rig.call.step(rows, ids, torch.tensor([], dtype=torch.int64))
    assert none.logits.shape == (0, VOCABULARY_SIZE) and none.hidden is None and none.is_finite.all()


def test_ids_and_positions_out_of_range_are_refused(rig_of: Callable[..., Rig]) -> None:
    """Claim: an id or position that the model does not have, and a row of logits that the step does not have, raise.

    Source: "memory safety". Conclusive: each value is the first beyond its range, and the message names it.
    """
    rig = rig_of("llama")
    rows, ids, logit_rows = rig.rows(chain(RIGHT, 0, [1, 2]))
    with pytest.raises(ValueError, match="ids .*288"):
        rig.call.step(rows, torch.tensor([1, VOCABULARY_SIZE]), logit_rows)
    with pytest.raises(ValueError, match="logit_rows .*2"):
        rig.call.step(rows, ids, torch.tensor([2]))
    beyond = rig.rows(chain(tuple(range(1, 34)), 512, [1]))
    with pytest.raises(ValueError, match="position .*512"):
        rig.call.step(*beyond)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_a_tied_table_is_in_memory_once(architecture: str, dtype: str, tmp_path: Path) -> None:
    """Claim: embeddings tied to the output layer are read from its packed weight, by modules and call, bit for bit.

    Source: the memory of a small chat model, a fifth of which is that table. Conclusive: the table is gone from the
    model, and the logits are those of `transformers` within the tolerance of its type.
    """
    folder = make_tiny_model(tmp_path, architecture, tie_word_embeddings=True)
    rig = Rig.load(folder, architecture, dtype)
    assert isinstance(rig.base.get_submodule("embed_tokens"), PackedEmbedding)
    for chunks in batches():
        assert same(rig.step(*chunks).logits, rig.by_modules(*chunks)[0])
    if dtype == "float32":
        ids = random_tokens(60, 4)
        ours = rig.reset().step(chain(LONG, 0, ids)).logits
        assert (ours - Reference(folder, architecture).logits(ids)).abs().max() < 10 * LOGIT_TOLERANCE


@pytest.mark.parametrize("architecture", sorted(set(ARCHITECTURES) - set(FAMILY)))
def test_other_architectures_have_no_call(architecture: str, folder_of: FolderOf) -> None:
    """Claim: an architecture that does not fit has no call; its modules serve.

    Source: "never a wrong result". Conclusive: every supported class is either here or in FAMILY.
    """
    assert Rig.load(folder_of(architecture), architecture, "float32").found is None


def test_modules_with_an_unknown_operation_have_no_call(folder_of: FolderOf, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: modules of known names that compute anything else, or have a further part, have no call.

    Source: a later release of `transformers` may change a forward. Conclusive: one layer of three scales its result by
    1.001, which no part shows and every other check passes; the same model without that has a call.
    """
    model = load("llama", folder_of)
    last = model.base_model.layers[2]
    its_forward = type(last).forward

    def forward(self: nn.Module, *args: object, **named: object) -> Tensor:
        found: Tensor = its_forward(self, *args, **named)
        return found * 1.001 if self is last else found

    with monkeypatch.context() as patch:
        patch.setattr(type(last), "forward", forward)
        assert Rig(model, torch.float32).found is None
    model = load("llama", folder_of)
    model.base_model.layers[1].mlp.further = nn.Linear(64, 64)
    assert Rig(model, torch.float32).found is None
    assert Rig(load("llama", folder_of), torch.float32).found is not None


def share_of(model: Any, rank: int) -> transformers.PreTrainedModel:
    """One of two ranks' shares of a model: half of the heads, and of the MLP."""
    config = copy.deepcopy(model.config)
    head_size = model.base_model.layers[0].self_attn.head_dim
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        setattr(config, name, getattr(config, name) // 2)
    config.head_dim = head_size
    share: Any = type(model)(config).eval().requires_grad_(False)
    own = share.state_dict()
    for name, weight in model.state_dict().items():
        for dim in range(weight.dim()):
            if weight.shape[dim] != own[name].shape[dim]:
                weight = weight.chunk(2, dim)[rank]
        own[name].copy_(weight)
    share.set_attn_implementation(attention.NAME)
    return cast(transformers.PreTrainedModel, share)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_give_the_answer_of_one(architecture: str, dtype: str, tmp_path: Path) -> None:
    """Claim: a model split over two ranks, which exchange float32 partial sums twice a layer, has the logits of the
    whole within its type's tolerance, the same bits on both ranks, and those of modules that exchange the same sums.

    Source: partial sums are added in float32, rank by rank, and rounded once. Conclusive: both ranks run at the same
    time, each in a thread; the whole has biases on all products where the architecture allows, which must count once.
    """
    biases = {"llama": {"attention_bias": True, "mlp_bias": True}, "qwen3": {"attention_bias": True}}
    folder = make_tiny_model(tmp_path, architecture, **biases.get(architecture, {}))
    number = getattr(torch, dtype)
    whole = load(architecture, lambda _: folder, number)
    shares = [share_of(whole, rank).to(number) for rank in range(2)]
    slots, meeting = [None, None], Barrier(2, timeout=60)
    logits: dict[int, list[Tensor]] = {}

    def run(rank: int) -> None:
        exchange = ThreadExchange(rank, 2, slots, meeting)
        rig = Rig(shares[rank], number, lambda part: add_in_rank_order(exchange.gather(part)), exchange)
        logits[rank] = []
        for chunks in batches():
            step = rig.step(*chunks)
            assert same(step.logits, rig.by_modules(*chunks)[0])
            logits[rank].append(step.logits)

    threads = [Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = Rig(whole, number)
    tolerance = LOGIT_TOLERANCE if dtype == "float32" else 0.5
    for chunks, left, right in zip(batches(), logits[0], logits[1], strict=True):
        expected = alone.step(*chunks).logits
        assert same(left, right)
        assert (left - expected).abs().max() < tolerance


def test_a_failed_exchange_raises_its_error(folder_of: FolderOf) -> None:
    """Claim: an exchange that raises ends the step, and `step` raises its error; the next step runs.

    Source: a rank that is lost raises in its neighbours' exchange. Conclusive: the error raised is the very object.
    """
    lost = ConnectionError("rank 1 is lost")
    failing = [False]

    def exchange(part: Tensor) -> Tensor:
        if failing[0]:
            raise lost
        return part

    rig = Rig(load("llama", folder_of), torch.float32, exchange)
    expected = rig.step(chain(RIGHT, 0, OTHER)).logits
    failing[0] = True
    with pytest.raises(ConnectionError) as caught:
        rig.step(chain(RIGHT, 0, OTHER))
    assert caught.value is lost
    failing[0] = False
    assert same(rig.step(chain(RIGHT, 0, OTHER)).logits, expected)
