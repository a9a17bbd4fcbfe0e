"""Templates of real models, with tools, arguments and messages to continue: the prompts of `transformers`.

The sources of `templates/` are named in its README.md.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from specdec.chat.messages import HERMES_TOOLS
from specdec.chat.template import ChatTemplate
from specdec.errors import ConfigError
from tests.support.services import MODELS

SMOLLM2 = MODELS / "smollm2-draft" / "chat_template.jinja"
TEMPLATES = [*sorted((Path(__file__).parent / "templates").glob("*.jinja")), SMOLLM2]
NAMES = [*(file.stem for file in TEMPLATES[:-1]), "smollm2"]
WITHOUT_TOOLS = {"deepseekv3", "gemma", "gemma3", "llama3", "phi3_5", "smollm2"}
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<start_of_turn>", "<|end|>", "[INST]")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": 'The "weather" of a place, in °C.',
            "parameters": {
                "type": "object",
                "properties": {
                    "place": {"type": "string", "description": "Name & country"},
                    "unit": {"type": "string", "enum": ["C", "F"]},
                },
                "required": ["place"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "now", "description": "", "parameters": {"type": "object", "properties": {}}},
    },
]
ARGUMENTS = {"place": "Zürich, {CH}", "days": [1, 2], "unit": "C"}
CALL_IDS = ("abcdefgh1", "abcdefgh2")  # Mistral's templates ask for nine characters


def call(number: int, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": CALL_IDS[number], "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED = {"role": "user", "content": " What is the weather? "}
RESULT = {"role": "tool", "tool_call_id": CALL_IDS[0], "name": "get_weather", "content": '{"sun": true}'}
SAID = {"role": "assistant", "content": "Sunny <b>& warm</b>."}
CHATS: dict[str, tuple[list[dict], list[dict]]] = {  # as programs send them, and as a template is to get them
    "plain": ([ASKED, SAID, ASKED], [ASKED, SAID, ASKED]),
    "system": (
        [{"role": "system", "content": "Be brief."}, ASKED],
        [{"role": "system", "content": "Be brief."}, ASKED],
    ),
    "one call": (
        [ASKED, {"role": "assistant", "content": None, "tool_calls": [call(0, "get_weather", json.dumps(ARGUMENTS))]}],
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [call(0, "get_weather", ARGUMENTS)]}],
    ),
    "a call's result": (
        [ASKED, {"role": "assistant", "tool_calls": [call(0, "get_weather", json.dumps(ARGUMENTS))]}, RESULT],
        [ASKED, {"role": "assistant", "content": "", "tool_calls": [call(0, "get_weather", ARGUMENTS)]}, RESULT],
    ),
    "two calls, then words": (
        [
            ASKED,
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [call(0, "get_weather", json.dumps(ARGUMENTS)), call(1, "now", "")],
            },
            RESULT,
            RESULT | {"tool_call_id": CALL_IDS[1], "content": "noon"},
            SAID | {"tool_calls": None},
            ASKED,
        ],
        [
            ASKED,
            {
                "role": "assistant",
                "content": "Let me see.",
                "tool_calls": [call(0, "get_weather", ARGUMENTS), call(1, "now", {})],
            },
            RESULT,
            RESULT | {"tool_call_id": CALL_IDS[1], "content": "noon"},
            SAID,
            ASKED,
        ],
    ),
}
REFUSED = {("gemma", "system"), ("llama3_1", "two calls, then words"), ("llama3_2", "two calls, then words")}
KWARGS = {
    "enable_thinking": False,
    "reasoning_effort": "high",
    "date_string": "1 May 2026",
    "tools_in_user_message": False,
    "builtin_tools": ["browser"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens of several models."""
    found = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(MODELS / "target", found)
    words = Tokenizer.from_file(str(found / "tokenizer.json"))
    words.add_special_tokens(list(SPECIAL))
    words.save(str(found / "tokenizer.json"))
    config = json.loads((found / "tokenizer_config.json").read_text())
    (found / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<s>", "eos_token": "</s>"}))
    return found


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    """The tokenizer of `transformers`."""
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=TEMPLATES, ids=NAMES)
def template(request: pytest.FixtureRequest, folder: Path) -> ChatTemplate:
    """Each template, over that tokenizer."""
    return ChatTemplate(folder, request.param.read_text(encoding="utf-8"), {"bos_token": "<s>", "eos_token": "</s>"})


def name_of(template: ChatTemplate) -> str:
    """The name of a template."""
    return next(name for name, file in zip(NAMES, TEMPLATES) if file.read_text(encoding="utf-8") == template.source)


def takes_tools(template: ChatTemplate) -> bool:
    return "tools" in template.variables


def test_prompts_are_those_of_transformers(template: ChatTemplate, theirs: Any) -> None:
    """Claim: messages as programs send them have the token ids that `apply_chat_template` gives for the same ones as
    templates want them, with tools if the template takes them, and what it refuses is refused here. Source: the
    library. Conclusive: the second form is written out above, and the special tokens are tokens of this tokenizer."""
    tools = TOOLS if takes_tools(template) else None
    for chat, (sent, wanted) in CHATS.items():
        if "call" in chat and tools is None:
            continue  # a template without tools has a test of its own
        begins = chat != "one call"
        told = {"chat_template": template.source, "tools": tools, "add_generation_prompt": begins}
        if (name_of(template), chat) in REFUSED:
            with pytest.raises(TemplateError) as refusal:
                theirs.apply_chat_template(wanted, **told)
            with pytest.raises(ConfigError, match=f"refuses these messages: {refusal.value}$"):
                template.encode(sent, tools, add_generation_prompt=begins)
            continue
        expected = theirs.apply_chat_template(wanted, return_dict=False, **told)
        assert list(template.encode(sent, tools, add_generation_prompt=begins)) == expected and len(expected) > 10


def test_arguments_reach_the_template(template: ChatTemplate, theirs: Any) -> None:
    """Claim: an argument that the template names gives the prompt of `transformers`; another one, and one that is
    reserved, is refused by its name. Conclusive: the first five are named by some of these templates and not by others,
    and change the prompt of those which name one."""
    tools = TOOLS if takes_tools(template) else None
    plain = template.render([ASKED], tools)
    for name, value in KWARGS.items():
        if name not in template.variables:
            with pytest.raises(ConfigError, match=f"argument '{name}' is not named by .*, which names"):
                template.render([ASKED], tools, {name: value})
            continue
        told = {"chat_template": template.source, "add_generation_prompt": True, "tools": tools, name: value}
        found = template.render([ASKED], tools, {name: value})
        assert found == theirs.apply_chat_template([ASKED], tokenize=False, **told) != plain
    for name in ("messages", "tools", "add_generation_prompt", "bos_token", "pad_token"):
        with pytest.raises(ConfigError, match=f"argument '{name}' is reserved"):
            template.render([ASKED], None, {name: "x"})
    for name in ("chat_template", "range", "content_of", "loop", "message"):
        with pytest.raises(ConfigError, match=f"argument '{name}' is not named"):
            template.render([ASKED], None, {name: "x"})


@pytest.mark.parametrize("words", ["The weather is", "The weather is ", " Two\n\nlines\n"])
def test_a_message_is_continued_as_by_transformers(template: ChatTemplate, theirs: Any, words: str) -> None:
    """Claim: with `continue_final_message` the prompt is that of `transformers`: it ends within the message, whether
    the template keeps its spaces or not. Source: the library."""
    chat = [ASKED, {"role": "assistant", "content": words}]
    told = {"chat_template": template.source, "continue_final_message": True, "tokenize": False}
    expected = theirs.apply_chat_template(chat, **told)
    found = template.render(chat, add_generation_prompt=False, continue_final_message=True)
    assert found == expected and found.rstrip().endswith(words.strip())


def test_a_template_without_tools_gets_them_in_words(template: ChatTemplate, theirs: Any) -> None:
    """Claim: which templates take tools; one that does not gets tools, calls and results as messages in the form of
    Hermes, so that the prompt is that of `transformers` for the messages below; Gemma's refuses system messages."""
    assert takes_tools(template) == (name_of(template) not in WITHOUT_TOOLS)
    if takes_tools(template):
        return
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in TOOLS)
    calls = [f'{{"name": "get_weather", "arguments": {json.dumps(ARGUMENTS, ensure_ascii=False)}}}']
    calls += ['{"name": "now", "arguments": {}}']
    results = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in ('{"sun": true}', "noon"))
    said = "\n".join(["Let me see.", *(f"<tool_call>\n{text}\n</tool_call>" for text in calls)])
    wanted = [
        {"role": "system", "content": HERMES_TOOLS.format(tools=lines)},
        ASKED,
        {"role": "assistant", "content": said},
        {"role": "user", "content": results},
        SAID,
        ASKED,
    ]
    sent, _ = CHATS["two calls, then words"]
    told = {"chat_template": template.source, "add_generation_prompt": True}
    if name_of(template) == "gemma":
        with pytest.raises(ConfigError, match="refuses these messages: System role not supported"):
            template.encode(sent, TOOLS)
        return
    expected = theirs.apply_chat_template(wanted, return_dict=False, **told)
    assert list(template.encode(sent, TOOLS)) == expected
    wanted[0] = {"role": "system", "content": f"Be brief.\n\n{HERMES_TOOLS.format(tools=lines)}"}
    expected = theirs.apply_chat_template(wanted, return_dict=False, **told)
    assert list(template.encode([{"role": "system", "content": "Be brief."}, *sent], TOOLS)) == expected


def test_parts_and_developers_are_what_the_template_knows(template: ChatTemplate, theirs: Any) -> None:
    """Claim: a list of parts reaches the templates that read lists, and the others as one text; `developer` stays one
    for those that name it, and is `system` for the others. Source: the library, given the second form."""
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    name = name_of(template)
    is_list = name in ("gemma3", "glm4moe", "mistral_v3_tekken", "qwen3_5_think")
    told = {"chat_template": template.source, "add_generation_prompt": True, "tokenize": False}
    expected = theirs.apply_chat_template([{"role": "user", "content": parts if is_list else "One.\nTwo."}], **told)
    assert template.render([{"role": "user", "content": parts}]) == expected
    role = "developer" if name == "gptoss" else "system"
    if name != "gemma":
        expected = theirs.apply_chat_template([{"role": role, "content": "Be brief."}, ASKED], **told)
        assert template.render([{"role": "developer", "content": "Be brief."}, ASKED]) == expected
