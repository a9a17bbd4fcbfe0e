"""The engine gives the answers of `transformers` itself, for every supported architecture.

`architectures.py` refuses all others. Compared in float32: logits at every position, to a tolerance that only another
order of additions can need, and greedy tokens, exactly, against `generate`. In types of 16 bits two correct programs
round at different operations; there the error against float32 is compared with that of `transformers`.
Single features are in `test_transformers_features.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from specdec.engine.loading.architectures import SUPPORTED
from tests.support.engine_models import (
    ARCHITECTURES,
    SEVERAL_ARCHITECTURES,
    Driver,
    make_tiny_model,
    random_tokens,
    with_each,
)
from tests.support.reference import Reference, largest_difference

LOGIT_TOLERANCE = 2e-4  # logits have standard deviation 1.5 to 6; float32 sums in another order differ by 1e-5 to 8e-5
NEW_TOKEN_COUNT = 64
# One token; around block borders (16), beyond windows (40), around key split borders (64).
PROMPT_LENGTHS = (1, 16, 17, 64, 65, 128, 129)
ALONE_LENGTHS = (1, 128)
TEXT_LENGTH = 300
# Where all three layers have a window of 40 nothing reaches further than 117 positions; 200 is beyond one window.
EARLY_POSITIONS = {"mistral": 200, "phi3": 200, "starcoder2": 200}

ExpectedOf = Callable[[str], dict[int, list[int]]]


@pytest.fixture(scope="module")
def expected_of(folder_of: Callable[[str], Path]) -> ExpectedOf:
    """The texts of `generate` for prompts of PROMPT_LENGTHS, by architecture; computed once for both tests of texts."""

    @cache
    def find(architecture: str) -> dict[int, list[int]]:
        reference = Reference(folder_of(architecture), architecture)
        return {length: reference.generate(random_tokens(length, length), NEW_TOKEN_COUNT) for length in PROMPT_LENGTHS}

    return find


def test_every_supported_architecture_is_tested() -> None:
    """Claim: the records of `architectures.py` are exactly the classes these tests run.

    Source: "more architectures, proven like the first three". Conclusive: both sides as sets of class names.
    """
    assert {architecture.class_name for architecture in SUPPORTED} == {kind for kind, _ in ARCHITECTURES.values()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_and_greedy_text_equal_transformers(
    architecture: str, folder_of: Callable[[str], Path], driver_of: Callable[..., Driver], expected_of: ExpectedOf
) -> None:
    """Claim: logits agree at every position, and greedy text token by token, whatever the prompt's length.

    Source: style.md. Conclusive: a text has at least 20 distinct tokens in 64 and an early token changes later logits,
    so neither collapse nor a cut-off past could hide an error.
    """
    driver, reference = driver_of(architecture), Reference(folder_of(architecture), architecture)
    token_ids = random_tokens(TEXT_LENGTH, 1)
    assert largest_difference(driver, reference, token_ids) < LOGIT_TOLERANCE
    early = EARLY_POSITIONS.get(architecture, 0)
    changed = [*token_ids[:early], token_ids[early] % 287 + 1, *token_ids[early + 1 :]]
    moved = (reference.logits(changed)[-1] - reference.logits(token_ids)[-1]).abs().max().item()
    assert moved > 100 * LOGIT_TOLERANCE
    expected = expected_of(architecture)
    assert max(len(set(text)) for text in expected.values()) >= 20
    for length in ALONE_LENGTHS:
        assert driver.greedy(random_tokens(length, length), NEW_TOKEN_COUNT) == expected[length]


@pytest.mark.parametrize("architecture", SEVERAL_ARCHITECTURES)
def test_ragged_batches_with_rollbacks_equal_transformers(
    architecture: str, driver_of: Callable[..., Driver], expected_of: ExpectedOf
) -> None:
    """Claim: greedy text is `generate`'s when all prompts run in one batch and every step rolls wrong tokens back.

    Source: "in ragged batches and after rollbacks". Conclusive: prompts enter at different steps, each step mixes
    prefill, decoding and verification of 0 to 5 draft tokens of which the last is always wrong.
    """
    driver = driver_of(architecture)
    expected = list(expected_of(architecture).values())
    prompts = [random_tokens(length, length) for length in PROMPT_LENGTHS]
    tables = [driver.open(len(prompt) + NEW_TOKEN_COUNT + 8) for prompt in prompts]
    texts: list[list[int]] = [[] for _ in prompts]
    step = 0
    while any(len(text) < NEW_TOKEN_COUNT for text in texts):
        running = [index for index, text in enumerate(texts) if len(text) < NEW_TOKEN_COUNT and index <= step]
        feeds = []
        for index in running:
            sequence = prompts[index] + texts[index]
            known = expected[index][len(texts[index]) :][: (step + index) % 6]
            draft = [*known[:-1], (known[-1] + 1) % 288] if known else []
            new = sequence[tables[index].length :] + draft
            feeds.append((tables[index], new, len(draft) + 1))
        logits = driver.step(feeds).logits.split([count for _, _, count in feeds])
        for index, (table, new, count), rows in zip(running, feeds, logits):
            choices = rows.argmax(-1).tolist()
            draft = new[len(new) - count + 1 :]
            accepted = next((i for i, token_id in enumerate(draft) if token_id != choices[i]), len(draft))
            texts[index] += choices[: accepted + 1]
            driver.cache.truncate(table, len(prompts[index]) + len(texts[index]) - 1)
        step += 1
    assert [text[:NEW_TOKEN_COUNT] for text in texts] == expected
    for table in tables:
        driver.cache.release(table)
    driver.cache.check_integrity()


@pytest.mark.parametrize(("architecture", "dtype"), [*with_each(["bfloat16"], ARCHITECTURES), *with_each(["float16"])])
def test_16_bit_types_are_near_transformers(
    architecture: str, dtype: str, folder_of: Callable[[str], Path], driver_of: Callable[..., Driver]
) -> None:
    """Claim: in bfloat16 and float16 logits are as near to float32's as `transformers`' own of that type are.

    Source: "fp32, bf16, fp16 by --dtype". Conclusive: a value rounded at a wrong operation, or not rounded, would show
    as an error of another size than that of the type, which the reference measures at 150 positions; and each of 32
    greedy tokens is a best one of the reference of the same type, within the error of that type.
    """
    folder, token_ids = folder_of(architecture), random_tokens(150, 4)
    rounded = Reference(folder, architecture, dtype=getattr(torch, dtype))
    truth = Reference(folder, architecture).logits(token_ids)
    theirs = (rounded.logits(token_ids) - truth).abs()
    driver = driver_of(architecture, dtype)
    assert driver.model.description.dtype == dtype
    table = driver.open(len(token_ids))
    ours = (driver.feed(table, token_ids) - truth).abs()
    driver.cache.release(table)
    assert 0.5 * theirs.mean() < ours.mean() < 1.2 * theirs.mean()
    assert ours.max() < 2 * theirs.max()
    prompt = random_tokens(17, 17)
    text = driver.greedy(prompt, 32)
    rows = rounded.logits(prompt + text[:-1])[len(prompt) - 1 :]  # [32, vocab]
    behind = rows.max(-1).values - rows.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert behind.max() < 2 * theirs.max()


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3", "phi3", "starcoder2"])
def test_windows_and_caps_change_the_answer(architecture: str, tmp_path: Path) -> None:
    """Claim: in the models of these tests a window, and a cap on scores, change the logits.

    Source: style.md, errors hide in models that do not use a feature. Conclusive: the same weights without the window,
    and without the cap, give logits that differ by more than a thousand times the tolerance at the text's end.
    """
    token_ids = random_tokens(TEXT_LENGTH, 1)
    features = {"sliding_window": 10_000} | ({"attn_logit_softcapping": None} if architecture == "gemma2" else {})
    with_all = Reference(make_tiny_model(tmp_path / "all", architecture), architecture).logits(token_ids)
    for name, value in features.items():
        folder = make_tiny_model(tmp_path / name, architecture, **{name: value})
        without = Reference(folder, architecture).logits(token_ids)
        assert (with_all - without)[-1].abs().max() > 1000 * LOGIT_TOLERANCE
