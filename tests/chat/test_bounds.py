"""Templates that work without end: what bounds them, and that nothing but their own process pays for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from specdec.chat import rendering
from specdec.chat.messages import BYTES_MAX, size_of
from specdec.chat.template import TEMPLATE_BYTES_MAX, ChatTemplate
from specdec.errors import ConfigError, ModelRefused
from tests.support.waiting import until

HELLO = [{"role": "user", "content": "hello"}]
X = "{% set x = messages[0].content %}"  # no constant, so the work begins with the rendering
TWICE = "{% macro m(n) %}{% if n and m(n - 1) and m(n - 1) %}{% endif %}x{% endmacro %}{{ m(60) }}"


def growing(first: str, step: str, count: int = 60) -> str:
    """A template whose variable `n.s` takes the value of `step` again and again."""
    return f"{{% set n = namespace(s={first}) %}}{{% for i in range({count}) %}}{{% set n.s = {step} %}}{{% endfor %}}"


def nested(count: int, work: str) -> str:
    """A template that does `work` 99,999 times to the power of `count`."""
    return "{% for i in range(99999) %}" * count + work + "{% endfor %}" * count


MEMORY = {
    "center": "{{ 'x'.center(3000000000) }}",
    "center of a message": X + "{{ x.center(3000000000) }}",
    "the filter center": "{{ 'x' | center(3000000000) }}",
    "ljust": X + "{{ x.ljust(3000000000) }}",
    "zfill": X + "{{ x.zfill(3000000000) }}",
    "expandtabs": X + "{{ ('\t' ~ x).expandtabs(2000000000) }}",
    "a constant product": "{{ 'x' * 3000000000 }}",
    "a product": X + "{{ x * 3000000000 }}",
    "a list's product": X + "{{ ([x] * 1000000000) | length }}",
    "doubling": growing("'xx'", "n.s ~ n.s"),
    "doubling by replace": growing("'xx'", "n.s.replace('x', 'xx')"),
    "doubling by the filter replace": growing("'xx'", "n.s | replace('x', 'xx')"),
    "growing by join": growing("'xx'", "n.s | join(n.s)"),
    "doubling of lists": growing("[1]", "n.s + n.s"),
    "slices of text": growing("[]", "n.s + [messages[0].content * 10000]", 99999),
    "percent": X + "{{ '%3000000000d' % 1 }}",
    "the filter format": X + "{{ '%*d' | format(2000000000, 1) }}",
    "format": X + "{{ '{:3000000000}'.format(1) }}",
    "format_map": X + "{{ '{x:>2000000000}'.format_map({'x': 1}) }}",
    "a format within a format": X + "{{ '{:{w}}'.format(1, w=3000000000) }}",
    "a number's digits": X + "{{ '%.2000000000f' % 1 }}",
    "indent": X + "{{ (x ~ '\n' ~ x) | indent(3000000000) }}",
    "an indent of JSON": X + "{{ [[1]] | tojson(indent=3000000000) }}",
    "batch": X + "{{ [1] | batch(1000000000, 0) | list | length }}",
    "range": X + "{{ range(100000) | map('string') | map('center', 100000) | list | length }}",
}
TIME = {
    "lipsum": X + "{{ lipsum(100000, false, 10000, 10001) }}",
    "a constant power": "{{ 10 ** 100000000 % 7 }}",
    "a power": X + "{{ (x | length) ** 100000000 % 7 }}",
    "nested ranges": nested(3, ""),
    "nested lists": nested(1, "{% if range(99999) | map('string') | list %}{% endif %}"),
    "short texts": nested(2, "{% set x = 'a' ~ i %}"),
    "a macro that calls itself twice": TWICE,
    "searches": X + nested(1, "{% if (x * 9999 ~ 'y') in x * 999999 %}{% endif %}"),
    "sorting": nested(1, "{% if range(99999) | map('string') | sort %}{% endif %}"),
}
OUTPUT = {
    "much text": "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}",
    "small pieces": "{% for a in range(9999) %}{% for b in range(9999) %}xy{% endfor %}{% endfor %}",
    "one piece": "{{ messages[0].content * 1000000 }}",
}
DEEP = {
    "a macro that calls itself": "{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}{{ m(0) }}",
    "a loop that calls itself": "{% for a in [messages] recursive %}{{ loop([a]) }}{% endfor %}",
    "brackets": "{{ " + "(" * 90000 + "1" + ")" * 90000 + " }}",
    "lists in lists": "{{ " + "[" * 900 + "]" * 900 + " }}",
    "statements": "{% if 1 %}" * 30000,
    "signs": "{{ " + "-" * 90000 + "1 }}",
    "a list that holds itself, as JSON": "{% set n = namespace(s=[]) %}{% for a in range(99999) %}{% set n.s = [n.s] %}"
    "{% endfor %}{{ n.s | tojson }}",
}


@pytest.mark.parametrize("source", (MEMORY | OUTPUT | DEEP).values(), ids=MEMORY | OUTPUT | DEEP)
def test_a_template_is_bounded_in_memory_and_output(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claim: whatever operator, method, filter, format or nesting a template uses to take memory, it is refused by the
    folder's name, when it is compiled or rendered, and takes no memory of this process. Conclusive: each asks for
    gigabytes, for more text than a request may have, or for a depth without end; the highest memory of this process
    is the kernel's."""
    monkeypatch.setattr(rendering, "MEMORY_BYTES_MAX", 32 << 20)
    before = peak_bytes()
    with pytest.raises(ModelRefused, match=f"the chat template of {tmp_path} is (at fault|not valid): "):
        ChatTemplate(tmp_path, source, {}).render(HELLO)
    assert peak_bytes() - before < 100 << 20


def peak_bytes() -> int:
    """The most memory of this process so far, by the kernel."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) << 10


@pytest.mark.parametrize("source", TIME.values(), ids=TIME)
def test_a_template_is_bounded_in_time(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: loops, calls and single operations that take too long end with the time limit, also while the template is
    compiled. Conclusive: each would go on for minutes to years, and some never return to the interpreter."""
    monkeypatch.setattr(rendering, "SECONDS_MAX", 0.2)
    with pytest.raises(ModelRefused, match=r"is (at fault|not valid): it takes more than 0\.2 s"):
        ChatTemplate(tmp_path, source, {}).render(HELLO)


def test_real_sizes_are_within_the_bounds(tmp_path: Path) -> None:
    """Claim: the bounds let through what people send: a conversation of a million characters, a text of as many as a
    request may have, and the longest template that is read; a longer conversation is refused as such."""
    plain = "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    messages = [{"role": "user", "content": f"{number} " + "word " * 200} for number in range(1000)]
    text = ChatTemplate(tmp_path, plain, {}).render(messages)
    assert text == "".join(f"user: {message['content'].strip()}\n" for message in messages) and len(text) > 1_000_000
    most = "x" * (BYTES_MAX - size_of([[{"content": ""}], None, None]))
    plainest = ChatTemplate(tmp_path, "{{ messages[0].content }}", {})
    assert plainest.render([{"content": most}]) == most
    with pytest.raises(ConfigError, match=f"have more than {BYTES_MAX} bytes") as refusal:
        plainest.render([{"content": f"{most}x"}])
    assert not isinstance(refusal.value, ModelRefused), "it is no fault of the template"
    (tmp_path / "chat_template.jinja").write_text(f"{{# {'x' * (TEMPLATE_BYTES_MAX - 8)} #}}ok")
    found = ChatTemplate.read(tmp_path)
    assert found is not None and found.render(HELLO) == "ok"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json"])
def test_a_template_that_cannot_be_read_is_refused(name: str, tmp_path: Path) -> None:
    """Claim: a template that is too long, and a file of one that is no text, are refused by the file's name."""
    long = "x" * (TEMPLATE_BYTES_MAX + 1)
    (tmp_path / name).write_text(json.dumps({"chat_template": long}) if name.endswith("json") else long)
    with pytest.raises(ModelRefused, match=f"{tmp_path / name} has {TEMPLATE_BYTES_MAX + 1} bytes; at most"):
        ChatTemplate.read(tmp_path)
    (tmp_path / name).write_bytes(b"\xff")
    with pytest.raises(ModelRefused, match=f"{tmp_path / name} is not "):
        ChatTemplate.read(tmp_path)


def test_a_limit_that_is_there_already_stays(tmp_path: Path) -> None:
    """Claim: where a process may have less memory than the bound would allow, templates are rendered, within it.
    Conclusive: the limit is the kernel's, inherited; the text needs little, the fault more."""
    asking = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (400 << 20, 400 << 20))\n"
        "from pathlib import Path; from specdec.chat import rendering; rendering.MEMORY_BYTES_MAX = 1 << 40\n"
        "own = rendering.RenderingProcess('{{ 9 * x }}{{ x.center(n) | length }}', 'it')\n"
        "print(own.render({'x': 'a', 'n': 5}, '2026-01-01'))\n"
        "own.render({'x': 'a', 'n': 3000000000}, '2026-01-01')\n"
    )
    done = subprocess.run([sys.executable, "-c", asking], capture_output=True, text=True)
    assert done.stdout == "aaaaaaaaa5\n" and "ModelRefused: it is at fault: it takes more than" in done.stderr


SOMETIMES = "{% if messages[0].content == 'long' %}" + nested(3, "") + "{% endif %}{{ messages[0].content }}"
LONG = [{"role": "user", "content": "long"}]


def test_a_template_goes_on_after_its_process_was_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: a rendering that is ended, by the time limit, by Ctrl-C here or by a signal from elsewhere, costs itself
    only: the next messages are rendered, with their own text. Conclusive: the ends are real ones, and the answer of the
    rendering that was left is none of a later one."""
    monkeypatch.setattr(rendering, "SECONDS_MAX", 1.0)
    others = set(renderers_of(os.getpid()))  # of templates that are not collected yet
    found = ChatTemplate(tmp_path, SOMETIMES, {})
    with pytest.raises(ModelRefused, match="it takes more than 1 s"):
        found.render(LONG)
    assert found.render(HELLO) == "hello"
    monkeypatch.setattr(rendering, "SECONDS_MAX", 60.0)
    others = set(renderers_of(os.getpid()))  # of templates that are not collected yet, and the one above
    found = ChatTemplate(tmp_path, SOMETIMES, {})
    previous = signal.signal(signal.SIGUSR1, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            found.render(LONG)
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert found.render(HELLO) == "hello"
    (child,) = set(renderers_of(os.getpid())) - others
    os.kill(child, signal.SIGKILL)
    with pytest.raises(ModelRefused, match="it ends its process, with code -9"):
        found.render(HELLO)
    assert found.render(HELLO) == "hello"
    del found
    assert set(renderers_of(os.getpid())) <= others


OWNER = """
import sys, time
from pathlib import Path
from specdec.chat.template import ChatTemplate
found = ChatTemplate(Path("."), sys.argv[1], {})
try:
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print(found.render([{"content": "after"}]), flush=True)
found.render([{"content": "long"}])
"""


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "busy"])
def test_no_process_outlives_its_owner(is_busy: bool) -> None:
    """Claim: Ctrl-C, which a terminal sends to all processes of a command, leaves the renderer to its owner, which goes
    on with it; when the owner is killed, the renderer ends by itself, at once or with its time limit. Conclusive: a
    process group of its own, the signals of a terminal and of the kernel, and the process table."""
    changed = OWNER.replace("found = ", "from specdec.chat import rendering; rendering.SECONDS_MAX = 3.0; found = ")
    command = [sys.executable, "-c", changed, SOMETIMES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as owner:
        assert owner.stdout is not None and owner.stdout.readline() == "ready\n"
        (child,) = renderers_of(owner.pid)
        if is_busy:
            os.killpg(owner.pid, signal.SIGINT)
            assert owner.stdout.readline() == "after\n" and renderers_of(owner.pid) == [child]
        owner.kill()
    until(lambda: not is_running(child))


def is_running(process: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def renderers_of(parent: int) -> list[int]:
    """The living child processes of a process that render templates."""
    found = []
    for task in Path(f"/proc/{parent}/task").iterdir():
        for child in (task / "children").read_text().split():
            if b"specdec.chat.renderer" in Path(f"/proc/{child}/cmdline").read_bytes():
                found.append(int(child))
    return found
