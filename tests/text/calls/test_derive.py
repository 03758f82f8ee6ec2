"""Facts that are derived from chat templates."""

import pytest

from mllm_compile.text.calls.derive import derive
from mllm_compile.text.calls.syntax import CallSyntax, Channels, Reasoning
from mllm_compile.text.chat_template import ChatTemplate
from tests.text.calls import templates
from tests.text.calls.cases import NAMES, PYTHONIC, SHOWING, TOKENS, answer, call, named, read, syntax

# Template → where its calls' syntax is from. "by" is derived from what the template renders.
ORIGINS = {
    "QWEN25": "by the template: <tool_call>",
    "QWEN3": "by the template: <tool_call>",
    "QWEN3_THINKING": "by the template: <tool_call>",
    "QWEN3_CODER": "by the template: <tool_call> <function=",
    "LLAMA31": "as llama3",
    "LLAMA32": "as llama3 without a tag",
    "LLAMA32_PYTHONIC": "as pythonic",
    "MISTRAL": "by the template: [TOOL_CALLS] [",
    "MISTRAL_V11": "by the template: [TOOL_CALLS]",
    "DEEPSEEK_V3": "by the template: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>",
    "DEEPSEEK_V31": "by the template: <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "DEEPSEEK_V32": 'by the template: <｜DSML｜function_calls> <｜DSML｜invoke name="',
    "GLM45": "by the template: <tool_call>",
    "KIMI_K2": "as kimi",
    "GPT_OSS": "as harmony",
    "GRANITE3": "as granite",
    "PHI4_MINI": "as functools",
    "MINIMAX_M2": 'by the template: <minimax:tool_call> <invoke name="',
    "OLMO3": "by the template: <function_calls>",
    "HUNYUAN": "by the template: <tool_calls>[",
    "PLAIN": "",
}
THINKS = ("QWEN3", "QWEN3_THINKING", "DEEPSEEK_V31", "DEEPSEEK_V32", "GLM45", "MINIMAX_M2")
# Text beside calls is dropped by these, or is reasoning.
DROPS_TEXT = ("LLAMA31", "LLAMA32", "MISTRAL", "OLMO3", "GPT_OSS", "LLAMA32_PYTHONIC")
NESTED = {"city": 'São Paulo, "SP" <b> it\'s', "where": {"a": [1, {"b": None}], "c": ""}, "tags": [], "exact": False}


def test_every_template_is_listed():
    assert set(ORIGINS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_syntax_is_the_template_s_own_or_a_known_one(name):
    assert syntax(name).origin == ORIGINS[name]
    assert syntax(name).reasoning == (Reasoning("<think>", "</think>") if name in THINKS else None)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_template_takes_is_found_out(name):
    assert syntax(name).arguments_are_text == (name in ("DEEPSEEK_V3", "DEEPSEEK_V31", "PHI4_MINI"))
    assert syntax(name).ids_are_short == (name == "MISTRAL")
    assert syntax(name).is_single == (name in ("LLAMA31", "LLAMA32"))


@pytest.mark.parametrize("name", SHOWING)
def test_calls_that_a_template_writes_are_read_back(name):
    arguments = {"city": "Zürich (ZH)", "days": 2, "tags": ["a", "b"]} if name in PYTHONIC else NESTED
    calls = [("get_weather", arguments), ("now", {})]
    if syntax(name).is_single or isinstance(syntax(name).calls, Channels):
        calls = calls[:1]
    ids = ["functions.get_weather:0", "functions.now:1"] if name == "KIMI_K2" else ["abcdefghi", "123456789"]
    found = read(name, answer(name, [call(*one, call_id) for one, call_id in zip(calls, ids, strict=False)]))
    assert named(found) == calls
    assert (found.content, found.reasoning, found.reason) == ("", "", "tool_calls")
    assert all(found.ends)


@pytest.mark.parametrize("name", [name for name in SHOWING if name not in DROPS_TEXT])
def test_text_ahead_of_calls_is_read_back(name):
    found = read(name, answer(name, [call("now", {}, "functions.now:0")], "Let me look.\nNow:"))
    assert (found.content, named(found)) == ("Let me look.\nNow:", [("now", {})])


@pytest.mark.parametrize("name", [name for name in THINKS if name != "DEEPSEEK_V31"])  # which drops it
def test_reasoning_is_read_back(name):
    found = read(name, answer(name, [call("now", {})], "So.", "Hm: <tool_call>?\n\nYes."))
    assert (found.reasoning, found.content, named(found)) == ("Hm: <tool_call>?\n\nYes.", "So.", [("now", {})])


def test_whether_a_prompt_has_begun_to_reason_is_seen_at_its_end():
    for name, options, is_open in (
        ("QWEN3", {}, False),
        ("QWEN3", {"enable_thinking": False}, False),
        ("QWEN3_THINKING", {}, True),
        ("DEEPSEEK_V31", {}, False),
        ("DEEPSEEK_V31", {"thinking": True}, True),
        ("MINIMAX_M2", {}, True),
    ):
        template = ChatTemplate({"default": getattr(templates, name)}, TOKENS)
        prompt = template.render([{"role": "user", "content": "<think>"}], **options)
        assert syntax(name).reasoning.is_opened_by(prompt) == is_open, (name, options)


def test_a_template_without_tools_says_so():
    assert syntax("PLAIN").calls is None
    assert "reads no such variable" in syntax("PLAIN").why_not
    assert (
        syntax("PLAIN")
        .described()
        .startswith(
            "tools: not recognised (the model's chat template reads no such variable, only messages); reasoning: "
        )
    )
    assert syntax("QWEN3").described() == "tools: recognised (by the template: <tool_call>); reasoning: <think>"


def test_a_template_for_tools_beside_the_default_one_is_the_one_that_is_looked_at():
    template = ChatTemplate({"default": templates.PLAIN, "tool_use": templates.QWEN25}, TOKENS)
    assert template.source_for_tools == templates.QWEN25
    found = derive(template.render, template.source_for_tools)
    assert isinstance(found.calls, CallSyntax) and found.calls.call_begin == "<tool_call>\n"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("{{ f.name }}", "{{ f.name | upper }}"), ""),  # a known mark, and not what it says
        (("<tool_call>", "<call>"), "by the template: <call>"),
        (("<tool_call>", "⟦call⟧"), "by the template: ⟦call⟧"),
        (('"arguments": ', '"input": '), "by the template: <tool_call>"),
        (("{{- '}\\n</tool_call>'", "{{- '}'"), "by the template: <tool_call>"),
    ],
)
def test_a_template_that_is_like_a_known_one_and_not_it(change, said):
    template = ChatTemplate({"default": templates.QWEN25.replace(*change)}, TOKENS)
    assert derive(template.render, template.source_for_tools).origin == said


def test_a_call_that_is_nested_in_an_object_is_found():
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}|{{ m.content }}{% if m.tool_calls %}"
        "<calls>{{ m.tool_calls | tojson }}</calls>{% endif %}{% endfor %}|"
    )
    template = ChatTemplate({"default": source}, {})
    found = derive(template.render, source)
    assert found.calls.body.name == ("function", "name")
    assert found.calls.body.arguments == ("function", "arguments")
    text = 'Well.<calls>[{"function": {"arguments": {"a": 1}, "name": "now"}, "id": "z"}, {"function": {"name": "x"}}]'
    assert named(read(found, text)) == [("now", {"a": 1}), ("x", {})]


# A template's text of calls, `call`, and its error. `f` is a call's function.
ODD = {
    "an id ahead of the name": (
        "<|call|>{{ call.id }}<|name|>{{ f.name }}<|args|>{{ f.arguments | tojson }}<|end|>",
        "by the template: <|call|>",
    ),
    "a name as a key": ('<|calls|>[{"{{ f.name }}": {{ f.arguments | tojson }}}]<|/calls|>', "by the template: <|cal"),
    "values that only some have quotes around": (
        "<|call>{{ f.name }}{% raw %}{{% endraw %}{% for k, v in f.arguments | items %}{{ k }}:"
        "{% if v is string %}<|'|>{{ v }}<|'|>{% else %}{{ v | tojson }}{% endif %},{% endfor %}}<call|>",
        "",
    ),
    "values with nothing around": (
        "<call>{{ f.name }}("
        "{% for k, v in f.arguments | items %}{{ k }}: {{ v }}{{ ', ' if not loop.last }}{% endfor %})",
        "",
    ),
    "a known mark and another syntax": ("[<tool_call>[{{ f.name }}<{{ f.arguments | list }}>]</tool_call>]", ""),
    "nothing to tell it by": (
        '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}',
        "by the template: no mark",
    ),
}


@pytest.mark.parametrize("case", ODD)
def test_what_other_templates_write_is_read_back_or_not_recognised(case):
    written, origin = ODD[case]
    source = (
        "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{% set f = call.function %}" + written + "{% endfor %}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    found = derive(ChatTemplate({"default": source}, {}).render, source)
    assert found.origin.startswith(origin) and bool(found.calls) == bool(origin)
    if not origin:
        assert found.why_not == "the template writes calls in a way that is not known"


def test_an_id_ahead_of_the_name_is_the_call_s():
    source = (
        "{{ tools }}{% for m in messages %}|{{ m.content }}{% for call in m.tool_calls or [] %}"
        "<|call|>{{ call.id }}<|name|>{{ call.function.name }}<|args|>{{ call.function.arguments | tojson }}<|end|>"
        "{% endfor %}{% endfor %}|"
    )
    found = derive(ChatTemplate({"default": source}, {}).render, source)
    text = '<|call|>c-1<|name|>now<|args|>{"a": 1}<|end|><|call|>c-2<|name|>now<|args|>{}<|end|>'
    assert read(found, *text).calls == [("c-1", "now", '{"a": 1}'), ("c-2", "now", "{}")]


def test_a_template_that_leaves_the_second_call_out_takes_one():
    source = (
        "{{ tools }}{% for m in messages %}|{{ m.content }}{% if m.tool_calls %}"
        "<call>{{ m.tool_calls[0].function | tojson }}</call>{% endif %}{% endfor %}|"
    )
    found = derive(ChatTemplate({"default": source}, {}).render, source)
    assert found.is_single and found.calls.call_begin == "<call>"


def test_a_template_that_does_not_end_is_given_up_on(monkeypatch):
    monkeypatch.setattr("mllm_compile.text.calls.derive._MOST_SECONDS", 1.0)
    spin = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": "{{ tools }}" + spin}, {})
    found = derive(template.render, template.source_for_tools)
    assert found.calls is None and "the model's chat template took more than 1 s to fail" in found.why_not


def test_a_template_that_is_no_template_is_not_recognised():
    template = ChatTemplate({"default": "{% for"}, {})
    assert "is no valid Jinja template" in derive(template.render, template.source_for_tools).why_not
