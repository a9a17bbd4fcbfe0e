"""Settings: the sources of values, their order, and the errors of wrong values."""

from __future__ import annotations

import os

import pydantic
import pytest

from specdec.cli.main import COMMANDS, KNOWN_FIELDS, run_command
from specdec.cli.options import UsageError, make_parser, read_settings
from specdec.config import (
    GROUPS,
    ClientSettings,
    CoordinatorSettings,
    DraftSettings,
    ServeSettings,
    ServiceSettings,
    TargetSettings,
    is_loopback,
)
from specdec.launch.children import arguments_of
from specdec.settings import flag_of

CONVENTIONAL_FLAGS = (
    "--model --host --port --served-model-name --dtype --max-model-len --max-num-seqs --max-num-batched-tokens "
    "--kv-cache-bytes --block-size --threads --ssl-keyfile --ssl-certfile --ssl-ca-certs --insecure --log-level "
    "--drain-grace-s --config"
).split()
SAMPLING_FLAGS = (
    "--max-tokens --temperature --top-p --top-k --min-p --seed --stop --stop-token-ids --presence-penalty "
    "--frequency-penalty --repetition-penalty --logit-bias --logprobs --ignore-eos --min-tokens --speculative "
    "--num-speculative-tokens --rule --resume-ids --prompt-ids --json --address"
).split()


def read(command: str, *arguments: str, environment: dict[str, str] | None = None):
    """The settings of a command line."""
    entry = COMMANDS[command]
    parser = make_parser(command, entry.summary, entry.settings)
    return read_settings(entry.settings, parser, arguments, environment or {}, KNOWN_FIELDS)


def refusal(command: str, *arguments: str, environment: dict[str, str] | None = None) -> str:
    """The error of a wrong command line: always one line."""
    with pytest.raises(UsageError) as raised:
        read(command, *arguments, environment=environment)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def help_of(command: str) -> str:
    return make_parser(command, COMMANDS[command].summary, COMMANDS[command].settings).format_help()


def test_flag_beats_environment_beats_file_beats_default(tmp_path):
    """Each layer is removed in turn, and the next one shows: 128, then 32, then 16, then the default."""
    file = tmp_path / "draft.yaml"
    file.write_text("model: m\nblock-size: 16\n")
    environment = {"SPECDEC_BLOCK_SIZE": "32"}
    arguments = ("--config", str(file))
    assert read("draft", *arguments, "--block-size", "128", environment=environment).block_size == 128
    assert read("draft", *arguments, environment=environment).block_size == 32
    assert read("draft", *arguments).block_size == 16
    assert read("draft", "--model", "m").block_size == DraftSettings(model="m").block_size == 0


def test_the_file_can_be_named_in_the_environment(tmp_path):
    """A container is configured without arguments."""
    file = tmp_path / "target.yaml"
    file.write_text("model: m\nport: 0\n")
    assert read("target", environment={"SPECDEC_CONFIG": str(file)}).model == "m"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_holds_every_setting_with_a_sentence(command):
    """One schema makes flags and help, so every flag has its help; each is explained in a sentence."""
    text = help_of(command)
    for name, field in COMMANDS[command].settings.model_fields.items():
        extra = field.json_schema_extra
        assert extra["group"] in GROUPS
        assert (name.upper() if extra.get("positional") else flag_of(name)) in text
        assert field.description and field.description.endswith((".", "…")), name


def test_flags_are_spelt_as_users_know_them():
    """The spellings of other inference servers, which users know."""
    for flags, command in ((CONVENTIONAL_FLAGS, "target"), (CONVENTIONAL_FLAGS, "draft"), (SAMPLING_FLAGS, "generate")):
        text = help_of(command).split()
        assert [flag for flag in flags if flag not in [word.rstrip(",") for word in text]] == []
    coordinator = help_of("coordinator")
    for flag in ("--target", "--draft", "--num-speculative-tokens", "--num-speculative-tokens-max", "--draft-wait-ms"):
        assert flag in coordinator


@pytest.mark.parametrize(
    "command, arguments, expected",
    [
        ("draft", ["--modle", "m"], "--modle is not known; did you mean --model?"),
        ("draft", ["--model", "m", "--port", "65536"], "--port is '65536'; it must be from 0 to 65535"),
        ("draft", ["--model", "m", "--port", "x"], "--port is 'x'; it must be a valid integer"),
        ("draft", ["--model", "m", "--dtype", "int8"], "'auto', 'float32', 'bfloat16' or 'float16'"),
        ("draft", ["--model", "m", "--drain-grace-s", "nan"], "--drain-grace-s is 'nan'"),
        ("draft", ["--model"], "argument --model: expected one argument"),
        ("draft", [], "--model is missing"),
        ("coordinator", ["--tokenizer", "t", "--target", "here"], "--target is 'here'; it must be HOST:PORT"),
        ("coordinator", ["--tokenizer", "t"], "--target is missing"),
        (
            "serve",
            ["--num-speculative-tokens", "32"],
            "--num-speculative-tokens 32 is above --num-speculative-tokens-max 31",
        ),
        (
            "serve",
            ["--num-speculative-tokens-max", "40"],
            "--num-speculative-tokens-max 40 is above --draft-window-max 32",
        ),
        (
            "serve",
            ["--ngram-length-min", "5", "--ngram-length-max", "4"],
            "--ngram-length-min 5 is above --ngram-length-max 4",
        ),
        ("generate", ["hi", "--logit-bias", "5"], "it must be ID=BIAS, such as 5=-1.5"),
        ("generate", ["hi", "--prompt-ids", "1,x"], "--prompt-ids is"),
        ("generate", ["hi", "--max-tokens", "-1"], "--max-tokens is '-1'; it must be from 0 to"),
        ("generate", ["hi", "there"], "there is not known"),
        ("draft", ["--config", "/nonexistent.yaml"], "--config /nonexistent.yaml cannot be read"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(command, arguments, expected):
    """Flag, value and requirement, or the flag that was probably meant."""
    assert expected in refusal(command, *arguments)


def test_wrong_values_are_blamed_on_where_they_came_from(tmp_path):
    """The error names the source of a value that is not on the command line: the variable, or the file."""
    file = tmp_path / "c.yaml"
    file.write_text("model: m\nport: many\n")
    assert f"port in {file} is 'many'" in refusal("draft", "--config", str(file))
    assert "SPECDEC_PORT is '-1'" in refusal("draft", "--model", "m", environment={"SPECDEC_PORT": "-1"})


@pytest.mark.parametrize(
    "content, expected", [("prot: 1\n", "did you mean port?"), ("- 1\n", "NAME: VALUE"), ("a: b: c", "not YAML")]
)
def test_a_file_that_is_not_understood_is_refused(tmp_path, content, expected):
    """Unknown keys are errors, so a misspelt setting is never silently the default."""
    file = tmp_path / "c.yaml"
    file.write_text(content)
    assert expected in refusal("draft", "--model", "m", "--config", str(file))


def test_the_environment_is_checked_too():
    """A misspelt variable is an error; one of another command is not, nor an address set by Kubernetes."""
    assert "did you mean SPECDEC_MODEL?" in refusal("draft", environment={"SPECDEC_MODLE": "m"})
    shared = {
        "SPECDEC_TEMPERATURE": "0",
        "SPECDEC_DRAFT_SERVICE_HOST": "10.0.0.1",
        "SPECDEC_TARGET_PORT_50052_TCP_ADDR": "x",
    }
    assert read("draft", "--model", "m", environment=shared).model == "m"


@pytest.mark.parametrize(("name", "flag"), [("SPECDEC_PORT", "--port"), ("SPECDEC_MASTER_PORT", "--master-port")])
def test_an_address_that_kubernetes_sets_for_a_number_is_explained(name: str, flag: str) -> None:
    """Claim: a Service named specdec sets SPECDEC_PORT=tcp://… in every pod; the error says so and what to do, and a
    flag overrides it. Conclusive: the variables that Kubernetes documents for such a Service, and for specdec-master.
    """
    links = {name: "tcp://10.96.0.7:50051", "SPECDEC_SERVICE_HOST": "10.96.0.7", "SPECDEC_SERVICE_PORT": "50051"}
    links |= {"SPECDEC_PORT_50051_TCP": "tcp://10.96.0.7:50051", "SPECDEC_PORT_50051_TCP_ADDR": "10.96.0.7"}
    with pytest.raises(UsageError, match=f"{name} is 'tcp://.*valid integer; Kubernetes.*enableServiceLinks.*{flag}$"):
        read("target", "--model", "m", environment=links)
    overridden = read("target", "--model", "m", flag, "7", environment=links)
    assert getattr(overridden, flag.strip("-").replace("-", "_")) == 7
    assert read("generate", "x", environment=links).prompt == "x"


def test_lists_come_from_flags_environment_and_file(tmp_path):
    """Repeated flags, comma-separated ids, JSON in a variable, YAML lists and mappings: one value each way."""
    settings = read("generate", "hi", "--stop", "a,b", "--stop", "c", "--prompt-ids", "1,2", "--logit-bias", "5=-1.5")
    assert (settings.stop, settings.prompt_ids, settings.logit_bias) == (("a,b", "c"), (1, 2), ((5, -1.5),))
    assert read("generate", "hi", environment={"SPECDEC_STOP": '["x", "y"]'}).stop == ("x", "y")
    assert read("generate", "hi", environment={"SPECDEC_STOP": "[x"}).stop == ("[x",)
    file = tmp_path / "g.yaml"
    file.write_text("stop: [x, y]\nlogit-bias: {5: -1.5}\nstop_token_ids: [3, 4]\n")
    settings = read("generate", "hi", "--config", str(file))
    assert (settings.stop, settings.logit_bias, settings.stop_token_ids) == (("x", "y"), ((5, -1.5),), (3, 4))


def test_settings_never_change():
    """Settings checked at the start never change (style: configuration is immutable)."""
    settings = DraftSettings(model="m")
    with pytest.raises(pydantic.ValidationError):
        settings.port = 1
    with pytest.raises(pydantic.ValidationError):
        DraftSettings(model="m", prot=1)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.com", "127.0.0.1.example.com"])
def test_beyond_loopback_needs_tls_or_insecure(host, tmp_path):
    """A port that other machines can reach is never plain by accident: three TLS files, or the flag --insecure."""
    assert "reaches beyond this machine" in refusal("draft", "--model", "m", "--host", host)
    assert read("draft", "--model", "m", "--host", host, "--insecure").host == host
    files = [tmp_path / name for name in ("key", "cert", "ca")]
    for file in files:
        file.write_text("")
    tls = ["--ssl-keyfile", str(files[0]), "--ssl-certfile", str(files[1]), "--ssl-ca-certs", str(files[2])]
    assert read("draft", "--model", "m", "--host", host, *tls).has_tls
    assert not is_loopback(host)


@pytest.mark.parametrize("command", ["draft", "target"])
def test_allowed_peers_need_certificates(command, tmp_path):
    """Claim: --allow-peer may be repeated, and without TLS it is refused at the start, naming the flags that
    are missing. Source: without certificates it would allow no peer, or every one."""
    names = ["--allow-peer", "coordinator", "--allow-peer", "c.example.org"]
    refused = refusal(command, "--model", "m", *names)
    assert all(flag in refused for flag in ("--allow-peer coordinator", "--ssl-certfile", "--ssl-keyfile"))
    files = [tmp_path / name for name in ("key", "cert", "ca")]
    for file in files:
        file.write_text("")
    tls = ["--ssl-keyfile", str(files[0]), "--ssl-certfile", str(files[1]), "--ssl-ca-certs", str(files[2])]
    assert read(command, "--model", "m", *names, *tls).allow_peer == ("coordinator", "c.example.org")
    assert "at least 1 character" in refusal(command, "--model", "m", "--allow-peer", "", *tls)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"])
def test_loopback_needs_nothing(host):
    """A host that no other machine can reach needs no certificates."""
    assert is_loopback(host) and ServiceSettings(host=host).host == host


def test_connecting_beyond_loopback_needs_the_same():
    """Prompts leave a client, and tokens a coordinator, as they leave a server."""
    assert "--address 10.0.0.1" in refusal("generate", "hi", "--address", "10.0.0.1:50051")
    assert "--draft 10.0.0.1" in refusal(
        "coordinator", "--tokenizer", "t", "--target", "127.0.0.1:1", "--draft", "10.0.0.1:2"
    )
    assert ClientSettings(address="10.0.0.1:50051", insecure=True).address == "10.0.0.1:50051"


def test_half_of_tls_is_refused(tmp_path):
    """Two of three files would encrypt without knowing the other side; a path that is no file is named."""
    present = tmp_path / "cert"
    present.write_text("")
    assert "give --ssl-keyfile and --ssl-ca-certs too" in refusal(
        "draft", "--model", "m", "--ssl-certfile", str(present)
    )
    missing = ["--ssl-certfile", "/none", "--ssl-keyfile", str(present), "--ssl-ca-certs", str(present)]
    assert "--ssl-certfile /none is not a file" in refusal("draft", "--model", "m", *missing)


def test_serve_gives_its_settings_to_the_three():
    """Host, port and the models go where they belong; the internal services stay on loopback, on free ports."""
    serve = ServeSettings(host="0.0.0.0", insecure=True, port=7, model="t", draft_model="d", threads=3, max_num_seqs=5)
    target, draft = serve.target_settings(), serve.draft_settings()
    here, there = "127.0.0.1:1", "127.0.0.1:2"
    coordinator = serve.coordinator_settings(here, there)
    assert (target.model, draft.model, coordinator.tokenizer) == ("t", "d", "t")
    assert (target.host, target.port, draft.host, draft.port) == ("127.0.0.1", 0, "127.0.0.1", 0)
    assert (coordinator.host, coordinator.port) == ("0.0.0.0", 7)
    assert (coordinator.target, coordinator.draft) == ((here,), (there,))
    assert target.threads == draft.threads == 3 and coordinator.max_num_seqs == target.max_num_seqs == 5
    assert not coordinator.link_tls.has_tls


def test_a_target_without_a_draft_has_all_cores(monkeypatch):
    """Claim: two models share the cores of a machine, one alone has them all."""
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    threads = [ServeSettings(draft_model=draft).target_settings().threads for draft in ("d", "none")]
    assert threads == [3, 6]


@pytest.mark.parametrize(
    "command, settings",
    [
        ("target", TargetSettings(model="a b", kv_cache_bytes=1 << 20, host="0.0.0.0", insecure=True)),
        ("draft", DraftSettings(model="-m")),
        ("coordinator", CoordinatorSettings(tokenizer="t", target="127.0.0.1:1", insecure_links=True)),
    ],
)
def test_a_child_is_given_the_same_settings(command, settings):
    """Flags made from settings make the same settings again, so a child runs with the settings its parent checked."""
    assert read(command, *arguments_of(settings)) == settings


def test_an_unknown_command_is_refused():
    """One line with all commands."""
    with pytest.raises(UsageError, match="^sreve is not a command; choose from serve, target, draft"):
        run_command(["sreve"])


def test_serve_gives_its_heads_to_the_target_alone() -> None:
    """Claim: `specdec serve --heads DIR` is the target's `--heads DIR`; without it there are none."""
    assert read("serve", "--heads", "folder").target_settings().heads == "folder"
    assert read("serve").target_settings().heads == "none" and "heads" not in DraftSettings.model_fields
