"""A feature head through a real target process: what it tells of itself, and the nodes that a verification gets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec.engine.eagle.folder import load_eagle, save_eagle, target_facts
from specdec.engine.loading.model_folder import open_model_folder
from specdec.launch.children import Child
from specdec.protocol.heads import HEAD_PASSES_MAX, HeadPlan
from specdec.protocol.items import Open, Verification, VerificationResult
from specdec.protocol.rejection import conclude
from tests.services.test_heads import GREEDY, PROMPTS, VOCABULARY_SIZE, Stream, describe, target
from tests.support.eagle_heads import WholeText, random_head
from tests.support.engine_models import make_tiny_model


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and its head."""
    folder = tmp_path_factory.mktemp("pair")
    (folder / "head").mkdir()
    save_eagle(random_head(), folder / "head")
    return make_tiny_model(folder / "target", "llama"), folder / "head"


@pytest.fixture(scope="module")
def running(folders: tuple[Path, Path]) -> Iterator[Child]:
    with target(*folders) as child:
        yield child


def test_a_real_target_drafts_by_its_head(folders: tuple[Path, Path], running: Child) -> None:
    """Claim: a target started with a head's folder tells its passes and their times, and answers verifications with a
    plan by the chain that the plain network drafts behind their text, with the time that took; others have none.

    Conclusive: weights are of 8 bits here, so a token is asked to be among the network's first three at its place, of
    97; a chain of four of another text would not.
    """
    model, folder = folders
    head = load_eagle(folder, target_facts(open_model_folder(str(model))))
    whole = WholeText(model, "llama", head)
    described = describe(running)
    assert (described.num_heads, described.head_passes_max) == (0, HEAD_PASSES_MAX)
    assert [entry.rows for entry in described.head_pass_times] == [1, 2, 4, 8, 16]
    with contextlib.closing(Stream(running.address)) as stream:
        for number, prompt in enumerate(PROMPTS, 1):
            opened = Open(number, 1, GREEDY, len(prompt) + 20, VOCABULARY_SIZE)
            text = [*prompt]
            for round_index, plan in enumerate((HeadPlan(4), HeadPlan())):
                asked = Verification(number, 1, round_index, len(text), tuple(text), (5,), head_plan=plan)
                (answer,) = stream.ask(*([opened] if not round_index else []), asked)
                assert isinstance(answer, VerificationResult)
                verdict = conclude(GREEDY, asked, answer.output)
                text += [*(5 for _ in verdict.accepted), verdict.next_token_id]
                nodes = answer.output.head_nodes
                assert len(nodes) == plan.window and (answer.head_us > 0 or not plan.window)
                for place, node in enumerate(nodes):
                    path = [one.token_id for one in nodes[:place]]
                    assert node.proposal and node.token_id in whole.logits(text, path).topk(3).indices.tolist()
