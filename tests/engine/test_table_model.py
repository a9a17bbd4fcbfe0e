"""The table model of the protocol tests: its distribution, and that it reads its past through the cache.

Protocol tests rely on it to show every error of rollback and block ownership; here such errors are planted.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from specdec.engine.loading.model import load_model
from specdec.engine.table_model import write_table_model
from tests.support.engine_models import Driver


@pytest.fixture
def table(tmp_path: Path) -> torch.Tensor:
    logits = torch.randn(6, 6, 5, generator=torch.Generator().manual_seed(3))
    write_table_model(tmp_path, 5, positions_max=100, logits=logits, end_token_ids=(0, 3))
    return logits


def test_logits_come_from_the_last_two_tokens(table: torch.Tensor, tmp_path: Path) -> None:
    """Claim: the logits after (previous, last) are the table's, V standing before the text, in any batch.

    Source: `table_model`. Conclusive: every row of a ragged batch over block borders is compared with the table.
    """
    driver = Driver.load(tmp_path, block_size=8)
    described = driver.model.description
    assert described.model_name == "table model (protocol tests only)"
    assert (described.vocabulary_size, described.positions_max, described.end_token_ids) == (5, 100, (0, 3))
    first, second = driver.open(), driver.open()
    text = [1, 2, 3, 4, 1, 1, 2, 4, 3, 2, 1, 4]
    driver.feed(first, text[:6], 1)
    rows = driver.step([(first, text[6:], 6), (second, text[:3], 3)]).logits
    pairs = [(text[i - 1], text[i]) for i in range(6, 12)] + [(5, 1), (1, 2), (2, 3)]
    assert torch.equal(rows, torch.stack([table[pair] for pair in pairs]))


def test_an_error_in_rollback_or_blocks_changes_the_answer(table: torch.Tensor, tmp_path: Path) -> None:
    """Claim: a token left from a rejected draft, or a block that belongs to another, changes the logits.

    Source: the purpose of the table model. Conclusive: both errors are planted and compared with the right run.
    """
    driver = Driver.load(tmp_path, block_size=8)
    right, late, strange = driver.open(), driver.open(), driver.open()
    driver.feed(strange, [3, 3, 3, 3, 3, 3, 3, 3])
    for sequence in (right, late):
        driver.feed(sequence, [1, 2, 4, 4])
    driver.cache.truncate(right, 2)
    expected = driver.feed(right, [1])
    assert torch.equal(expected[0], table[2, 1])
    assert not torch.equal(driver.feed(late, [1]), expected)  # not truncated: the draft's 4 is the previous token
    late.block_ids[0] = strange.block_ids[0]
    driver.cache.truncate(late, 2)
    assert not torch.equal(driver.feed(late, [1]), expected)


def test_its_tokenizer_reads_what_it_writes(table: torch.Tensor, tmp_path: Path) -> None:
    """Claim: text and ids convert into each other, so text prompts work in protocol tests.

    Source: `write_table_model`. Conclusive: all tokens, with the end token skipped as `transformers` skips it.
    """
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.encode("<1><4> <2>").ids == [1, 4, 2]
    assert tokenizer.decode([1, 4, 0, 2]) == "<1><4><2>"
    assert tokenizer.decode([0], skip_special_tokens=False) == "<|end|>"
    assert load_model(str(tmp_path)).description.model_digest == load_model(str(tmp_path)).description.model_digest
