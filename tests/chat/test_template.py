"""Chat templates: rendered as `transformers` renders them, in a sandbox."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from specdec.chat.template import TEMPLATE_FILE, ChatTemplate
from specdec.errors import ConfigError
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
        (folder / TEMPLATE_FILE).write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("in_config", [True, False], ids=["tokenizer_config.json", TEMPLATE_FILE])
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
        assert ours.render(CHATS[chat], begins) == expected and len(expected) > 10


@pytest.mark.parametrize("chat", CHATS)
def test_the_chat_models_own_template_renders_as_transformers_renders_it(chat):
    """Claim: so does the template of SmolLM2-135M-Instruct, which its shipped draft has too."""
    folder = MODELS / "smollm2-draft"
    ours, theirs = ChatTemplate.read(folder), AutoTokenizer.from_pretrained(folder)
    assert ours is not None
    for begins in (True, False):
        expected = theirs.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=begins)
        assert ours.render(CHATS[chat], begins) == expected and "<|im_start|>user" in expected


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


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% for i in range(999999999) %}{% endfor %}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('no such role') }}",
    ],
)
def test_a_template_reaches_nothing_but_its_messages(tmp_path, template):
    """Claim: a template that reaches for Python's objects, changes the messages, loops without end or reads a file is
    refused in one line that names the folder; so is one that refuses the messages."""
    folder = folder_with(tmp_path / "model", template, False)
    with pytest.raises(ConfigError, match="refuses these messages"):
        found = ChatTemplate.read(folder)
        assert found is not None
        found.render(CHATS["one question"])


def test_a_message_that_is_not_utf_8_is_refused():
    """Claim: a byte of standard input that is not UTF-8, which Python reads as half a surrogate pair in some locales,
    is an error of its message, not of the conversation. Conclusive: such a text, and the same without it."""
    found = ChatTemplate(MODELS / "target", CHATML, {})
    assert found.encode([{"role": "user", "content": "caf"}])
    with pytest.raises(ConfigError, match="not UTF-8"):
        found.encode([{"role": "user", "content": "caf\udce9"}])


def test_an_invalid_template_is_refused_and_none_is_none(tmp_path):
    """Claim: a syntax error is named when the folder is read; a folder without a template has none."""
    with pytest.raises(ConfigError, match="not valid: Encountered unknown tag 'nothing'"):
        ChatTemplate.read(folder_with(tmp_path / "model", "{% nothing %}", False))
    assert ChatTemplate.read(MODELS / "target") is None
