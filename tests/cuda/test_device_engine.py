"""The device backend gives the answers of `transformers`: every architecture, in ragged and in padded steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.decoding.verification import VerificationRequest, verify
from specdec.engine.cuda.backend import DeviceBackend
from specdec.engine.cuda.graphs import RepeatedCall
from specdec.engine.interface import Chunk, RaggedBatch, StepOutput
from specdec.engine.scheduling.feed import Feed
from specdec.engine.scheduling.runner import StepRunner
from specdec.errors import NumericsError
from specdec.protocol.types import ResolvedSamplingParams, Rule
from tests.support.device_models import device_driver
from tests.support.dispatched import Dispatched
from tests.support.engine_models import SEVERAL_ARCHITECTURES, Driver, make_tiny_model, model_class, random_tokens

TOLERANCE = 2e-4  # as in tests/engine: logits have standard deviation 3, sums in another order differ by about 1e-5
PROMPT_LENGTHS = (1, 17, 70, 130)  # one token, over block borders, beyond the tiny models' windows
# Rows fed to each prompt's sequence, step by step: decodes, verifications of several widths, some sequences alone.
ROUNDS = ((1, 1, 1, 1), (3, 0, 1, 8), (0, 0, 5, 0), (2, 2, 2, 2), (0, 1, 0, 0))


def plain_logits(folder: Path, architecture: str, token_ids: list[int], width: int) -> torch.Tensor:
    """Logits at every position, from `transformers` itself."""
    kind = model_class(architecture)
    model = kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        return model(torch.tensor([token_ids])).logits[0, :, :width]


def run_rounds(driver: Driver, texts: list[list[int]]) -> list[torch.Tensor]:
    """Feeds the prompts together, then the rounds; each text's logits at every position."""
    tables = [driver.open(len(text)) for text in texts]
    found: list[list[torch.Tensor]] = [[] for _ in texts]
    for counts in (PROMPT_LENGTHS, *ROUNDS):
        fed = [index for index, count in enumerate(counts) if count]
        feeds = [(tables[i], texts[i][tables[i].length : tables[i].length + counts[i]], counts[i]) for i in fed]
        output = driver.step(feeds)
        assert all(output.is_finite) and len(output.is_finite) == len(fed)
        for index, logits in zip(fed, output.logits.split([counts[i] for i in fed])):
            found[index].append(logits.cpu())
    return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("architecture", SEVERAL_ARCHITECTURES)
def test_every_architecture_answers_as_transformers_does(architecture: str, tmp_path: Path) -> None:
    """Claim: prompts, decodes and verifications of several sequences, in steps of their own shape and in steps padded
    to a captured one, give transformers' logits at every position, to the rounding of another order of additions.

    Conclusive: any wrong slot, table, mask, window, head order or padding row moves logits by far more; later rounds
    read the cache, so a row written to a wrong slot shows there.
    """
    folder = make_tiny_model(tmp_path / architecture, architecture)
    lengths = [prompt + sum(counts[i] for counts in ROUNDS) for i, prompt in enumerate(PROMPT_LENGTHS)]
    texts = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
    for with_graphs in (False, True):
        driver = device_driver(folder, with_graphs)
        width = driver.model.description.vocabulary_size
        for text, logits in zip(texts, run_rounds(driver, texts)):
            wanted = plain_logits(folder, architecture, text, width)
            assert float((logits - wanted).abs().max()) < TOLERANCE
        backend = driver.model.backend
        assert bool(backend.graph_count) == with_graphs
        for layer in backend._storage.layers:
            assert not layer[:, 0].any(), "the zero block was written to"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.mark.parametrize("with_graphs", [False, True])
def test_rollback_copies_and_other_blocks_give_the_same_text(llama: Path, with_graphs: bool) -> None:
    """Claim: after a truncation, beside another that had to copy a shared block, and re-fed into other blocks, a
    sequence goes on as if nothing had happened. Conclusive: greedy tokens of 24 steps, exactly, against an undisturbed
    run.
    """
    driver = device_driver(llama, with_graphs)
    prompt = random_tokens(21, 3)
    wanted = driver.greedy(prompt, 24)
    assert len(set(wanted)) > 8
    table = driver.open(80)
    driver.feed(table, prompt, 1)
    driver.feed(table, random_tokens(7, 9))  # draft tokens that were not accepted
    driver.cache.truncate(table, len(prompt))
    driver.cache.cache_prefix(table, prompt, len(prompt))
    other = driver.cache.open(80)
    driver.cache.truncate(other, driver.cache.match_prefix(other, prompt) - 3)
    shared = list(other.block_ids)
    driver.feed(other, random_tokens(5, 8))  # copies the last block both share; must not reach the first
    assert other.block_ids[: len(shared)] != shared == table.block_ids[: len(shared)]
    found = [wanted[0]]
    while len(found) < len(wanted):
        found.append(int(driver.feed(table, found[-1:], 1)[0].argmax()))
    assert found == wanted
    driver.cache.release(table)
    driver.cache.release(other)
    assert driver.greedy(prompt, 24) == wanted


def test_not_a_number_is_reported_for_its_sequence_only(llama: Path) -> None:
    """Claim: not-a-number in one sequence's cache marks that sequence's flag and no other, with and without padding,
    and is gone once its positions are scrubbed. Conclusive: the neighbours' logits equal those of a clean step.
    """
    for with_graphs in (False, True):
        driver = device_driver(llama, with_graphs)
        tables = [driver.open(40) for _ in range(3)]
        for seed, table in enumerate(tables):
            driver.feed(table, random_tokens(20, seed), 1)
        feeds = [(table, random_tokens(2, 7), 2) for table in tables]
        clean = driver.step(feeds).logits.clone()
        for table in tables:
            driver.cache.truncate(table, 20)
        storage = driver.model.backend._storage
        storage.layers[1][:, tables[1].block_ids[0], 3] = torch.nan
        output = driver.step(feeds)
        assert tuple(output.is_finite) == (True, False, True)
        assert torch.equal(output.logits[[0, 1, 4, 5]], clean[[0, 1, 4, 5]])
        driver.cache.truncate(tables[1], 0)
        driver.cache.scrub(tables[1], 0, 22)
        driver.feed(tables[1], random_tokens(20, 1), 1)
        assert tuple(driver.step([(tables[1], random_tokens(2, 7), 2)]).is_finite) == (True,)


def test_repeated_requests_keep_their_own_results(llama: Path) -> None:
    """Claim: where a step fails and its requests run one by one, each is sampled from its own logits and judged by its
    own flag, though a replayed step overwrites those of the one before. Conclusive: the sampler's rows equal those of
    the requests alone, bit for bit, and not-a-number in the first request's cache fails it and no other."""
    driver = device_driver(llama, True)
    tables = [driver.open() for _ in range(3)]
    wanted = [driver.feed(table, random_tokens(1, index)) for index, table in enumerate(tables)]
    for table in tables:
        driver.cache.truncate(table, 0)
    forward = driver.model.forward

    def planted(batch: RaggedBatch) -> StepOutput:
        if len(batch.chunks) > 1:
            raise RuntimeError("planted")
        return forward(batch)

    def sample(payloads: list, counts: list[int], logits: torch.Tensor, readback: object) -> list:
        assert readback is None, "of several forwards"
        return list(logits.clone().split(counts))

    driver.model.forward = planted
    runner: StepRunner = StepRunner(driver.model, driver.cache, sample)
    for is_poisoned in (False, True):
        if is_poisoned:
            driver.model.backend._storage.layers[0][:, tables[0].block_ids[0], 0] = torch.nan
        feeds = [Feed(table, table.length, random_tokens(1, index), 1, index) for index, table in enumerate(tables)]
        outcomes = runner.run([(feed, feed.chunk()) for feed in feeds]).outcomes
        assert isinstance(outcomes[0], NumericsError) == is_poisoned
        for outcome, own in list(zip(outcomes, wanted))[is_poisoned:]:
            assert is_poisoned or torch.equal(outcome, own)
            assert bool(outcome.isfinite().all())


def test_the_step_finds_the_best_token_and_the_sampler_computes_nothing(llama: Path) -> None:
    """Claim: under GREEDY without edits and logprobs, tokens and flags of a step are what a step on its device brings:
    of a replayed step and of one of its own shape, chains and several sequences, the lowest id of equal logits. Beside
    the replay a step dispatches its copy to the device, and one back: nothing else.

    Conclusive: tokens of the sampler without the step's own; operations are counted by name; planted in the last lines,
    one more is noticed."""
    params = ResolvedSamplingParams(Rule.GREEDY, seed=0, prompt_length=1, temperature=0.0)
    for with_graphs in (False, True):
        driver = device_driver(llama, with_graphs)
        output_layer = driver.model._output
        output_layer.weight[:, 7] = output_layer.weight[:, 9]  # equal logits
        tables = [driver.open() for _ in range(3)]
        for counts in ([9, 1, 4], [1, 1, 1], [3, 0, 2], [1, 1, 1]):
            batch, requests = [], []
            for seed, (table, count) in enumerate(zip(tables, counts)):
                if count:
                    tokens = random_tokens(count, seed + count)
                    driver.cache.prepare_write(table, table.length + count)
                    batch.append(Chunk(table.block_ids, table.length, tokens, count))
                    requests.append(VerificationRequest(params, 0, [0] * (table.length + 1), tuple(tokens[1:])))
                    driver.cache.advance(table, table.length + count)
            output = driver.model.forward(RaggedBatch(tuple(batch)))
            row_counts = [request.row_count for request in requests]
            with Dispatched() as counted:
                found = verify(requests, row_counts, output.logits, output.readback)
                assert all(output.is_finite)
            assert counted.names == ([] if output.logits.device.type == "cpu" else ["_to_copy"])
            assert found == verify(requests, row_counts, output.logits)
        graphs = driver.model.backend._graphs
        assert bool(graphs) == with_graphs
        if with_graphs:
            graphs.update(dict.fromkeys(graphs, RepeatedCall(lambda: None)))
            with Dispatched() as counted:
                driver.model.forward(RaggedBatch((Chunk(tables[0].block_ids, 5, [3], 1),)))
            assert counted.names == ["copy_"], "a step is sent by one copy and replayed"
    with Dispatched() as counted:
        verify(requests, row_counts, output.logits)
    assert counted.names == ["argmax"]


def test_bad_block_tables_are_found_by_planning(llama: Path) -> None:
    """Claim: a batch whose table is too short raises when it is planned, before any other rank receives it."""
    driver = device_driver(llama, False)
    batch = RaggedBatch((Chunk([1], 15, [1, 2, 3], 1),))
    with pytest.raises((IndexError, ValueError)):
        driver.model.backend.plan(batch)


def test_margins_are_measured_and_counted(llama: Path) -> None:
    """Claim: the drift is measured at the first step, which does not change the cache; one step in sixteen is sampled,
    and its rows with a margin below the drift are counted. Conclusive: with a drift beyond any margin all sampled rows
    count, with 0 none.
    """
    driver = device_driver(llama, False)
    backend = driver.model.backend
    assert isinstance(backend, DeviceBackend) and backend.counters() == {}
    table = driver.open()
    driver.feed(table, [5], 1)
    assert backend.margins is not None and 0 <= backend.margins.drift < 1e-4  # float32 sums in other orders
    for layer in backend._storage.layers:
        used = layer[:, table.block_ids[0], :1]
        assert used.any() and int(layer[:, : driver.cache.block_count].count_nonzero()) == int(used.count_nonzero())
    for drift, share in ((0.0, 0), (1e9, 1)):
        backend.margins.drift = drift
        before = backend.counters()
        for token in random_tokens(32, 4):
            driver.feed(table, [token], 1)
        after = backend.counters()
        assert after["margin_rows"] - before["margin_rows"] == 2
        assert after["margin_rows_close"] - before["margin_rows_close"] == 2 * share
