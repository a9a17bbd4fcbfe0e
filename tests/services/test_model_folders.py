"""Model folders through real processes: a wrong one ends a command with one line, a harmless oddity is served."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.launch.children import Child, arguments_of, wait_all_ready
from tests.support.services import MODELS, Client, fixed

LFS_POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5\n"
POSITIONS_MAX, DRAFT_POSITIONS_MAX = 320, 300
PROMPT = list(range(300, 310))


def copy_of(name: str, folder: Path, **entries: Any) -> Path:
    """A copy of a shipped model without its digests, with these entries in its config.json."""
    made = Path(shutil.copytree(MODELS / name, folder, ignore=shutil.ignore_patterns("SHA256SUMS")))
    config = json.loads((made / "config.json").read_text(encoding="utf-8")) | entries
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def said(commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Runs commands at the same time; returns the exit code, output and errors of each."""
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "specdec.cli", *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    found = []
    for process in running:
        output, errors = process.communicate(timeout=300)
        found.append((process.returncode, output, errors))
    return found


@pytest.mark.parametrize(
    "commands",
    [
        {"value": "target --port 0 --model {}", "pointer": "coordinator --port 0 --target 127.0.0.1:1 --tokenizer {}"},
        pytest.param(
            {"names": "draft --port 0 --model {}", "pointer": "distill --tokens 10 --target {0} --out {0}/out"},
            marks=pytest.mark.more,
        ),
        pytest.param(
            {
                "value": "target --port 0 --tensor-parallel-size 2 --model {}",
                "names": "serve --port 0 --draft-model none --model {}",
            },
            marks=pytest.mark.more,
        ),
    ],
    ids=["target and coordinator", "draft and distill", "ranks and serve"],
)
def test_a_wrong_folder_ends_a_command_with_one_line(commands: dict[str, str], tmp_path: Path) -> None:
    """Claim: every command that opens a folder ends with exit code 1 and exactly one line: file, field, value, cause.

    Conclusive: each has a fault of another kind, in a value, the weights' names, and a file; nothing else is written.
    """
    value = copy_of("draft", tmp_path / "value", rms_norm_eps="1e-6")
    names = copy_of("draft", tmp_path / "names")
    weights = load_file(names / "model.safetensors")
    save_file({f"_orig_mod.{name}": own for name, own in weights.items()}, names / "model.safetensors")
    pointer = copy_of("draft", tmp_path / "pointer")
    (pointer / "tokenizer.json").write_text(LFS_POINTER, encoding="utf-8")
    causes = {
        "value": f'{value}/config.json: rms_norm_eps is "1e-6"; it must be a number',
        "names": f"{names}: the weights lack model.embed_tokens.weight; they have _orig_mod.",
        "pointer": f"{pointer}/tokenizer.json is a pointer of Git LFS",
    }
    found = said([command.format(tmp_path / fault).split() for fault, command in commands.items()])
    for fault, (code, output, errors) in zip(commands, found, strict=True):
        assert (code, output) == (1, "")
        assert errors.startswith(f"specdec: {causes[fault]}") and errors.count("\n") == 1 and errors.endswith("\n")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Client, Path]]:
    """Services on the shipped pair, whose folders state 10,485,760 positions and an end token that they do not have;
    fewer positions are served, of the draft fewer still. Yields a client and the target's log."""
    folder = tmp_path_factory.mktemp("folders")
    ends = json.dumps({"eos_token_id": [0, 99999]})
    for name in ("target", "draft"):
        copy_of(name, folder / name, max_position_embeddings=10_485_760)
        (folder / name / "generation_config.json").write_text(ends, encoding="utf-8")
    common: dict[str, Any] = {"port": 0, "threads": 1}
    target = TargetSettings(model=str(folder / "target"), max_model_len=POSITIONS_MAX, **common)
    draft = DraftSettings(model=str(folder / "draft"), max_model_len=DRAFT_POSITIONS_MAX, **common)
    log = folder / "target.log"
    with (
        log.open("w") as errors,
        Child("target", arguments_of(target), stderr=errors) as main,
        Child("draft", arguments_of(draft)) as guess,
    ):
        wait_all_ready([main, guess])
        own = CoordinatorSettings(target=main.address, draft=guess.address, tokenizer=str(folder / "target"), port=0)
        with Child("coordinator", arguments_of(own)) as coordinator:
            coordinator.wait_ready()
            client = Client(coordinator.address)
            yield client, log
            client.close()


def test_an_unknown_end_token_is_left_out_with_a_warning(served: tuple[Client, Path]) -> None:
    """Claim: a folder whose generation_config.json names an id that the model does not have is served without it; the
    other id still ends a text, and the target's log names the one that is left out.

    Source: such a folder made the service refuse every request, for a field that no client had sent. Conclusive: a bias
    makes the known end the likeliest token.
    """
    client, log = served
    outcome = client.generate(PROMPT, max_tokens=20, temperature=0)
    assert outcome.token_ids
    ended = client.generate(PROMPT, max_tokens=20, temperature=0, logit_bias={0: 100.0})
    assert ended.finished.stop_token_id == 0 and ended.finished.HasField("stop_token_id")
    assert "eos_token_id has [99999]" in log.read_text(encoding="utf-8")


def test_a_text_may_have_every_served_position(served: tuple[Client, Path]) -> None:
    """Claim: with tables of the served positions texts reach the last of them, with speculation and without, and are
    the same; a longer one is refused by the number that is served.

    Conclusive: the draft's tables end before the target's, so it drafts up to its own last position; draft tokens were
    accepted.
    """
    client, _ = served
    asked: dict[str, Any] = {"max_tokens": POSITIONS_MAX - len(PROMPT), "temperature": 0, "ignore_eos": True}
    plain = client.generate(PROMPT, speculative={"policy": "POLICY_OFF"}, **asked)
    assert len(plain.token_ids) == asked["max_tokens"]
    client.wait_for_draft()
    for shape in (fixed(4), fixed(8, draft_nodes_per_step=4, draft_siblings=2)):
        own = {"proposers": ["PROPOSER_DRAFT"], "draft_wait_ms": 2000, **shape}
        speculated = client.generate(PROMPT, speculative=own, **asked)
        assert speculated.token_ids == plain.token_ids
        assert sum(speculated.proposers) > 0
    with pytest.raises(Exception, match=f"the model's {POSITIONS_MAX} positions"):
        client.generate(PROMPT, **asked | {"max_tokens": POSITIONS_MAX})
