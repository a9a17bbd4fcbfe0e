"""The `specdec` command as a user runs it: real processes, exit codes, standard output and standard error."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import grpc
import pytest

from specdec.config import CoordinatorSettings, DraftSettings, TargetSettings
from specdec.engine.table_model import write_table_model
from specdec.errors import ConfigError, ReplicaUnavailable
from specdec.folders import EMBEDDED_MODELS
from specdec.launch import children as processes
from specdec.launch import supervisor as keeper
from specdec.launch.children import Child, wait_all_ready
from tests.support.ports import free_port
from tests.support.services import Client, Outcome
from tests.support.waiting import until

# Flags of a coordinator that starts and waits for a target that does not exist.
UNREADY = ["--target", "127.0.0.1:1", "--tokenizer", str(EMBEDDED_MODELS / "target"), "--port", "0"]
# Tokens of a text that lasts well over a second, however fast the machine: a service is killed before its end.
LONG = 2000
HEAVY = ("torch", "transformers", "grpc", "tokenizers", "numpy", "structlog")


def specdec(*arguments: str, **options) -> subprocess.CompletedProcess:
    """Runs `specdec`; output as text, or as bytes when the input is."""
    command = [sys.executable, "-m", "specdec.cli", *arguments]
    text = not isinstance(options.get("input"), bytes)
    return subprocess.run(command, capture_output=True, text=text, timeout=60, **options)


def on_a_terminal(*arguments: str) -> tuple[str, str]:
    """Runs `specdec`, whose standard error is a terminal; returns both outputs. Raises where it fails."""
    ours, its = os.openpty()
    with open(ours, "rb", buffering=0) as terminal:
        with open(its, "wb") as errors:
            done = subprocess.run(
                [sys.executable, "-m", "specdec.cli", *arguments], stdout=subprocess.PIPE, stderr=errors
            )
        done.check_returncode()
        return done.stdout.decode(), terminal.read(1 << 16).decode()


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """Table models: target and draft of one tokenizer, and one of another."""
    folder = tmp_path_factory.mktemp("models")
    write_table_model(folder / "target", 8, positions_max=2 * LONG, seed=1)
    write_table_model(folder / "draft", 8, positions_max=2 * LONG, seed=2)
    write_table_model(folder / "other", 9, seed=3)
    return folder


class Serving:
    """`specdec serve` as a process. `lines`: its output until it served."""

    def __init__(self, *arguments: str) -> None:
        command = [sys.executable, "-m", "specdec.cli", "serve", "--port", "0", "--drain-grace-s", "2", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.lines = [self.process.stdout.readline(), self.process.stdout.readline()]
        self.address = self.lines[0].split()[-1]

    def children(self) -> list[int]:
        """Process ids of its children."""
        listing = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(number) for number in listing.split()]

    def pid_of(self, name: str) -> int:
        """Process id of the service of this name, now."""
        words = {pid: Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in self.children()}
        return next(pid for pid, own in words.items() if name in own)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        self.process.stderr.close()


@pytest.fixture(scope="module")
def serving(folders):
    """The three services with table models, for tests that only send requests."""
    models = ["--model", str(folders / "target"), "--draft-model", str(folders / "draft")]
    serving = Serving(*models, "--draft-wait-ms", "2000")  # a busy machine ends no speculation
    yield serving
    serving.end()


def token_ids_of(done: subprocess.CompletedProcess) -> list[int]:
    """The output tokens in the output of `generate --json`."""
    deltas = [json.loads(line).get("delta", {}) for line in done.stdout.splitlines()]
    return [token_id for delta in deltas for token_id in delta.get("token_ids", [])]


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone_within(pids: list[int], seconds: float) -> bool:
    deadline_s = time.monotonic() + seconds
    while any(is_alive(pid) for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.02)
    return True


def test_help_is_immediate():
    """Help, of `specdec` and of each command, loads none of the heavy packages, so it is immediate."""
    code = (
        "import sys\nfrom specdec.cli.main import COMMANDS, run_command\n"
        "run_command(['--help'])\n"
        "for command in COMMANDS:\n"
        "    try: run_command([command, '--help'])\n"
        "    except SystemExit as ended: assert ended.code == 0\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"
    assert "generate" in done.stdout and "--num-speculative-tokens" in done.stdout


@pytest.mark.parametrize(
    "arguments, code, expected",
    [
        (("draft", "--modle", "m"), 2, "specdec: --modle is not known; did you mean --model?"),
        (("target", "--model", "m", "--host", "0.0.0.0"), 2, "--insecure"),
        (("generate",), 2, "give a prompt or --prompt-ids"),
        (("generate", "hi", "--address", "127.0.0.1:1"), 1, "Connection refused; check --address"),
        (("bench", "--address", "127.0.0.1:1"), 1, "Connection refused; check --address"),
    ],
)
def test_errors_are_one_line_on_standard_error(arguments, code, expected):
    """Exit code 2 for a usage error, 1 for a failure; nothing on standard output, no traceback."""
    done = specdec(*arguments)
    assert done.returncode == code and done.stdout == ""
    assert expected in done.stderr and done.stderr.count("\n") == 1


def test_generate_streams_text_and_json(serving):
    """The text of the plain output is the text of the JSON messages; with a seed both are the same generation."""
    request = ("generate", "--prompt-ids", "1,2,3", "--seed", "7", "--max-tokens", "12", "--address", serving.address)
    plain = specdec(*request)
    assert plain.returncode == 0 and plain.stderr == ""
    messages = [json.loads(line) for line in specdec(*request, "--json").stdout.splitlines()]
    assert list(messages[0]) == ["started"] and messages[0]["started"]["seed"] == "7"
    assert list(messages[-1]) == ["finished"]
    assert "".join(message["delta"].get("text", "") for message in messages[1:-1]) + "\n" == plain.stdout


def test_generate_reads_standard_input_and_resumes(serving):
    """`-` is standard input; a stream cut after three tokens and resumed prints the rest of the same text."""
    flags = ("--seed", "9", "--max-tokens", "10", "--ignore-eos", "--address", serving.address)
    whole = specdec("generate", "-", "--json", *flags, input="<1><2>")
    ids = token_ids_of(whole)
    cut = ",".join(map(str, ids[:3]))
    rest = specdec("generate", "<1><2>", "--json", "--resume-ids", cut, *flags)
    assert len(ids) == 10 and token_ids_of(rest) == ids[3:]
    refused = specdec("generate", "-", *flags, input=b"\xff\xfe")
    assert refused.returncode == 2 and b"standard input is not UTF-8" in refused.stderr


def test_generate_takes_a_predicted_text_from_a_file(serving, tmp_path):
    """Claim: the file's text is the request's prediction: a right one saves rounds and changes no token. One that
    cannot be read is told in one line."""
    request = ("generate", "<1>", "--seed", "9", "--max-tokens", "30", "--ignore-eos", "--json")
    request = (*request, "--policy", "fixed", "--proposers", "prediction", "--address", serving.address)
    whole = specdec(*request)
    expected = tmp_path / "expected.txt"
    expected.write_text(
        "".join(json.loads(line).get("delta", {}).get("text", "") for line in whole.stdout.splitlines())
    )
    predicted = specdec(*request, "--prediction", str(expected))
    assert token_ids_of(predicted) == token_ids_of(whole)
    before, after = (json.loads(one.stdout.splitlines()[-1])["finished"]["statistics"] for one in (whole, predicted))
    assert "num_prediction_accepted_tokens" not in before and after["num_prediction_accepted_tokens"] > 15
    assert after["rounds"] < before["rounds"] / 2
    refused = specdec(*request, "--prediction", str(tmp_path / "missing.txt"))
    assert refused.returncode == 1 and refused.stdout == ""
    assert "missing.txt cannot be read" in refused.stderr and refused.stderr.count("\n") == 1


def test_generate_colours_what_the_draft_guessed(serving):
    """Colours on demand only: green for accepted draft tokens, yellow for recovered tokens; the text is the same."""
    request = ("generate", "<1>", "--seed", "3", "--max-tokens", "400", "--ignore-eos", "--policy", "fixed")
    request = (*request, "--address", serving.address)
    plain, coloured = specdec(*request).stdout, specdec(*request, "--color", "always").stdout
    assert "\x1b" not in plain and "\x1b[32m" in coloured
    for code in ("\x1b[32m", "\x1b[33m", "\x1b[0m"):
        coloured = coloured.replace(code, "")
    assert coloured == plain


@pytest.mark.parametrize(
    "flags, expected",
    [
        (("--top-p", "7"), "top_p"),
        (("--stop", "x" * 1000), "stop"),
        (("--num-speculative-tokens", "60"), "num_speculative_tokens"),
    ],
)
def test_refusals_of_the_server_are_one_line(serving, flags, expected):
    """The server's field and limit, exit code 1."""
    done = specdec("generate", "<1>", *flags, "--address", serving.address)
    assert done.returncode == 1 and done.stdout == ""
    assert expected in done.stderr and "must be" in done.stderr and done.stderr.count("\n") == 1


def test_serve_starts_a_lost_target_again_and_its_texts_go_on(serving):
    """Claim: a target that dies under a text is reported and restarted on its port, where the text goes on: its client
    sees a pause, and the bytes of an undisturbed run. Conclusive: the text is a seeded one, and says that it moved."""
    client, asked = Client(serving.address), {"max_tokens": LONG, "temperature": 1, "seed": 5, "ignore_eos": True}
    expected = client.generate([1, 2], **asked)
    outcome, pid = Outcome(), serving.pid_of("target")
    for response in client.stub.Generate(client.request([1, 2], **asked), timeout=60):
        client.take(outcome, response)
        if outcome.token_ids and is_alive(pid):
            os.kill(pid, signal.SIGKILL)
    wait_for_line(serving, "the target service ended with code -9; texts under way wait for it")
    wait_for_line(serving, "the target service is back")
    assert outcome.comparable == expected.comparable and outcome.finished.statistics.num_target_changes > 0
    assert len(serving.children()) == 3 and pid not in serving.children()
    client.close()


def test_serve_starts_a_lost_coordinator_again(serving):
    """Claim: a coordinator that dies under a text is reported and restarted on its port, where the next request gets
    the same text; the text under way ends UNAVAILABLE.

    Conclusive: the client keeps its channel, so it reaches a coordinator only at the address of the first one; the text
    is a seeded one of an undisturbed run.
    """
    client, asked = Client(serving.address), {"max_tokens": LONG, "temperature": 1, "seed": 5, "ignore_eos": True}
    expected = client.generate([1, 2], **asked)
    outcome, pid = Outcome(), serving.pid_of("coordinator")
    with pytest.raises(grpc.RpcError) as caught:
        for response in client.stub.Generate(client.request([1, 2], **asked), timeout=60):
            client.take(outcome, response)
            if outcome.token_ids and is_alive(pid):
                os.kill(pid, signal.SIGKILL)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    lost = "texts under way are lost, and their clients may resume them"
    wait_for_line(serving, f"the coordinator service ended with code -9; {lost}")
    wait_for_line(serving, "the coordinator service is back")
    deadline_s = time.monotonic() + 20
    while True:
        try:
            rest = client.generate([1, 2], resume=outcome.token_ids, **asked)
            break
        except grpc.RpcError as error:  # the coordinator, or its link, connects again within 2 s
            assert error.code() is grpc.StatusCode.UNAVAILABLE and time.monotonic() < deadline_s
            time.sleep(0.05)
    assert 0 < len(outcome.token_ids) < LONG and outcome.token_ids + rest.token_ids == expected.token_ids
    assert len(serving.children()) == 3 and pid not in serving.children()
    client.close()


def test_serve_starts_a_lost_draft_again_and_stops_all_it_started(serving):
    """A lost draft is reported, costs no request and is started again, where the coordinator uses it again;
    interrupted, serve ends with 0 and its children are gone.

    Last user of the fixture.
    """
    children = serving.children()
    assert len(children) == 3
    os.kill(serving.pid_of("draft"), signal.SIGKILL)
    wait_for_line(
        serving, "draft service ended with code -9; texts go on without its guesses; it is started again in 1 s"
    )
    assert specdec("generate", "<1>", "--max-tokens", "3", "--address", serving.address).returncode == 0
    wait_for_line(serving, "the draft service is back")
    deadline_s = time.monotonic() + 30
    while not draft_token_count(serving):
        assert time.monotonic() < deadline_s, "the draft that is back is not used"
    children = {*children, *serving.children()}
    assert len(children) == 4
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    serving.process.send_signal(signal.SIGTERM if is_ignored else signal.SIGINT)
    assert serving.process.wait(15) == 0
    assert gone_within(children, 0.5)


def wait_for_line(serving: Serving, part: str) -> None:
    """Reads its standard error until a line has this part; fails when it ends first."""
    while part not in (line := serving.process.stderr.readline()):
        assert line, part


def draft_token_count(serving: Serving) -> int:
    """Draft tokens offered in a generation that speculates."""
    flags = ("--json", "--ignore-eos", "--policy", "fixed", "--address", serving.address)
    done = specdec("generate", "<1>", "--max-tokens", "30", "--temperature", "0", *flags)
    statistics = json.loads(done.stdout.splitlines()[-1])["finished"]["statistics"]
    return int(statistics.get("num_draft_tokens", 0))


def test_a_service_that_cannot_stay_is_given_up(folders, monkeypatch, capsys):
    """Claim: a service that ends again and again is started RESTART_COUNT_MAX times and then no more, after waits that
    double: without a draft the others go on, a target ends all and says so. Real processes, which refuse their
    settings; only the keeper's clock runs ahead of its pauses, and it gives up earlier."""
    monkeypatch.setattr(keeper, "RESTART_COUNT_MAX", 3)
    children = [Child("target", ["--help"]), Child("draft", ["--help"])]
    settings = TargetSettings(model=str(folders / "target")), DraftSettings(model=str(folders / "draft"))
    for child in children:
        child.address = "127.0.0.1:50999"
    keepers = [
        keeper.Keeper(children, index, own.model_copy(update={"block_size": 7})) for index, own in enumerate(settings)
    ]
    now_s, processes, ended = time.monotonic(), {child.process.pid: child.command for child in children}, ""
    for _ in range(10):
        for child in children:
            child.process.wait(60)
        for one in keepers:
            try:
                one.look(now_s)
            except ReplicaUnavailable as error:
                ended += str(error)
        now_s += keeper.RESTART_WAIT_S_MAX
        processes |= {child.process.pid: child.command for child in children}
    assert Counter(processes.values()) == {"target": 4, "draft": 4}
    assert ended.count("started again 3 times and is given up, and the other services") == 1 and "target" in ended
    waits = re.findall(r"the (\w+) service ended .* started again in (\d+) s", capsys.readouterr().err)
    assert [wait for name, wait in waits if name == "draft"] == ["1", "2", "4"]
    for child in children:
        child.stop()


def test_a_service_that_never_gets_ready_again_is_ended(monkeypatch, capsys):
    """Claim: a service that was started again and does not serve in time is ended and counts as ended: it is started
    again after a pause. Conclusive: a real coordinator whose target does not exist would wait for ever; the limit here
    is a second."""
    monkeypatch.setattr(processes, "LOADING_S_MAX", 1.0)
    children = [Child("coordinator", ["--help"])]
    children[0].address = f"127.0.0.1:{free_port()}"
    settings = CoordinatorSettings(target="127.0.0.1:1", tokenizer=str(EMBEDDED_MODELS / "target"))
    one = keeper.Keeper(children, 0, settings)
    children[0].process.wait(60)
    one.look(time.monotonic())
    one.look(time.monotonic() + keeper.RESTART_WAIT_S_MAX)
    late = children[0]
    try:
        until(lambda: one.look(time.monotonic()) or not late.is_running, 60.0)
        one.look(time.monotonic())
    finally:
        children[0].stop(0.0)
    said = capsys.readouterr().err
    assert late.process.returncode == -signal.SIGKILL
    assert "the coordinator service was not ready within 1 s and is ended" in said
    assert re.search("the coordinator service ended with code -9; .* it is started again in 2 s", said)


def test_nothing_is_left_when_the_parent_is_killed():
    """SIGKILL gives no chance to clean up; the kernel ends the child all the same, frozen or not."""
    code = f"from specdec.launch.children import Child\nchild = Child('coordinator', {UNREADY!r})\n"
    code += "print(child.process.pid, child.check_ready(1.0), flush=True)\nimport time\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline().split()[0])
        until(lambda: len(os.listdir(f"/proc/{pid}/task")) > 5, 60.0)  # it runs, so it has asked for the signal
        os.kill(pid, signal.SIGSTOP)
        assert is_alive(pid)
        parent.kill()
        assert gone_within([pid], 10.0)


@pytest.mark.parametrize(
    "with_heads",
    [pytest.param(False, marks=pytest.mark.more), pytest.param(True, marks=pytest.mark.slow)],
    ids=["local", "heads"],
)
def test_serve_without_a_draft_speculates(folders: Path, with_heads: bool) -> None:
    """Claim: `serve --draft-model none` starts no draft service, and `generate` ends with the accepted and verified
    tokens of the n-gram proposer, and with --heads of the target's heads, but of no draft; the text is that of plain
    decoding. The table model's greedy text repeats itself; the embedded target's is seeded and does so less, and its
    policy is fixed, so that heads and n-gram both take part whatever they cost."""
    told = ["--heads", str(EMBEDDED_MODELS / "target-heads")] if with_heads else ["--model", str(folders / "target")]
    serving = Serving("--draft-model", "none", *told)
    try:
        assert len(serving.children()) == 2
        asked = ("generate", "import os\n" if with_heads else "<1><2>", "--max-tokens", "150")
        asked += ("--temperature", "0.7", "--seed", "1") if with_heads else ("--temperature", "0")
        speculating = ("--policy", "fixed", "--proposers", "ngram,heads") if with_heads else ()
        on, off = (
            on_a_terminal(*asked, "--ignore-eos", *way, "--address", serving.address)
            for way in (speculating, ("--policy", "off"))
        )
    finally:
        serving.end()
    assert on[0] == off[0] != ""
    counts = {name: int(accepted) for name, accepted in re.findall(r"(\w+) (\d+)/\d+", on[1])}
    assert counts.keys() == ({"ngram", "heads"} if with_heads else {"ngram"}), on[1]
    assert min(counts.values()) > 5 and "150 tokens" in off[1] and not re.search(r"\d/\d", off[1])


def test_different_tokenizers_end_serve(folders):
    """Draft and target that number tokens differently: one line naming both models, nothing left running."""
    done = specdec("serve", "--port", "0", "--model", str(folders / "target"), "--draft-model", str(folders / "other"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert all(part in done.stderr for part in (str(folders / "target"), str(folders / "other"), "tokenizer"))


def test_a_child_that_cannot_start_says_why():
    """The child's own sentence is raised as an error, although another child is not ready yet."""
    with Child("coordinator", UNREADY) as waiting, Child("coordinator", [*UNREADY, "--tokenizer", "/none"]) as failing:
        with pytest.raises(ConfigError, match="/none"):
            wait_all_ready([waiting, failing], 60.0)
        assert waiting.is_running and failing.process.wait(5.0) == 1


def test_a_frozen_child_is_stopped():
    """SIGTERM alone does not end a stopped process; `stop` ends it, and is idempotent. Before, its peak memory is what
    it has or more, by the kernel's count of pages; after, none."""
    with Child("coordinator", UNREADY) as child:
        assert not child.check_ready(0.5)
        child.signal(signal.SIGSTOP)
        pages = int(Path(f"/proc/{child.process.pid}/statm").read_text().split()[1])
        assert 0 < pages * os.sysconf("SC_PAGE_SIZE") <= child.memory_peak_bytes < 1e9
        child.stop(5.0)
        assert not child.is_running and child.memory_peak_bytes == 0
        assert child.stop() == child.process.returncode
