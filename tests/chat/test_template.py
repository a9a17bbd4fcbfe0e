"""Chat templates: rendered as `transformers` renders them, in a sandbox."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects
from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from specdec.chat.special_tokens import CLASS_TOKENS, GENERIC_MODELS, MODEL_CLASSES
from specdec.chat.template import TEMPLATE_FILES, ChatTemplate
from specdec.engine.loading.folder_files import HUB_FILES
from specdec.errors import ConfigError, ModelRefused
from tests.support.services import MODELS

CHATML = """{%- if messages[0].role != "system" %}
    {{- "<|im_start|>system\\nYou are helpful.<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
  {{- "<|im_start|>" + message.role + "\\n" + message["content"] | trim + "<|im_end|>" + "\\n" }}
{%- endfor %}
{% if add_generation_prompt %}{{ "<|im_start|>assistant\\n" }}{% endif %}"""
TURNS = """{{ bos_token }}{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}
{% else %}{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}{% endif %}
{% if loop.index > 6 %}{% break %}{% endif %}
{% endfor %}"""
OBJECTS = """{% set count = namespace(value=0) %}{% for message in messages %}{% set count.value = count.value + 1 %}
{{ message | tojson(indent=2) }}{% endfor %}{{ count.value }}{% if tools is none %} no tools{% endif %}"""
SPECIAL = """{% for message in messages %}{{ cls_token }}{{ message.content }}{{ sep_token }}{{ pad_token }}
{{ mask_token }}{{ unk_token }}{% endfor %}"""
TEMPLATES = {"chatml": CHATML, "turns": TURNS, "objects": OBJECTS, "special": SPECIAL}
CHATS = {
    "one question": [{"role": "user", "content": " What is 2 + 2? "}],
    "three turns": [
        {"role": "user", "content": 'Grüße, <b>"wörld"</b>'},
        {"role": "assistant", "content": "Hello\n\nthere"},
        {"role": "user", "content": "日本語 {{ 1 + 1 }} <|im_end|>"},
    ],
}


def folder_with(folder: Path, template: str, in_config: bool) -> Path:
    """A tokenizer with a template, in its own file or in tokenizer_config.json."""
    shutil.copytree(MODELS / "target", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"bos_token": "<s>", "eos_token": {"content": "</s>", "__type": "AddedToken"}, "pad_token": "<pad>"}
    config |= {"sep_token": "<sep>", "cls_token": "<cls>"}  # without a mask
    if in_config:
        config["chat_template"] = template
    else:
        (folder / TEMPLATE_FILES[-1]).write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("in_config", [True, False], ids=["tokenizer_config.json", TEMPLATE_FILES[-1]])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_render_as_transformers_renders_them(tmp_path, template, chat, in_config):
    """Claim: the prompt is that of `apply_chat_template`, character for character, from either file, with and without
    the beginning of an answer; a user's braces are text. Source: the library itself."""
    folder = folder_with(tmp_path / "model", TEMPLATES[template], in_config)
    ours, theirs = ChatTemplate.read(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for begins in (True, False):
        expected = theirs.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=begins)
        assert ours.render(CHATS[chat], add_generation_prompt=begins) == expected and len(expected) > 10


@pytest.mark.parametrize("chat", CHATS)
def test_the_chat_models_own_template_renders_as_transformers_renders_it(chat):
    """Claim: so does the template of SmolLM2-135M-Instruct, which its shipped draft has too."""
    folder = MODELS / "smollm2-draft"
    ours, theirs = ChatTemplate.read(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for begins in (True, False):
        expected = theirs.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=begins)
        assert ours.render(CHATS[chat], add_generation_prompt=begins) == expected and "<|im_start|>user" in expected


@pytest.mark.parametrize("template", TEMPLATES)
def test_prompts_have_the_tokens_of_transformers(tmp_path, template):
    """Claim: a conversation has the token ids that `apply_chat_template` gives: special tokens are those the template
    writes, and no more, though the tokenizer puts one before every text, and a `truncation` in its file cuts nothing.
    Conclusive: this tokenizer does both, so a template's own first token would be there twice, and a long one cut."""
    folder = folder_with(tmp_path / "model", TEMPLATES[template], False)
    file = folder / "tokenizer.json"
    words = Tokenizer.from_file(str(file))
    words.add_special_tokens(["<s>", "</s>", "<sep>", "<cls>", "<pad>"])
    words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", words.token_to_id("<s>"))])
    words.enable_truncation(4)
    words.save(str(file))
    ours, theirs = ChatTemplate.read(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for chat in CHATS.values():
        expected = theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        assert list(ours.encode(chat)) == expected and len(expected) > 4


EVERY_NAME = ("bos", "eos", "unk", "sep", "pad", "cls", "mask", "image", "boi", "no", "additional_special", "extra")
NAMES_SHOWN = "".join(
    f"{{% if {name} is defined %}}{name}={{{{ {name} }}}}{{% if {name} is none %}} none{{% endif %}}\n{{% endif %}}"
    for name in (*(f"{name}_token" for name in EVERY_NAME), "additional_special_tokens", "extra_special_tokens", "soi")
)
ADDED = {"content": "<x>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
OF_CONFIG = ADDED | {"__type": "AddedToken", "special": True}
FOLDERS: dict[str, dict[str, dict]] = {  # files of a folder beside tokenizer.json
    "no files": {},
    "only the map": {"special_tokens_map.json": {"eos_token": "</s>", "bos_token": ADDED, "sep_token": ""}},
    "both, the map's differ": {
        "tokenizer_config.json": {"eos_token": "<config>", "bos_token": "<config>", "pad_token": "<config>"},
        "special_tokens_map.json": {"eos_token": "<map>", "bos_token": None},
    },
    "a config that knows its added tokens": {
        "tokenizer_config.json": {"eos_token": "<config>", "added_tokens_decoder": {"0": ADDED}},
        "special_tokens_map.json": {"eos_token": "<map>", "bos_token": "<map>"},
    },
    "tokens as objects": {"tokenizer_config.json": {"eos_token": OF_CONFIG, "bos_token": None, "unk_token": ""}},
    "names of the model": {"tokenizer_config.json": {"image_token": "<image>", "boi_token": OF_CONFIG}},
    "named extras": {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>", "soi": "<soi>"}}},
    "named extras of the map": {"special_tokens_map.json": {"extra_special_tokens": {"image_token": "<image>"}}},
    "the map's own names": {"special_tokens_map.json": {"image_token": ADDED, "boi_token": "<boi>"}},
    "a list of extras": {
        "tokenizer_config.json": {"additional_special_tokens": ["<a>", "<b>"], "extra_special_tokens": ["<c>"]},
        "special_tokens_map.json": {"additional_special_tokens": ["<d>", ADDED]},
    },
    "switches that end in token": {"tokenizer_config.json": {"add_bos_token": True, "add_eos_token": False}},
}
BARE = {"tokenizer_class": "GPT2TokenizerFast", "eos_token": "<own>", "unk_token": None}
for of_model in (*MODEL_CLASSES, *GENERIC_MODELS, "llama", "smollm3"):
    of_type = {"config.json": {"model_type": of_model}}
    FOLDERS[f"a bare {of_model}"] = of_type | {"tokenizer_config.json": {}}
    FOLDERS[f"a {of_model} with a class"] = of_type | {"tokenizer_config.json": BARE}
for of_class in (*CLASS_TOKENS, "PreTrainedTokenizerFast"):
    FOLDERS[f"a {of_class}"] = {"tokenizer_config.json": BARE | {"tokenizer_class": of_class}}
SELDOM = [name for name in FOLDERS if name.startswith("a ") and not re.search("gpt2|qwen2|granite|a Gemma", name)]


@pytest.mark.parametrize(
    "files",
    [pytest.param(files, marks=[pytest.mark.more] * (name in SELDOM), id=name) for name, files in FOLDERS.items()],
)
def test_special_tokens_have_the_names_of_transformers(tmp_path, files):
    """Claim: a template names the special tokens that it names in `transformers`, with the same texts, and what is not
    defined or none there is so here: of tokenizer_config.json, of special_tokens_map.json, of extra tokens with names,
    and of the tokenizer's class where a folder says nothing. Source: the library itself, on the same folder."""
    shutil.copy(MODELS / "target" / "tokenizer.json", tmp_path)
    for name, content in {"config.json": {"model_type": "llama"}, **files}.items():
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / TEMPLATE_FILES[-1]).write_text(NAMES_SHOWN)
    ours, theirs = ChatTemplate.read(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert ours is not None
    expected = theirs.apply_chat_template(CHATS["one question"], tokenize=False)
    assert ours.render(CHATS["one question"], add_generation_prompt=False) == expected


PLACES = {
    "a list of named ones": {"tokenizer_config.json": [{"name": "tool_use", "template": "no"}, {"name": "default"}]},
    "a file beside a config": {"tokenizer_config.json": "no", "chat_template.jinja": None},
    "files of named ones": {"additional_chat_templates/tool_use.jinja": "no", "chat_template.jinja": None},
    "a file named default": {"additional_chat_templates/default.jinja": None, "chat_template.jinja": "no"},
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_a_template_is_found_where_transformers_finds_it(tmp_path, place):
    """Claim: of several templates in a folder the one that `apply_chat_template` takes for a chat without tools is
    rendered. Conclusive: any other one says "no"."""
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "target", folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for name, source in place.items():
        if name == "tokenizer_config.json":
            default = [{"template": CHATML} | entry for entry in source] if isinstance(source, list) else source
            (folder / name).write_text(json.dumps(config | {"chat_template": default}))
        else:
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(CHATML if source is None else source)
    ours, theirs = ChatTemplate.read(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    expected = theirs.apply_chat_template(CHATS["three turns"], tokenize=False)
    assert ours.render(CHATS["three turns"], add_generation_prompt=False) == expected and expected != "no"


def test_a_hub_snapshot_has_every_file_of_a_template():
    """Claim: of the files of a hub repository those that decide a prompt are fetched, and no code or pickle. Source:
    the hub library's own filter, on the names that the library reads."""
    wanted = ["chat_template.jinja", "additional_chat_templates/default.jinja", "special_tokens_map.json"]
    wanted += ["tokenizer.json", "tokenizer_config.json", "config.json"]
    unwanted = ["modeling_own.py", "pytorch_model.bin", "additional_chat_templates/own.py", "README.md"]
    assert sorted(filter_repo_objects([*wanted, *unwanted], allow_patterns=HUB_FILES)) == sorted(wanted)


RENDERED = {
    "tojson": """{{ messages | tojson }}{{ messages | tojson(ensure_ascii=True) }}{{ {'b': '<&>', 'a': [1, none, true]}
| tojson(indent=2, separators=(',', ': '), sort_keys=True) }}{{ "ü'<" | tojson }}{{ 1.5 | tojson(indent=none) }}""",
    "date": "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now(format='%d %b %Y') }}",
    "namespace": """{% set own = namespace(a=1, self=2) %}{% for m in messages %}{% set own.a = own.a + 1 %}{% endfor %}
{{ own.a }}{{ own.self }}{{ dict(a=1, b=2) | tojson }}{{ dict.fromkeys(['x'], 1) }}{{ dict([('k', 'v')]).k }}""",
    "generation": """{% set x = 1 %}{% for m in messages %}{% generation %}{% set x = 2 %}{{ m.content }}{{ x }}
{{ loop.index }}{% endgeneration %}{{ x }}{% endfor %}""",
    "loops": """{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% if loop.index == 2 %}
{% break %}{% endif %}{% else %}none{% endfor %}{% for i in range(10, 0, -3) %}{{ i }},{% endfor %}""",
    "spaces": "  {% if true %}\n    x  \n  {% endif %}\n\t{#- a -#}\n  {{- ' y ' -}}  \n{% raw %}{{ }}{% endraw %}\n\n",
    "tests": """{{ tools is none }}{{ documents is none }}{{ tool is defined }}{{ messages is iterable }}
{{ 'a' is string }}{{ messages[0] is mapping }}{{ messages is sequence }}{{ 3 is divisibleby(3) }}{{ 'x' in 'xyz' }}
{{ add_generation_prompt }}{{ messages[9] is undefined }}{{ messages[0].name is defined }}""",
    "filters": """{{ messages | map(attribute='role') | join(', ') }}{{ messages | selectattr('role', 'equalto', 'user')
| list | length }}{{ messages[-1].content | trim | upper | replace('A', 'b') | indent(4, first=true) }}
{{ messages[0] | items | list }}{{ none | default('d', true) }}{{ [3, 1, 2] | sort | first }}{{ 'a b' | title }}""",
    "strings": """{{ messages[0].content.strip().split(' ')[0] }}{{ 'ab'[::-1] }}{{ '%s-%d' % ('a', 3) }}
{{ '{}:{x}'.format(1, x=2) }}{{ 'a' ~ 1 ~ none }}{{ 'x' * 3 }}{{ 7 // 2 }}{{ 2 ** 8 }}{{ 'Ab'.lower() }}""",
    "macros": """{% macro say(m, end='!') %}{{ m.role }}: {{ m.content }}{{ end }}{{ caller() if caller }}{% endmacro %}
{% for m in messages %}{{ say(m) }}{% call say(m, '?') %}called{% endcall %}{% endfor %}""",
    "helpers": """{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{% set j = joiner('|') %}
{{ j() }}x{{ j() }}y{% filter upper %}z{% endfilter %}{% set block %} held {% endset %}{{ block | trim }}
{% with q = 1 %}{{ q }}{% endwith %}{{ '<b>' | e }}{{ '<b>' | escape | string }}""",
    "absent": "{{ nothing }}[{{ messages[0].nothing }}]{{ bos_token }}{{ eos_token is defined }}",
}
TOKENS = {"bos_token": "<s>"}


@pytest.mark.parametrize("template", RENDERED.values(), ids=RENDERED)
def test_functions_filters_and_tests_are_those_of_transformers(tmp_path, template):
    """Claim: every function, filter, test, tag and setting that templates use gives what it gives in `transformers`.
    Source: the library itself, which renders the same template on the same messages."""
    ours = ChatTemplate(tmp_path, template, TOKENS)
    for chat in CHATS.values():
        for begins in (True, False):
            told = {"chat_template": template, "add_generation_prompt": begins}
            ((expected,), _) = render_jinja_template([chat], **told, **TOKENS)
            assert ours.render(chat, add_generation_prompt=begins) == expected


FAULTS = {
    "{{ messages.append(1) }}": "SecurityError: access to attribute 'append'",
    "{{ raise_exception.__globals__['json'] }}": "SecurityError: access to attribute '__globals__'",
    "{{ namespace(_a=1) }}": "SecurityError: .*'_a'",
    "{% set n = namespace() %}{% set n._a = 1 %}": "SecurityError: .*'_a'",
    "{{ dict.mro() }}": "UndefinedError: .*mro",
    "{% for i in range(999999999) %}{% endfor %}": "OverflowError: Range too big",
    "{% include '/etc/passwd' %}": "TypeError: no loader for this environment",
    "{{ nothing.content }}": "UndefinedError: 'nothing' is undefined",
    "{{ 1 // (messages | length - messages | length) }}": "ZeroDivisionError",
    "{{ 'x' + 1 }}": "TypeError",
    "{{ messages | tojson(indent=messages) }}": "TypeError",
    "{{ strftime_now(1) }}": "TypeError",
}


@pytest.mark.parametrize("template", FAULTS)
def test_a_fault_of_a_template_is_the_templates(tmp_path, template):
    """Claim: a template that reaches for Python's objects, changes the messages, loops without end, reads a file or
    names what is not there is at fault, by the name of its folder, not the messages; in `transformers` it fails too."""
    found = ChatTemplate(tmp_path, template, {})
    with pytest.raises(ModelRefused, match=f"the chat template of {tmp_path} is at fault: {FAULTS[template]}"):
        found.render(CHATS["one question"])
    with pytest.raises((TemplateError, TypeError, ZeroDivisionError, OverflowError)):
        render_jinja_template([CHATS["one question"]], chat_template=template)


def test_a_template_refuses_messages_in_its_own_words(tmp_path):
    """Claim: what a template says by `raise_exception` is a refusal of the messages, and only that: the next messages
    are rendered."""
    found = ChatTemplate.read(folder_with(tmp_path / "model", TURNS, False))
    assert found is not None
    with pytest.raises(ConfigError, match="model refuses these messages: Roles must alternate$") as refusal:
        found.render([{"role": "assistant", "content": "Hello"}])
    assert not isinstance(refusal.value, ModelRefused)
    assert "[INST]" in found.render(CHATS["one question"])


def test_a_message_that_is_not_utf_8_is_refused():
    """Claim: a byte of standard input that is not UTF-8, which Python reads as half a surrogate pair in some locales,
    is an error of its message, not of the conversation. Conclusive: such a text, and the same without it."""
    found = ChatTemplate(MODELS / "target", CHATML, {})
    assert found.encode([{"role": "user", "content": "caf"}])
    with pytest.raises(ConfigError, match="not UTF-8"):
        found.encode([{"role": "user", "content": "caf\udce9"}])


def test_an_invalid_template_is_refused_and_none_is_none(tmp_path):
    """Claim: a syntax error is named when the folder is read; a folder without a template has none."""
    with pytest.raises(ConfigError, match="not valid: TemplateSyntaxError: Encountered unknown tag 'nothing'"):
        ChatTemplate.read(folder_with(tmp_path / "model", "{% nothing %}", False))
    assert ChatTemplate.read(MODELS / "target") is None
