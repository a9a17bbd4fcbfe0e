"""Limits of encoder-decoder models and of decoders alone, through the commands and the running services: what cannot be
is refused by field, value and limit, and a draft that has too few positions or blocks changes no text.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine.test_model_folder import edit_json
from tests.sameness.comparison import generate
from tests.services.test_bad_input import refused, violations
from tests.services.test_encoder_decoder import command
from tests.services.test_model_folders import said
from tests.support.encoder_decoder_models import START, make_encoder_decoder, make_resembling
from tests.support.engine_models import make_tiny_model
from tests.support.gateways import ask, gateway
from tests.support.services import SHAPES, Outcome, Services, fixed, running
from tests.support.waiting import until

COUNT = 60
BLOCK_BYTES = 2 * 16 * 2 * 4 * 12 * 4  # layers, cells, keys and values, heads, their size, float32


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target and its draft, whose encoder has 32 positions."""
    folder = tmp_path_factory.mktemp("t5")
    target = make_encoder_decoder(folder / "target", "t5-gated", seed=1)
    draft = make_resembling(folder / "draft", target)
    edit_json(draft / "config.json", n_positions=32)
    return target, draft


@pytest.fixture(scope="module")
def pair(models: tuple[Path, Path]) -> Iterator[Services]:
    """The services of the pair."""
    with running(*models, threads=1, dtype="float32") as services:
        yield services


@pytest.mark.more
def test_a_folder_without_a_start_token_ends_the_commands(tmp_path: Path) -> None:
    """Claim: target, draft and serve end with exit code 1 and one line, by file, field, value and limit. Conclusive:
    with the field the same folder serves, in the other tests."""
    folder = make_encoder_decoder(tmp_path / "model")
    (folder / "generation_config.json").unlink()
    edit_json(folder / "config.json", decoder_start_token_id=None)
    commands = ("target --port 0", "draft --port 0", "serve --port 0 --draft-model none")
    place = f"{folder}/config.json: decoder_start_token_id is null; it must be a token id below 288"
    for code, output, errors in said([[*own.split(), "--model", str(folder)] for own in commands]):
        assert (code, output) == (1, "")
        assert errors.startswith(f"specdec: {place}") and errors.count("\n") == 1


@pytest.mark.more
def test_a_decoder_alone_has_no_beginning(tmp_path: Path) -> None:
    """Claim: gRPC, /v1/completions and `specdec generate` refuse a beginning, of text or token ids, by field, value and
    limit. Conclusive: each serves the same request without it."""
    model = make_tiny_model(tmp_path / "decoder", "llama")
    limit = "must be absent: the model is a decoder alone"
    asked: dict[str, Any] = {"max_tokens": 4, "temperature": 0}
    with running(model, None, threads=1, dtype="float32") as services:
        client = services.client
        expected = client.generate("def", **asked).text
        with gateway(client.address, model=model) as own:
            for beginning in ("return", [START]):
                error = refused(client, "def", decoder_prompt=beginning, **asked)
                assert violations(error) == ["decoder_prompt"] and limit in str(error.details())
                body = {"prompt": "def", **asked}
                answer = ask(own.address, "/v1/completions", body | {"decoder_prompt": beginning})
                assert (answer.status, answer.error["param"]) == (400, "decoder_prompt")
                assert limit in answer.error["message"]
                assert ask(own.address, "/v1/completions", body).json["choices"][0]["text"] == expected
        flags = ["def", "--address", client.address, "--max-tokens", "4", "--temperature", "0"]
        wrong = command(*flags, "--decoder-prompt", "return")
        assert wrong.returncode == 1 and limit in wrong.stderr and "Traceback" not in wrong.stderr
        assert expected in command(*flags).stdout


def test_wrong_inputs_over_http(pair: Services, models: tuple[Path, Path]) -> None:
    """Claim: /v1/completions refuses no input, one beyond the encoder's positions and an empty beginning by field and
    limit. Conclusive: a request at the limits is served."""
    faults: list[tuple[dict[str, Any], str, str]] = [
        ({"prompt": ""}, "prompt", "at least one character"),
        ({"prompt": []}, "prompt", "a text, token ids, or a list"),
        ({"prompt": [[1], []]}, "prompt", "at least one token"),
        ({"prompt": "x " * 300}, "prompt", "at most 256 tokens, the positions of the encoder"),
        ({"prompt": [1], "decoder_prompt": ""}, "decoder_prompt", "at least 1 character"),
        ({"prompt": [1], "decoder_prompt": []}, "decoder_prompt", "must be"),
        ({"prompt": [1], "decoder_prompt": [288]}, "decoder_prompt", "0 to 287"),
    ]
    with gateway(pair.client.address, model=models[0]) as own:
        for fault, field, limit in faults:
            answer = ask(own.address, "/v1/completions", {"max_tokens": 1} | fault)
            assert answer.status == 400, fault
            told = f"{answer.error['param']} {answer.error['message']}"
            assert field in answer.error["param"] and limit in told, told
        served = {"prompt": [1] * 256, "max_tokens": 1, "decoder_prompt": [287]}
        assert ask(own.address, "/v1/completions", served).status == 200


def test_a_draft_with_fewer_positions_drafts_for_what_it_can_read(pair: Services) -> None:
    """Claim: inputs up to the positions of the draft's encoder have draft tokens, longer ones none, and all texts are
    those without speculation, within the draft's positions and beyond. Conclusive: both sides of the limit."""
    assert pair.client.described().draft.encoder_positions_max == 32
    for length in (31, 32, 33, 200):
        asked = {"prompt": [*range(1, length), 0], "max_tokens": COUNT, "ignore_eos": True, "temperature": 0}
        off = pair.client.generate(**asked, speculative={"enabled": False})

        def is_drafted(asked: dict[str, Any] = asked, off: Outcome = off) -> bool:
            on = pair.client.generate(**asked, speculative=fixed(3))
            assert on.comparable == off.comparable
            return on.finished.statistics.num_model_draft_tokens > 0

        if length <= 32:
            until(is_drafted)  # a draft that reads its prompt is not waited for
        else:
            assert not is_drafted()


@pytest.mark.more
@pytest.mark.parametrize("role", ["target", "draft"])
def test_replicas_with_few_blocks_change_no_text(models: tuple[Path, Path], role: str) -> None:
    """Claim: chains and trees in a cache that is too small for all texts at once, of the target, which preempts
    sessions, or of the draft, which gives their blocks to others, give the texts without speculation. Conclusive: the
    target counts preemptions; the draft's blocks hold each text alone, and not all of them."""
    shapes = ("synchronous", "waiting siblings", "tree", "all proposers")
    asked = [
        {"prompt": [seed, *range(1, 12 + seed), 0], "max_tokens": 150, "ignore_eos": True, "logprobs": 1}
        | {"temperature": seed % 2 * 0.9, "seed": seed}
        for seed in range(4)  # each new one fits, and then they grow
    ]
    few = {"kv_cache_bytes": 17 * BLOCK_BYTES, "block_size": 16}
    with running(*models, threads=1, dtype="float32", **{role: few}) as services:
        plain = services.client.generate_all([own | {"speculative": SHAPES["off"]} for own in asked], 1)
        drafted = [own | {"speculative": SHAPES[shape]} for own, shape in zip(asked, shapes)]
        with ThreadPoolExecutor(4) as pool:  # those that find no block are asked for again
            crowded = list(pool.map(lambda own: generate(services.client, own, lambda: None), drafted))
    assert [own.comparable for own in crowded] == [own.comparable for own in plain]
    assert sum(own.finished.statistics.num_model_draft_tokens for own in crowded) > 0
    if role == "target":
        assert sum(own.finished.statistics.preemptions for own in crowded) > 0
