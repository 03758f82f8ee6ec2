"""Chats whose last message goes on, against Transformers' continue_final_message on the same templates."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from mllm_compile.errors import RequestError
from mllm_compile.text.chat_template import ChatTemplate
from tests.text.calls import templates
from tests.text.calls.cases import NAMES, TOKENS, template
from tests.text.test_tokenizer import BRACKETS, CHATML, REASONING

TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end of turn>\n{% endfor %}"
PARTS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}"
)
OWN = {"CHATML": CHATML, "BRACKETS": BRACKETS, "REASONING": REASONING, "TRIMS": TRIMS, "PARTS": PARTS}
# Pieces of the templates' own marks, of the other messages, of nothing, and with spaces at either end.
CONTENTS = (
    *("im", "end", "e", "d", "|", "<", ">", "n", "A", "<|im_end|>", "<|im_", "\n", "assistant", "TAG", "END_"),
    *("", " ", "The answer is", "The answer is ", " The answer is", "Is it in or at the end?", "a\n\n", "</think>"),
    *("<think>so</think>\n\nyes", "CONTINUE_FINAL_MESSAGE_TAG ", "ünï 猫 🙂", "{{ x }}", "\\n", "turn>"),
)
USER = {"role": "user", "content": "Is it in or at the end?"}


def theirs(source, messages):
    """Transformers' prompt; None where it refuses."""
    try:
        texts, _ = render_jinja_template([messages], chat_template=source, continue_final_message=True, **TOKENS)
    except Exception:
        return None
    return texts[0]


def ours(rendered, messages):
    try:
        return rendered.render(messages, continue_final_message=True)
    except RequestError:
        return None


@pytest.mark.parametrize("name", [*NAMES, *OWN])
def test_an_answer_goes_on_where_transformers_goes_on(name):
    source = OWN[name] if name in OWN else getattr(templates, name)
    one = ChatTemplate({"default": source}, TOKENS) if name in OWN else template(name)
    for content in CONTENTS:
        messages = [USER, {"role": "assistant", "content": content}]
        assert ours(one, messages) == theirs(source, messages), content


@pytest.mark.parametrize(
    "parts",
    [
        [{"type": "text", "text": "e"}],
        [{"type": "text", "text": "one"}, {"type": "text", "text": "end"}],
        [{"type": "text", "text": "of"}, {"type": "image"}],
        [{"type": "text", "text": ""}],
        [{"type": "image"}],
        [],
    ],
)
def test_the_last_text_of_a_list_goes_on(parts):
    messages = [USER, {"role": "assistant", "content": parts}]
    assert ours(ChatTemplate({"default": PARTS}, TOKENS), messages) == theirs(PARTS, messages)


def test_a_list_of_texts_goes_on_in_a_template_that_takes_a_text():
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "im"}]
    text = ChatTemplate({"default": CHATML}, TOKENS).render(
        [USER, {"role": "assistant", "content": parts}], continue_final_message=True
    )
    assert text.endswith("<|im_start|>assistant\none\nim")


@pytest.mark.parametrize(
    ("last", "options", "says"),
    [
        ({"content": None}, {}, "expected a last message whose content is a text"),
        ({"content": 3}, {}, "expected a last message whose content is a text"),
        ({"content": "", "tool_calls": [{"name": "f"}]}, {}, "the last message has tool_calls"),
        ({"content": "hello"}, {"add_generation_prompt": True}, "without add_generation_prompt"),
        ({"content": "hello"}, {"continue_final_message": "content"}, "expected true or false, got str 'content'"),
    ],
)
def test_a_last_message_that_cannot_go_on_is_refused(last, options, says):
    with pytest.raises(RequestError, match=says):
        ChatTemplate({"default": CHATML}, TOKENS).render(
            [USER, {"role": "assistant", **last}], **{"continue_final_message": True, **options}
        )


def test_a_text_that_the_template_writes_twice_goes_on_at_its_last_place():
    twice = ChatTemplate({"default": "{% for m in messages %}{{ m.content }}|{{ m.content }}<end>{% endfor %}"}, TOKENS)
    assert twice.render([{"role": "assistant", "content": "end"}], continue_final_message=True) == "end|end"


def test_a_template_that_changes_the_last_message_is_refused():
    loud = ChatTemplate({"default": "{% for m in messages %}{{ m.content | upper }}{% endfor %}"}, TOKENS)
    with pytest.raises(RequestError, match="does not repeat the last message as it is"):
        loud.render([USER, {"role": "assistant", "content": "hello"}], continue_final_message=True)
