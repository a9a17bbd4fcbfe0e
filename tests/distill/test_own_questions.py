"""Distillation without data: the target asks itself, by its chat template, and answers."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest
import tokenizers

from specdec.chat import template as chat_template
from specdec.chat.template import ChatTemplate
from specdec.distill.plans import QUESTION_TOKENS_MAX, Plans, turn_parts
from specdec.distill.settings import DistillSettings
from specdec.distill.writing import Passage, TextWriter
from specdec.distill.written import plans_of
from specdec.engine.interface import CausalModel
from specdec.engine.loading.model import load_model
from specdec.engine.loading.model_folder import open_model_folder
from specdec.errors import ConfigError
from tests.support.engine_models import make_tiny_model

BEFORE, AFTER = "[user] ", " [end]\n[assistant] "
TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}] {{ message.content }} [end]\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
WORDS_FIRST = "{% for message in messages %}{{ message.content }} [end]{% endfor %}"
WORDS_LAST = "{% for message in messages %}[user] {{ message.content }}{% endfor %}"
TWICE = "{% for message in messages %}{{ message.content }} {{ message.content }}{% endfor %}"
ANSWER_TOKENS = 9


@pytest.fixture
def chat_target(tmp_path: Path) -> Path:
    """A tiny target with a chat template."""
    folder = make_tiny_model(tmp_path / "target", "llama")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def ids_of(folder: Path, text: str) -> tuple[int, ...]:
    return tuple(tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids)


def test_without_data_the_target_asks_itself(chat_target: Path) -> None:
    """Claim: a folder with a chat template gives, without prompts and files, texts of two passages: the template up to
    the user's words and a question that the target draws at temperature 1, then the template up to the answer and the
    answer at the temperatures in turn, held-out ones at 0, 0.7 and 1 whatever was asked for. The template's beginning
    is not learned, and each text has its own seed, as have the held-out ones. Conclusive: the template's parts are
    written here by hand, and tokenized by the folder's tokenizer."""
    assert turn_parts(chat_target) == (BEFORE, AFTER)
    told = {"target": str(chat_target), "out": chat_target / "out", "tokens": 1, "text_tokens": ANSWER_TOKENS}
    splits = plans_of(DistillSettings(**told, text_temperatures="0,0.7"), open_model_folder(str(chat_target)))
    plans = {name: own.make(0, 4) for name, own in splits.items()}
    begin, middle = ids_of(chat_target, BEFORE), ids_of(chat_target, AFTER)
    question = Passage(begin, QUESTION_TOKENS_MAX, 1.0)
    for split, temperatures in (("train", (0.0, 0.7, 0.0, 0.7)), ("heldout", (0.0, 0.7, 1.0, 0.0))):
        own = plans[split]
        assert [plan.passages for plan in own] == [
            (question, Passage(middle, ANSWER_TOKENS, temperature)) for temperature in temperatures
        ]
        assert {plan.learned_from for plan in own} == {len(begin)}
    assert len({plan.seed for own in plans.values() for plan in own}) == 8


def test_the_question_is_the_targets_own(chat_target: Path) -> None:
    """Claim: the target writes such a text: the template's beginning, a question, the template's middle, an answer;
    held-out acceptance counts from the answer. Greedy answers have different questions, as these are drawn. Conclusive:
    a real tiny model; a question without an end token has QUESTION_TOKENS_MAX tokens."""
    target: CausalModel = load_model(str(chat_target), dtype="float32", has_stable_rows=False)
    plans = Plans(chat_target, (0.0,), ANSWER_TOKENS, "1").make(0, 3)
    with TextWriter(target, 3, max(plan.length_max for plan in plans)) as writer:
        texts = writer.write(plans)
    begin, middle = ids_of(chat_target, BEFORE), ids_of(chat_target, AFTER)
    questions = set()
    for own, answered_from in zip(texts.token_ids.split(texts.lengths.tolist()), texts.answered_from.tolist()):
        tokens = tuple(own.tolist())
        question = tokens[len(begin) : answered_from + 1 - len(middle)]
        assert tokens[: len(begin)] == begin and tokens[answered_from + 1 - len(middle) : answered_from + 1] == middle
        assert 0 < len(question) <= QUESTION_TOKENS_MAX and len(tokens) > answered_from + 1
        questions.add(question)
    assert len(questions) == 3
    assert texts.temperatures.tolist() == [0.0] * 3, "those of the answers"


def test_texts_of_a_template_with_a_date_go_on_the_next_day(chat_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Claim: with a template that says today's date, plans and their digest are the same on another day, so a run that
    was stopped continues with the texts it has, bit for bit; a chat has the date of its day. Conclusive: the clock of
    the template's own function is replaced, and the chat shows that it is."""
    (chat_target / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }} " + TEMPLATE)
    told = []
    for day in (1, 2):

        class Clock(datetime):
            @classmethod
            def now(cls, tz: object = None) -> datetime:
                return datetime(2026, 3, day)  # noqa: B023  # called before the next day

        monkeypatch.setattr(chat_template, "datetime", Clock)
        chat = ChatTemplate.read(chat_target)
        assert chat is not None and chat.render([]).startswith(f"0{day} Mar 2026")
        plans = Plans(chat_target, (0.0,), ANSWER_TOKENS, "1")
        told.append((plans.digest(0, 3, "target"), plans.make(0, 3)))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        (None, "has no chat template"),
        (TWICE, "does not repeat the user's words once"),
        (WORDS_FIRST, "has no tokens before the user's words or none after them"),
        (WORDS_LAST, "has no tokens before the user's words or none after them"),
    ],
)
def test_a_target_that_cannot_ask_itself_is_refused(chat_target: Path, template: str | None, sentence: str) -> None:
    """Claim: without a template, with one that says the user's words twice, and with one that has nothing before or
    after them, there are no such texts: the sentence names the folder. Without tokens before them the first step has
    none to feed; without tokens after them, the step after a question that an end token ends."""
    (chat_target / "chat_template.jinja").unlink()
    if template is not None:
        (chat_target / "chat_template.jinja").write_text(template)
    with pytest.raises(ConfigError, match=f"target .*{sentence}|target {sentence}"):
        Plans(chat_target, (0.0,), ANSWER_TOKENS, "1")
