"""An encoder-decoder model gives the answers of `transformers` itself, with kernels and without.

As in `test_transformers_equality.py`: in float32 logits at every position, to a tolerance that only another order of
additions can need, and greedy tokens exactly; in bfloat16 the errors against float32 are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from specdec.engine.loading.model import load_model
from tests.engine.test_model_folder import edit_json
from tests.support.encoder_decoder_models import KINDS, START, PairReference, make_encoder_decoder
from tests.support.engine_bench import Bench
from tests.support.engine_models import Driver, random_tokens
from tests.support.reference import Reference

TOLERANCE = 2e-4  # logits have standard deviation 2.5 to 4; sums in another order differ by 1e-5
INPUT_LENGTHS = (1, 5, 16, 17, 63, 64, 65, 100)  # around block borders (16), beyond the greatest distance (40)
OUTPUT_LENGTH = 90
TEXT_COUNT, TOKEN_COUNT = 25, 32  # of each kind: 100 texts in all


@pytest.mark.parametrize("with_kernels", [True, False], ids=["kernels", "plain"])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers_at_every_position(
    kind: str, with_kernels: bool, folder_of: Callable[[str], Path], driver_of: Callable[..., Driver]
) -> None:
    """Claim: behind inputs of any length the logits of every token of an output agree with those of `transformers`.

    Conclusive: in these models an early token of the input, an early one of the output, and the bias of distances each
    move the last row's logits by more than a hundred times the tolerance.
    """
    driver, reference = driver_of(kind, "float32", with_kernels), PairReference(folder_of(kind))
    output = [START, *random_tokens(OUTPUT_LENGTH - 1, 1)]
    for length in INPUT_LENGTHS if with_kernels else INPUT_LENGTHS[1::3]:
        own_input = random_tokens(length, length)
        table = driver.open(length + len(output), own_input)
        found = driver.feed(table, own_input + output, len(output))
        driver.cache.release(table)
        assert (found - reference.logits(own_input, output)).abs().max() < TOLERANCE, length
    last = reference.logits(own_input, output)[-1]
    for changed_input, changed in (
        ([own_input[0] % 287 + 1, *own_input[1:]], output),
        (own_input, [START, output[1] % 287 + 1, *output[2:]]),
    ):
        assert (reference.logits(changed_input, changed)[-1] - last).abs().max() > 100 * TOLERANCE
    for stack in (reference.model.encoder, reference.model.decoder):
        stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight.data.zero_()
        assert (reference.logits(own_input, output)[-1] - last).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_texts_in_ragged_batches_with_rollbacks_equal_transformers(
    kind: str, folder_of: Callable[[str], Path], driver_of: Callable[..., Driver]
) -> None:
    """Claim: greedy texts are `generate`'s, token by token, when all run in one batch, join it at different steps, and
    each step mixes encoders, decodes and verifications of 0 to 5 draft tokens of which the last is always wrong.

    Conclusive: 25 texts of each of four models, at least 20 different texts and as many tokens among them.
    """
    driver, reference = driver_of(kind), PairReference(folder_of(kind))
    inputs = [random_tokens(3 + 7 * index % 60, 100 + index) for index in range(TEXT_COUNT)]
    expected = [reference.generate(own_input, TOKEN_COUNT) for own_input in inputs]
    assert len({token for text in expected for token in text}) >= 20
    assert len(set(map(tuple, expected))) >= 20
    tables = [driver.open(len(own_input) + TOKEN_COUNT + 8, own_input) for own_input in inputs]
    texts: list[list[int]] = [[] for _ in inputs]
    step = 0
    while any(len(text) < TOKEN_COUNT for text in texts):
        running = [index for index, text in enumerate(texts) if len(text) < TOKEN_COUNT and index <= 3 * step]
        feeds = []
        for index in running:
            sequence = [*inputs[index], START, *texts[index]]
            known = expected[index][len(texts[index]) :][: (step + index) % 6]
            draft = [*known[:-1], (known[-1] + 1) % 288] if known else []
            feeds.append((tables[index], sequence[tables[index].length :] + draft, len(draft) + 1))
        logits = driver.step(feeds).logits.split([count for _, _, count in feeds])
        for index, (table, new, count), rows in zip(running, feeds, logits):
            choices = rows.argmax(-1).tolist()
            draft = new[len(new) - count + 1 :]
            accepted = next((i for i, token_id in enumerate(draft) if token_id != choices[i]), len(draft))
            texts[index] += choices[: accepted + 1]
            driver.cache.truncate(table, len(inputs[index]) + len(texts[index]))
        step += 1
    assert [text[:TOKEN_COUNT] for text in texts] == expected
    for table in tables:
        driver.cache.release(table)
    driver.cache.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_near_transformers(
    kind: str, folder_of: Callable[[str], Path], driver_of: Callable[..., Driver]
) -> None:
    """Claim: in bfloat16 logits are as near to float32's as `transformers`' own of that type are.

    Conclusive: a value rounded at a wrong operation, or not rounded, would show as an error of another size than that
    of the type, which the reference measures at 90 positions behind an input of 60.
    """
    folder, own_input = folder_of(kind), random_tokens(60, 6)
    output = [START, *random_tokens(OUTPUT_LENGTH - 1, 4)]
    truth = PairReference(folder).logits(own_input, output)
    theirs = (PairReference(folder, torch.bfloat16).logits(own_input, output) - truth).abs()
    driver = driver_of(kind, "bfloat16")
    table = driver.open(len(own_input) + len(output), own_input)
    ours = (driver.feed(table, own_input + output, len(output)) - truth).abs()
    driver.cache.release(table)
    assert 0.4 * theirs.mean() < ours.mean() < 1.2 * theirs.mean()
    assert ours.max() < 2 * theirs.max()


def test_distances_beyond_the_table_have_the_bias_of_its_end(tmp_path: Path) -> None:
    """Claim: a table of distances is as long as the served positions need, or to the greatest distance, and gives the
    logits of `transformers` in both cases.

    Conclusive: greatest distances of 9, which nearly all pairs exceed, and of 5,000, which is cut at 512 positions.
    """
    own_input, output = random_tokens(120, 3), [START, *random_tokens(200, 4)]
    for distance, reach in ((9, 9), (5000, 511)):
        folder = make_encoder_decoder(tmp_path / str(distance), relative_attention_max_distance=distance)
        driver = Driver.load(folder)
        assert {rule.bias.reach for rule in driver.model.backend._shape.rules if rule.bias} == {reach}
        table = driver.open(400, own_input)
        found = driver.feed(table, own_input + output, len(output))
        assert (found - PairReference(folder).logits(own_input, output)).abs().max() < TOLERANCE


def test_a_forced_first_token_begins_an_output_as_in_transformers(tmp_path: Path) -> None:
    """Claim: the description's beginning is the start token and then the forced first one, and greedy text behind it is
    `generate`'s, whose first token is forced.

    Conclusive: the token that the model itself would choose first is another.
    """
    folder = make_encoder_decoder(tmp_path / "model")
    edit_json(folder / "generation_config.json", forced_bos_token_id=77)
    driver, reference = Driver.load(folder), PairReference(folder)
    own_input = random_tokens(20, 2)
    expected = reference.generate(own_input, 12)
    beginning = driver.model.description.beginning_token_ids
    assert beginning == (START, 77) and expected[0] == 77
    assert int(reference.logits(own_input, [START])[0].argmax()) != 77
    table, text = driver.open(60, own_input), [77]
    token_ids = [*own_input, *beginning]
    while len(text) < 12:
        text.append(int(driver.feed(table, token_ids, 1)[0].argmax()))
        token_ids = text[-1:]
    assert text == expected


def test_models_of_one_stack_are_none(driver_of: Callable[..., Driver], folder_of: Callable[[str], Path]) -> None:
    """Claim: the description tells the kinds apart, and a step refuses the chunks of the other kind.

    Conclusive: both directions, and the decoder's logits afterwards are its own.
    """
    decoder, pair = driver_of("llama"), driver_of("t5")
    assert not decoder.model.description.has_encoder and decoder.model.description.beginning_token_ids == ()
    assert pair.model.description.has_encoder and pair.model.description.encoder_positions_max == 256
    with pytest.raises(ValueError, match="encoder_length is 2; it must be 0"):
        decoder.feed(decoder.open(20, [1, 2]), [1, 2, 3], 1)
    with pytest.raises(ValueError, match="encoder_length is 0; it must be 1 or more"):
        pair.feed(pair.open(20), [1, 2, 3], 1)
    token_ids = random_tokens(30, 1)
    table = decoder.open(30)
    found = decoder.feed(table, token_ids)
    assert (found - Reference(folder_of("llama"), "llama").logits(token_ids)).abs().max() < TOLERANCE


def test_an_engine_runs_inputs_longer_than_its_steps(folder_of: Callable[[str], Path]) -> None:
    """Claim: an engine whose steps have at most 24 rows, and 16 of prompts, warms up, runs inputs of 5 to 61 tokens
    whole in one step each, in any mix with decodes, and its greedy texts are `generate`'s.

    Conclusive: six sequences at once, one of them preempted in between; the recorded chunks are the proof of wholeness.
    """
    bench = Bench(load_model(str(folder_of("t5-gated"))), chunk_size=8, rows_max=24, prompt_rows_max=16)
    reference, cache = PairReference(folder_of("t5-gated")), bench.engine.cache
    inputs = [random_tokens(length, 300 + length) for length in (61, 5, 30, 13, 24, 40)]
    bench.engine.start()
    assert bench.model.batches == [[(0, 2, 1)]], "the warm-up has an input of one token"
    try:
        tables = [cache.open(80, encoder_input=own_input) for own_input in inputs]
        texts: list[list[int]] = [[] for _ in inputs]

        def submit() -> None:
            for index, (own_input, table) in enumerate(zip(inputs, tables)):
                if len(texts[index]) == 3 and index % 2:
                    cache.free(table)
                tokens = [*own_input, START, *texts[index]]
                bench.feed(index, tokens[table.length :], table=table)

        for _ in range(8):
            for index, (_, choices) in bench.run(submit, len(inputs)).items():
                texts[index] += choices
        assert texts == [reference.generate(own_input, 8) for own_input in inputs]
        begun = [chunk for batch in bench.model.batches[1:] for chunk in batch if chunk[0] == 0]
        whole = [{len(each), len(each) + 1} for each in inputs] + [{len(each), len(each) + 4} for each in inputs[1::2]]
        assert len(begun) == len(whole) and all(any(rows in each for each in whole) for _, rows, _ in begun)
        assert (0, 62, 1) in begun, "with the output's beginning, which is a chunk at most"
    finally:
        bench.engine.stop()
    cache.check_integrity()
