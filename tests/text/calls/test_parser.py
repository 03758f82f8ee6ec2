"""A model's text into events, however it is cut."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mllm_compile.text.calls.output import new_id
from mllm_compile.text.calls.parser import CallParser
from mllm_compile.text.calls.syntax import CallSyntax, Channels, ChatSyntax, NameThenJson, Parameters, Reasoning
from mllm_compile.text.calls.tools import read_tools
from tests.text.calls.cases import NAMES, SHOWING, TOOLS, answer, call, named, read, syntax

RECOGNISED = [name for name in NAMES if name != "PLAIN"]
HERMES = "QWEN3"
SPACED = '{ "city" :"a\\u00e9\\"}{<",\n\t"days": 1.0e+2 , "tags":[ ]  }'  # no writer of JSON would write it so


def pieces_of(text, cuts):
    edges = [0, *sorted(cut for cut in cuts if cut <= len(text)), len(text)]
    return [text[begin:end] for begin, end in pairwise(edges)]


def fragments(name):
    """Parts of what a model of this syntax writes, and of what it had better not."""
    calls, reasoning = syntax(name).calls, syntax(name).reasoning
    own = [text for text in calls.literals() if text] + ([reasoning.begin, reasoning.end] if reasoning else [])
    own += [text[: len(text) // 2] for text in own]
    own += ["get_weather", "now", "city", "functions.now:0", "commentary to=functions.now ", "analysis", "final"]
    own += ['{"name": "now", "arguments": {"city": "x"}}', '{"name": "now", "parameters": ', '{"arguments": {}, ', '"}']
    own += ["{", "}", "[", "]", '"', "\\", ": ", ", ", "'", "(", ")", "=", " ", "\n", "x", "1", SPACED, "now(a='b')"]
    return st.lists(st.sampled_from(own), max_size=14).map("".join)


@pytest.mark.parametrize("name", RECOGNISED)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_how_any_text_is_cut_does_not_matter(name, data):
    text = data.draw(fragments(name))
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=5))
    options = {"reasoning_is_open": data.draw(st.booleans()), "is_parallel": data.draw(st.booleans())}
    whole = read(name, text, **options)
    assert read(name, *pieces_of(text, cuts), **options) == whole
    assert read(name, *text, **options) == whole


@pytest.mark.parametrize("name", SHOWING)
def test_every_cut_of_calls_gives_the_same(name):
    calls = [
        call("get_weather", {"city": "a b", "days": 3}, "functions.get_weather:0"),
        call("now", {}, "functions.now:1"),
    ]
    if name == "MISTRAL":
        calls = [one | {"id": f"abcdefgh{at}"} for at, one in enumerate(calls)]
    if syntax(name).is_single or isinstance(syntax(name).calls, Channels):
        calls = calls[:1]
    text = answer(name, calls)
    whole = read(name, text)
    assert len(whole.calls) == len(calls)
    for cut in range(len(text)):
        assert read(name, text[:cut], text[cut:]) == whole


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=80, deadline=None)
@given(
    arguments=st.dictionaries(st.text(), json_values, max_size=3),
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
    cuts=st.lists(st.integers(0, 200), max_size=6),
    name=st.sampled_from(["QWEN3", "HUNYUAN", "MISTRAL_V11", "DEEPSEEK_V31", "KIMI_K2", "GPT_OSS"]),
)
def test_json_arguments_are_passed_on_to_the_byte(arguments, indent, is_ascii, cuts, name):
    written = json.dumps(arguments, indent=indent, ensure_ascii=is_ascii)
    text = {
        "QWEN3": f'<tool_call>\n{{"name": "now", "arguments": {written}}}\n</tool_call>',
        "HUNYUAN": f'<tool_calls>[{{"arguments": {written}, "name": "now"}}]</tool_calls>',
        "MISTRAL_V11": f"[TOOL_CALLS]now[ARGS]{written}",
        "DEEPSEEK_V31": f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{written}<｜tool▁call▁end｜>",
        "KIMI_K2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>"
        f"{written}<|tool_call_end|><|tool_calls_section_end|>",
        "GPT_OSS": f"<|channel|>commentary to=functions.now <|constrain|>json<|message|>{written}<|call|>",
    }[name]
    if name == "GPT_OSS" and "<|" in written:
        return  # there the mark is a token of its own, which no text has
    found = read(name, *pieces_of(text, cuts))
    assert [(called, given) for _, called, given in found.calls] == [("now", written)]
    assert found.content == "" and found.ends == [True]


def test_arguments_come_as_they_are_written():
    parser = CallParser(syntax(HERMES), read_tools(TOOLS), make_id=lambda: "i")
    shown = [parser.push(piece) for piece in ('<tool_call>\n{"na', 'me": "now", "arguments": {"a', '": "b', '"}}')]
    assert shown[0] == []
    assert [type(event).__name__ for event in shown[1]] == ["CallStart", "ArgumentsDelta"]
    assert [event.text for event in shown[1][1:] + shown[2] + shown[3]] == ['{"a', '": "b', '"}']


# --- content ---


@pytest.mark.parametrize("name", RECOGNISED)
@pytest.mark.parametrize(
    "text", ["", " Hello,\n\nworld. \n", "1 < 2 [sic] {a: b} it's", '{"name": "Paris", "arguments": 3}']
)
def test_an_answer_without_calls_is_itself(name, text):
    if name == "GPT_OSS":
        text = text.lstrip()
    if name in ("LLAMA31", "LLAMA32", "LLAMA32_PYTHONIC"):
        assert read(name, text) == read(name, *text)
    found = read(name, *text)
    assert (found.content, found.calls, found.reason) == (text, [], "stop")


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_no_calls_are_looked_for(tools):
    text = '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
    found = read(HERMES, text, tools=tools)
    assert (found.reasoning, found.content, found.calls) == ("Hm.", text.partition("</think>\n\n")[2], [])


def test_content_ahead_of_a_call_and_behind_it_is_shown_without_the_space_between():
    text = 'One.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n\nTwo. \n'
    found = read(HERMES, *text)
    assert (found.content, named(found), found.reason) == ("One.Two. \n", [("now", {})], "tool_calls")


def test_content_is_shown_at_once_up_to_what_may_be_a_mark():
    parser = CallParser(syntax(HERMES), read_tools(TOOLS))
    parts = ["Hello ", "wor", "ld <to", "o", "l>"]
    assert [[event.text for event in parser.push(part)] for part in parts] == [
        ["Hello"],
        [" wor"],
        ["ld"],
        [],
        [" <tool>"],
    ]


# --- reasoning ---


@pytest.mark.parametrize(
    ("text", "is_open", "expected"),
    [
        ("<think>\nHm.\n</think>\n\nYes.", False, ("Hm.", "Yes.")),
        ("\n<think>Hm.</think>Yes.", False, ("Hm.", "Yes.")),
        ("Hm.\n</think>\n\nYes.", True, ("Hm.", "Yes.")),
        ("<think>\nHm.\n</think>\n\nYes.", True, ("Hm.", "Yes.")),
        ("<think>\n\n</think>\n\nYes.", False, ("", "Yes.")),
        ("Hm", True, ("Hm", "")),
        ("Yes. <think> is a tag.", False, ("", "Yes. <think> is a tag.")),
    ],
)
def test_reasoning_is_told_from_the_answer(text, is_open, expected):
    found = read(HERMES, *text, reasoning_is_open=is_open)
    assert (found.reasoning, found.content) == expected


def test_a_call_in_the_reasoning_is_text():
    found = read(HERMES, '<think><tool_call>\n{"name": "now", "arguments": {}}</tool_call></think>No.')
    assert (found.calls, found.content) == ([], "No.")


# --- harmony ---


@pytest.mark.parametrize(
    "head",
    [
        "<|channel|>commentary to=functions.now <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions.now<|message|>",
        " to=functions.now<|channel|>commentary json<|message|>",
    ],
)
def test_channels_are_reasoning_content_and_calls(head):
    think = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    say = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
    found = read("GPT_OSS", *(think + say + head + '{"a": 1}<|call|>'))
    assert (found.reasoning, found.content, named(found)) == ("Hm.", "I look.", [("now", {"a": 1})])
    assert read("GPT_OSS", *(head + '{"a": 1}<|call|>')).calls == [("id0", "now", '{"a": 1}')]
    assert read("GPT_OSS", *(think + "<|channel|>final<|message|>Yes.<|return|>")).content == "Yes."


def test_a_header_that_breaks_off_is_not_shown():
    found = read("GPT_OSS", "<|channel|>anal", reason="length")
    assert (found.content, found.reasoning, found.reason) == ("", "", "length")


# --- what other models write ---


def test_both_orders_of_keys_and_further_ones_are_read():
    found = read(HERMES, f'<tool_call>{{"id": "z", "x": [{{}}], "arguments": {SPACED}, "name": "now"}}</tool_call>')
    assert found.calls == [("id0", "now", SPACED)]


def test_arguments_that_are_json_in_a_string_are_that_json():
    found = read(HERMES, *'<tool_call>\n{"name": "now", "arguments": "{\\"a\\": \\"\\\\n\\"}"}\n</tool_call>')
    assert found.calls == [("id0", "now", '{"a": "\\n"}')]


@pytest.mark.parametrize(
    "text",
    [
        r'<tool_call>\n{"name": "now\ud800", "arguments": {}}\n</tool_call>',
        r'<tool_call>\n{"name": "now", "arguments": "{\"city\": \"\ud800\"}"}\n</tool_call>',
    ],
)
def test_half_a_character_that_a_model_writes_can_be_sent(text):
    answer = read(HERMES, text.replace(r"\n", "\n"))
    assert "\ufffd" in str(answer)
    assert str(answer).encode()


def test_a_call_without_arguments_has_none():
    assert read(HERMES, '<tool_call>{"name": "now"}</tool_call>').calls == [("id0", "now", "{}")]
    assert read("MISTRAL_V11", "[TOOL_CALLS]now[ARGS]").calls == [("id0", "now", "{}")]
    assert read("GPT_OSS", "<|channel|>commentary to=functions.now<|message|><|call|>").calls == [("id0", "now", "{}")]
    kimi = "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:3<|tool_call_argument_begin|><|tool_call_end|>"
    assert read("KIMI_K2", kimi).calls == [("functions.now:3", "now", "{}")]


def test_the_id_that_a_model_writes_is_the_call_s():
    assert read("MISTRAL_V11", "[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}").calls == [("abcdefghi", "now", "{}")]
    text = '[TOOL_CALLS] [{"id": "abcdefghi", "name": "now", "arguments": {}}]'
    assert read("MISTRAL", text).calls == [("abcdefghi", "now", "{}")]


def test_ids_that_are_made_are_of_the_form_that_the_template_takes():
    assert len(new_id(is_short=True)) == 9 and new_id(is_short=True).isalnum()
    assert new_id(is_short=False).startswith("call_") and new_id(False) != new_id(False)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LLAMA31", '{"name": "now", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}'),
        ("LLAMA31", '<|python_tag|>{"name": "now", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}'),
        ("PHI4_MINI", 'functools[{"name": "now", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]'),
        ("GRANITE3", '<|tool_call|>[{"name": "now", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}}]'),
        ("GRANITE3", '<|tool_call|> [ {"name":"now","arguments":{"a":1}},{"arguments":{},"name":"get_weather"} ]'),
        ("LLAMA32_PYTHONIC", "[now(a=1), get_weather()]"),
        ("LLAMA32_PYTHONIC", "<|python_start|>[now(a=1),get_weather( )]"),
        ("OLMO3", "<function_calls>now(a=1)\nget_weather()</function_calls>"),
        ("MINIMAX_M2", '<minimax:tool_call><invoke name="now"><parameter name="a">1</parameter></invoke>'
         '<invoke name="get_weather"></invoke></minimax:tool_call>'),
        ("GLM45", "<tool_call>now<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>"
         "<tool_call>get_weather</tool_call>"),
        ("QWEN3_CODER", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>\n"
         "<tool_call> <function=get_weather> </function> </tool_call>"),
    ],
)  # fmt: skip
def test_calls_are_read_with_the_white_space_that_models_write(name, text):
    found = read(name, *text)
    assert named(found) == [("now", {"a": 1}), ("get_weather", {})]
    assert (found.content, found.ends) == ("", [True, True])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LLAMA31", '{"name": "Lutetia", "parameters": {}}'),  # no tool's name
        ("LLAMA31", '{"name": "now"}'),
        ("LLAMA31", 'So: {"name": "now", "parameters": {}}'),
        ("LLAMA31", '<|python_tag|>brave_search.call(query="now")'),
        ("LLAMA32_PYTHONIC", "[1] Lutetia"),
        ("LLAMA32_PYTHONIC", "[Lutetia(a=1)]"),
    ],
)
def test_where_nothing_marks_a_call_only_the_name_of_a_tool_does(name, text):
    found = read(name, *text)
    assert (found.content, found.calls, found.reason) == (text, [], "stop")


def test_parameters_get_the_types_of_the_schema():
    text = "<tool_call>\n<function=get_weather>\n" + "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n"
        for key, value in {
            "city": "  12\n<b>\n",
            "days": "3",
            "at": "1.50",
            "exact": "True",
            "tags": "['a', None]",
        }.items()
    )
    found = read("QWEN3_CODER", *(text + "</function>\n</tool_call>"))
    assert found.calls[0][2] == '{"city": "  12\\n<b>\\n", "days": 3, "at": 1.50, "exact": true, "tags": ["a", null]}'


def test_a_parameter_says_itself_whether_it_is_a_string():
    text = (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="unknown">\n'
        '<｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="b" string="false">[1]</｜DSML｜parameter>\n</｜DSML｜invoke>'
        "</｜DSML｜function_calls>"
    )
    assert read("DEEPSEEK_V32", *text).calls == [("id0", "unknown", '{"a": "1", "b": [1]}')]


def test_names_of_parameters_may_be_any_text_in_a_line():
    text = "<tool_call>now\n<arg_key>first name, (or='x')</arg_key>\n<arg_value>a</arg_value>\n</tool_call>"
    assert named(read("GLM45", *text)) == [("now", {"first name, (or='x')": "a"})]


def test_a_parameter_is_shown_once_it_is_whole():
    parser = CallParser(syntax("GLM45"), read_tools(TOOLS), make_id=lambda: "i")
    parser.push("<tool_call>get_weather\n<arg_key>days</arg_key>\n<arg_value>1")
    assert parser.push("2") == []
    (event,) = parser.push("</arg_value>")
    assert event.text == '"days": 12'


def test_literals_of_python_become_json():
    text = (
        "[get_weather(city='it\\'s, [a]', days=-2, where={'a': [True, None], \"b\": (1,)}, tags=[\")\"], exact=false)]"
    )
    arguments = {"city": "it's, [a]", "days": -2, "where": {"a": [True, None], "b": [1]}, "tags": [")"], "exact": False}
    assert named(read("LLAMA32_PYTHONIC", *text)) == [("get_weather", arguments)]


# --- other texts, and calls that break off ---


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (HERMES, "The tag <tool_call> opens a call."),
        (HERMES, "<tool_call>\nnow()\n</tool_call>"),
        (HERMES, '<tool_call>\n{"name": 3, "arguments": {}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"arguments": {"a": 1}}\n</tool_call>'),
        (HERMES, '<tool_call>\n{"name": "no'),
        (HERMES, '<tool_call>\n{"arguments": {"name": "now"'),
        (HERMES, "a\n <tool_ca"),
        ("MISTRAL", "[TOOL_CALLS] none"),
        ("MISTRAL_V11", "[TOOL_CALLS]now"),
        ("DEEPSEEK_V31", "<｜tool▁calls▁begin｜>\n"),
        ("QWEN3_CODER", "<tool_call>\n<function=>\n</tool_call>"),
        ("PHI4_MINI", "functools.wraps(f) and functools[0]"),
        ("QWEN3_CODER", "<tool_call>\n<function=" + "x" * 300 + ">\n</function>\n</tool_call>"),
        (HERMES, '<tool_call>\n{"arguments": {"a": "' + "x" * (1 << 16) + '"}, "name": "now"}\n</tool_call>'),
    ],
)
def test_a_text_that_is_no_call_is_content_as_it_was_written(name, text):
    found = read(name, text)
    assert (found.content, found.calls, found.reason) == (text, [], "stop")
    assert read(name, *text) == found


def test_behind_what_is_no_call_a_call_is_read():
    found = read(HERMES, *'<tool_call> <tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert (found.content, named(found)) == ("<tool_call>", [("now", {})])


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a": "b', '{"a": "b'),
        (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a": [1</tool_call>', '{"a": [1'),
        (HERMES, '<tool_call>\n{"name": "now", "arguments": {"a": 1}\n</tool_call>', '{"a": 1}'),
        (HERMES, '<tool_call>\n{"name": "now", "arguments": ', ""),
        (
            "DEEPSEEK_V31",
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{"a": <｜tool▁call▁end｜>',
            '{"a": ',
        ),
        ("QWEN3_CODER", "<tool_call>\n<function=now>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2", '{"a": 1'),
        ("LLAMA31", '{"name": "now", "parameters": {"a": "b', '{"a": "b'),
        ("GPT_OSS", '<|channel|>commentary to=functions.now<|message|>{"a": "b', '{"a": "b'),
    ],
)
@pytest.mark.parametrize("reason", ["stop", "length"])
def test_a_call_that_breaks_off_keeps_what_there_was_of_its_arguments(name, text, arguments, reason):
    found = read(name, *text, reason=reason)
    assert found.calls == [("id0", "now", arguments)]
    assert (found.content, found.ends) == ("", [False])
    assert found.reason == ("tool_calls" if reason == "stop" else "length")


def test_a_call_behind_one_that_breaks_off_is_read():
    broken, whole = (f'<tool_call>{{"name": "now", "arguments": {text}</tool_call>' for text in ('{"a": ', "{}}"))
    found = read(HERMES, *f"{broken}\n{whole}")
    assert (found.calls, found.ends) == ([("id0", "now", '{"a": '), ("id1", "now", "{}")], [False, True])


def test_a_call_whose_end_is_missing_is_whole_with_its_object():
    found = read(HERMES, '<tool_call>\n{"name": "now", "arguments": {}}')
    assert (named(found), found.ends, found.content) == ([("now", {})], [True], "")


@pytest.mark.parametrize("name", ["QWEN3", "DEEPSEEK_V31", "LLAMA31", "GPT_OSS", "QWEN3_CODER"])
def test_the_answer_is_over_after_one_call_where_calls_are_not_parallel(name):
    first = answer(name, [call("now", {"a": 1})])
    parser = CallParser(syntax(name), read_tools(TOOLS), is_parallel=False)
    events = [event for piece in first + "\n" + first + "More." for event in parser.push(piece)]
    assert parser.is_done
    assert [type(event).__name__ for event in events].count("CallStart") == 1
    assert type(events[-1]).__name__ == "CallEnd"
    (end,) = parser.finish("stop")
    assert end.finish_reason == "tool_calls"


@pytest.mark.parametrize("size", [1000, 100_000])
def test_the_work_grows_with_the_text_alone(size):
    """Counted in characters that are looked at again, by what is still held: a piece is forgotten once it was read."""
    parser = CallParser(syntax("QWEN3_CODER"), read_tools(TOOLS))
    for piece in ("<tool_call>\n<function=now>\n<parameter=a>\n", *["word\n"] * (size // 5)):
        parser.push(piece)
        assert len(parser._source.text) < 64


# --- special tokens ---


def test_marks_that_are_special_tokens_are_kept_and_others_are_taken_out():
    tokens = ["<s>", "</s>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[INST]"]
    special = syntax("MISTRAL_V11").special_tokens(tokens)
    assert special.kept == {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"}
    assert special.stripped == {"<s>", "</s>", "[INST]"}
    found = read("MISTRAL_V11", *"Well[INST].[TOOL_CALLS]now[ARGS]{}</s>", stripped=special.stripped)
    assert (found.content, named(found)) == ("Well.", [("now", {})])


def test_where_no_mark_is_a_special_token_they_may_all_be_skipped():
    special = syntax("QWEN25").special_tokens(["<|im_end|>", "<|endoftext|>"])
    assert (special.kept, special.stripped) == (frozenset(), frozenset())


def test_what_only_begins_like_a_special_token_stays():
    assert read("QWEN25", *"a </b </s>", stripped=frozenset({"</s>"})).content == "a </b "


def test_a_syntax_of_its_own_can_be_given():
    own = ChatSyntax(CallSyntax(NameThenJson(between=">"), call_begin="<f=", call_end="</f>"), Reasoning("[R]", "[/R]"))
    found = read(own, *'[R]r[/R] c <f=now>{"a": 1}</f>')
    assert (found.reasoning, found.content, named(found)) == ("r", "c", [("now", {"a": 1})])
    own = ChatSyntax(CallSyntax(Parameters("", "<", ">", "</>"), call_begin="<<", call_end=">>"))
    assert named(read(own, *"<<now<a>1</>>>")) == [("now", {"a": 1})]
