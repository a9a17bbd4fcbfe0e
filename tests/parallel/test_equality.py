"""A model over several ranks gives the logits of one rank: real processes, every supported architecture."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specdec.engine.interface import Chunk, RaggedBatch
from specdec.engine.parallel.exchange import SLOT_BYTES, SharedExchange
from specdec.engine.parallel.modules import add_in_rank_order
from specdec.engine.parallel.share import LeaderModel
from tests.support.compressed_folders import pack_folder
from tests.support.engine_models import SEVERAL_ARCHITECTURES, Driver, random_tokens
from tests.support.harness import TARGET_MODEL, heldout_prompts
from tests.support.ranks import Followers

LENGTH = 100
OUTPUT_COUNT = 30
TOLERANCE = 1e-4  # of logits whose size is about ten: sums are added in another order, nothing else differs
PROMPT_COUNT, PROMPT_TOKENS, TEXT_TOKENS = 8, 64, 32


def logits_and_text(driver: Driver) -> tuple[torch.Tensor, list[int]]:
    """Logits at every position of a text, and greedy text after its beginning."""
    token_ids = random_tokens(LENGTH, 3)
    table = driver.open(LENGTH)
    logits = torch.cat([driver.feed(table, token_ids[start : start + 33]) for start in range(0, LENGTH, 33)])
    driver.cache.release(table)
    return logits, driver.greedy(token_ids[:20], OUTPUT_COUNT)


def check_equal(folder: Path, followers: Followers, rank_count: int) -> None:
    """Compares with one rank."""
    expected, expected_text = logits_and_text(Driver.load(folder))
    logits, text = logits_and_text(Driver(followers.lead(folder, rank_count)))
    difference = (logits - expected).abs().max().item()
    assert difference <= TOLERANCE * expected.abs().max().item(), f"logits differ by {difference}"
    assert text == expected_text


@pytest.mark.parametrize("architecture", SEVERAL_ARCHITECTURES)
def test_every_architecture_served_runs_over_ranks(
    architecture: str, followers: Followers, tiny_folder: Callable[..., Path]
) -> None:
    """Claim: every supported architecture gives the logits of one rank at every position.

    Conclusive: a weight cut at the wrong index, a bias added twice or a head beside the wrong key changes logits by
    their own size; a sum in another order by a millionth of it.
    """
    check_equal(tiny_folder(architecture), followers, 2)


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param("llama", marks=pytest.mark.more),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("phi3", "qwen3", "gemma3", "olmo2", "gpt2")),
    ],
)
def test_heads_fewer_than_ranks_are_held_by_several(
    architecture: str, followers: Followers, tiny_folder: Callable[..., Path]
) -> None:
    """Claim: with 2 key heads and 4 ranks each key head is on two ranks, and logits are one rank's.

    Conclusive: with the wrong copy a rank's queries meet keys of other heads. GPT-2, of 4 heads, is cut four ways.
    """
    check_equal(tiny_folder(architecture), followers, 4)


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_tied_embeddings_are_cut_once(
    architecture: str, followers: Followers, tiny_folder: Callable[..., Path]
) -> None:
    """Claim: where the output layer is the embedding, one cut serves both, the odd end of the vocabulary included.

    Conclusive: 301 ids over 2 ranks leave one row of padding, which must never be seen.
    """
    check_equal(tiny_folder(architecture, tie_word_embeddings=True), followers, 2)


@pytest.mark.parametrize("layout", ["w4-groups-zeros", "fp8-blocks"])
def test_packed_weights_are_cut_as_dense_ones(
    layout: str, followers: Followers, tiny_folder: Callable[..., Path], tmp_path: Path
) -> None:
    """Claim: a folder of packed weights over 2 ranks gives the logits of one rank; each multiplies its part packed,
    where one rank does.

    Conclusive: a rank that cut packed words, scales or blocks instead of the weight would have other numbers. Values
    of 4 and 8 bits with their scales take less than half the bytes of float32.
    """
    pack_folder(tiny_folder("llama", intermediate_size=160), tmp_path / "packed", layout)
    check_equal(tmp_path / "packed", followers, 2)
    shares = followers.lead(tmp_path / "packed", 2), followers.lead(tiny_folder("llama", intermediate_size=160), 2)
    packed, dense = (share.share.product_bytes for share in shares)
    assert packed < dense / 2


@pytest.mark.more
@pytest.mark.parametrize("rank_count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_shipped_target_gives_the_same_text(rank_count: int, followers: Followers) -> None:
    """Claim: in float32 the greedy tokens on the test prompts are those of one rank.

    Conclusive: held-out prompts of the shipped pair, not selected; one wrong token changes all that follow.
    """
    tokenizer = Tokenizer.from_file(str(TARGET_MODEL / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids[:PROMPT_TOKENS] for prompt in list(heldout_prompts().values())]
    alone = Driver.load(TARGET_MODEL)
    led = Driver(followers.lead(TARGET_MODEL, rank_count))
    for prompt in prompts[:PROMPT_COUNT]:
        assert led.greedy(prompt, TEXT_TOKENS) == alone.greedy(prompt, TEXT_TOKENS)


def test_the_description_states_the_number_of_ranks(followers: Followers, tiny_folder: Callable[..., Path]) -> None:
    """Claim: the numerics profile names the degree, and the cache counts what all ranks of the machine hold."""
    folder = tiny_folder("llama")
    alone, led = Driver.load(folder).model, followers.lead(folder, 2)
    assert (alone.description.tensor_parallel_size, led.description.tensor_parallel_size) == (1, 2)
    assert led.cache_bytes_per_position == alone.cache_bytes_per_position
    assert led.description.model_digest == alone.description.model_digest


def test_ranks_make_tables_for_the_served_positions(followers: Followers, tiny_folder: Callable[..., Path]) -> None:
    """Claim: ranks have tables of as many positions as are served, and the logits there do not change by a bit.

    Source: `ModelSource.positions_max`, which every rank is told. Conclusive: rank 0's table is looked at, and the last
    served position is computed by all ranks.
    """
    folder = tiny_folder("llama")
    tokens = random_tokens(100, seed=5)
    every = []
    for positions_max in (None, 100):
        led = followers.lead(folder, 2, positions_max=positions_max)
        driver = Driver(led)
        every.append(driver.feed(driver.open(100), tokens))
        tables = led.share._base.rotary_emb.tables[None]
        assert {len(table) for table in tables} == {led.description.positions_max} == {positions_max or 512}
    assert torch.equal(*every)


def test_other_machines_exchange_over_gloo(
    followers: Followers, tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: where memory is not shared the ranks meet over torch.distributed, with the same bits.

    Conclusive: rank 0 says that it has no memory to share, which is all it can say of another machine; both ways add
    the same parts in the same order, so equality is exact.
    """
    folder = tiny_folder("llama")
    shared = followers.lead(folder, 2)
    assert shared.exchange.name == SharedExchange.name
    expected, text = logits_and_text(Driver(shared))
    monkeypatch.setattr("specdec.engine.parallel.group.is_supported", lambda: False)
    led = followers.lead(folder, 2)
    assert led.exchange.name == "gloo"
    found, its_text = logits_and_text(Driver(led))
    assert torch.equal(found, expected) and its_text == text


def test_parts_larger_than_a_slot_travel_in_pieces(followers: Followers, tiny_folder: Callable[..., Path]) -> None:
    """Claim: a step whose partial sums do not fit into one slot of shared memory gives the same bits.

    Conclusive: a prompt of 400 rows against one of 40: the wide step's logits alone are larger than a slot.
    """
    folder = tiny_folder("llama", vocabulary_size=6000)
    led: LeaderModel = followers.lead(folder, 2)
    driver = Driver(led, 64, 16)
    token_ids = random_tokens(400, 4)
    assert 400 * 3000 * 4 > SLOT_BYTES
    tables = [driver.open(400), driver.open(400)]
    together = driver.feed(tables[0], token_ids)
    apart = torch.cat([driver.feed(tables[1], token_ids[start : start + 40]) for start in range(0, 400, 40)])
    assert torch.equal(together, apart)


def test_a_bad_batch_costs_that_batch_only(followers: Followers, tiny_folder: Callable[..., Path]) -> None:
    """Claim: a batch that cannot be run is refused on rank 0 before it is sent to the others; the ranks stay in step.

    Conclusive: each kind of fault once, then a good step, which hangs or differs where ranks are out of step.
    """
    led = followers.lead(tiny_folder("llama"), 2)
    driver = Driver(led, 8, 16)
    table = driver.open(32)
    expected = driver.feed(table, [1, 2, 3])
    good = table.block_ids
    for chunk in (
        Chunk([99], 0, [1], 1),
        Chunk(good, 0, [100000], 1),
        Chunk(good, 0, [-1], 1),
        Chunk(good[:1], 15, [1, 2], 1),
        Chunk(good, 0, [1], 2),
        Chunk(good, 0, [1, 2], 1, [[1 << 10]]),
        Chunk(good, 0, [1, 2], 1, [[-1, 1]]),
    ):
        with pytest.raises(ValueError):
            led.forward(RaggedBatch((chunk,)))
    driver.cache.truncate(table, 0)
    assert torch.equal(driver.feed(table, [1, 2, 3]), expected)


def test_two_narrow_parts_are_rounded_once() -> None:
    """Claim: adding two parts in their own type is adding them in float32 and rounding once.

    Conclusive: a million random pairs of very different sizes, in both narrow types, compared bit by bit.
    """
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16):
        left, right = (torch.randn(1 << 20, generator=generator).to(dtype) for _ in range(2))
        left = left * torch.logspace(-3, 3, 1 << 20).to(dtype)
        assert torch.equal(torch.add(left, right), add_in_rank_order([left, right]).to(dtype))
