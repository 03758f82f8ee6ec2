"""Makes hostile chat templates, and chats and options for any template."""

from __future__ import annotations

import random
from types import MappingProxyType
from typing import Any

from tests.hostile.makers import NASTY

_CIRCLE: list[Any] = []
_CIRCLE.append(_CIRCLE)


def _deep(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# Values that JSON cannot express, expresses otherwise, or nests too deep.
_ODD = [
    *(_CIRCLE, _deep(500), _deep(20_000), object(), len, ValueError, (x for x in "ab"), range(3), 1j, bytearray(b"a")),
    *({(1, 2): 3}, {None: 1, "null": 2}, {1.5: 1}, {b"a": 1}, {"\ud800": "\udfff"}, MappingProxyType({"role": "user"})),
]
_TEXTS = ["hi", "", "{{ 7*7 }}", "{% endfor %}", "<|im_end|>", "a\nb", "\r\u2028", "\u202e", "\0", "\ud800", "🙂" * 99]
_PARTS = [
    *({"type": "text", "text": "hi"}, {"type": "text"}, {"type": "text", "text": None}, {"type": "text", "text": [1]}),
    *({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, {"type": 5, "text": "a"}, {"text": "a"}, {}),
    *("text", None, 5, [], ["a"], {"type": {"type": "text"}}),
]
_ROLES = ["user", "user", "assistant", "system", "tool", "", "\0", "<|im_start|>", "x" * 5000]
_KEYS = ["name", "tool_calls", "reasoning_content", "thinking", "content", "role", "self", "items", "\ud800", ""]
_OPTIONS = [
    *("tools", "documents", "add_generation_prompt", "enable_thinking", "bos_token", "name", "loop", "namespace"),
    *("range", "raise_exception", "a\nb", "\ud800", "", "__class__", "x" * 100_000),
]


def conversations(chance: random.Random) -> Any:
    """Messages that may be right, wrong in a detail, or nothing like any; or a list of such."""
    kind = chance.randrange(10)
    if kind == 0:
        return _anything(chance)
    if kind == 1:
        return [chance.choice([[], [_message(chance)], [_anything(chance)], _anything(chance)]) for _ in range(3)]
    return [_message(chance) for _ in range(chance.choice([1, 1, 2, 5]))]


def options(chance: random.Random) -> dict[str, Any]:
    """Keyword arguments that `chat` hands to the template."""
    if chance.random() < 0.6:
        return {}
    names = chance.sample(_OPTIONS, chance.randrange(1, 3))
    return {name: _tools(chance) if chance.random() < 0.3 else _anything(chance) for name in names}


def _anything(chance: random.Random) -> Any:
    return chance.choice(NASTY if chance.random() < 0.6 else _ODD)


def _message(chance: random.Random) -> Any:
    if chance.random() < 0.05:
        return _anything(chance)
    message: dict[Any, Any] = {"role": chance.choice(_ROLES), "content": _content(chance)}
    for _ in range(chance.choice([0, 0, 1, 2])):
        message[chance.choice(_KEYS)] = chance.choice([_anything, _content, _tools])(chance)
    if chance.random() < 0.1:
        del message[chance.choice(list(message))]
    return message


def _content(chance: random.Random) -> Any:
    kind = chance.randrange(4)
    if kind == 0:
        return _anything(chance)
    if kind == 1:
        return [chance.choice(_PARTS) for _ in range(chance.randrange(4))]
    return "".join(chance.choices(_TEXTS, k=chance.randrange(1, 4)))


def _tools(chance: random.Random) -> Any:
    function = {"name": "f", "description": _content(chance), "parameters": {"type": "object", "properties": {}}}
    if chance.random() < 0.5:
        function[chance.choice(list(function))] = _anything(chance)
    return [{"type": "function", "function": function}] * chance.choice([0, 1, 2])


# Texts around a part of a template, in place of the $.
_WRAPPERS = r"""
$
$
$
{% for m in messages %}$ {% endfor %}
{% for m in messages if m.content %}$ {% break %}{% endfor %}
{% for m in messages recursive %}$ {{ loop(messages) }}{% endfor %}
{% if messages %}$ {% else %}a{% endif %}
{% set x %}$ {% endset %}{{ x }}
{% macro m() %}$ {{ m() }}{% endmacro %}{{ m() }}
{% call m() %}$ {% endcall %}
{% filter upper %}$ {% endfilter %}
{% block b %}$ {{ self.b() }}{% endblock %}
{% raw %}$ {% endraw %}
{% generation %}$ {% endgeneration %}
{% generation %}$
{# $
""".strip().split("\n")
_STATEMENTS = [
    *("", "\0", "\ud800", "{% \0 %}", "{{", "{% for a in messages %}" * 30 + "{% endfor %}" * 30),
    *("{% if 1 %}" * count + "{% endif %}" * count for count in (30, 1000)),
    *r"""
hi
{% if %}
{% endif %}
{% break %}
{% do 1 %}
{% debug %}
{% include 'x' %}
{% include ['/etc/passwd', messages] ignore missing %}
{% import 'os' as os %}
{% from 'a' import b %}
{% extends messages[0].content %}
{% set messages = 5 %}
{% set x.y = 1 %}
{% set ns = namespace(s='x') %}{% for a in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s }}
{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}{{ ns.a.a | tojson }}
{% set ns = namespace(a=[]) %}{% for i in range(5000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}
{% set ns = namespace(a='') %}{% for i in range(5000) %}{% set ns.a = ns.a | select %}{% endfor %}{{ ns.a | list }}
{% for m in messages %}{% for part in m.content %}{{ part.text }}{{ part['type'] + 'a' }}{% endfor %}{% endfor %}
""".strip().split("\n"),
]
_EXPRESSIONS = [
    *(
        "-" * 9000 + "1",
        "(" * 9000,
        "[" * 9000 + "]" * 9000,
        "1" + "+1" * 9000,
        "a" + ".b" * 9000,
        "a" + "|upper" * 900,
    ),
    *r"""
messages
messages[0].content
messages[-9].content
tools | tojson
undefined.x.y
undefined | tojson
undefined['b' * 10**6].c
messages[0]['x' * 10**6].y
nope()
'a' | nope
'a' is nope
self
loop
b'a'
1/0
1 | round(9**9)
10**4299
10**5000
10**400 | float
'9' * 10**6 | int
range(10**9)
range | tojson
[0] * 10**9
'a' * 10**10
('a' * 10**6) | length
'a'.zfill(10**10)
'a' | center(10**10)
'a' | indent(10**10)
'a' | wordwrap(0)
'a' | truncate(-1)
'aa' | replace('a', 'b' * 10**9)
'%1000000000d' % 1
'{:>10000000000}'.format(1)
'{0.__class__}'.format(messages)
'%s' | format(range.__self__)
'a'.encode('nope')
'\ud800' ~ '\0'
messages | tojson(indent=10**9)
messages | batch(10**9, 1) | list
messages | slice(0) | list
messages | sort
[1, 'a'] | sort
messages | map(attribute='__class__') | list
messages.append(1)
messages[0].update({})
messages[0].__class__.__mro__
''.__class__.__base__.__subclasses__()
'' | attr('__class__')
cycler.__init__.__globals__.os
raise_exception.__globals__['os']
namespace.__init__
lipsum(-1)
raise_exception('a\nb')
raise_exception('\ud800' * 9999)
raise_exception(messages)
raise_exception()
strftime_now('%1000000000Y')
strftime_now('\0\ud800')
strftime_now(messages)
""".strip().split("\n"),
]
# Each takes its limit of processor time: two seconds.
_ENDLESS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    *("{{ (10 ** (10 ** 9)) % 7 }}", "{{ lipsum(n=10**7) }}", "{{ messages | slice(10**9) | list | length }}"),
]
_ENDLESS_RARELY = 0.01


def template(chance: random.Random) -> str:
    """A Jinja source that fails, escapes, eats memory, or works; now and then one that does not end."""
    if chance.random() < _ENDLESS_RARELY:
        return chance.choice(_ENDLESS)
    parts = []
    for _ in range(chance.choice([1, 1, 2, 3])):
        is_statement = chance.random() < 0.4
        part = chance.choice(_STATEMENTS) if is_statement else f"{{{{ {chance.choice(_EXPRESSIONS)} }}}}"
        for _ in range(chance.choice([0, 1, 2])):
            part = chance.choice(_WRAPPERS).replace("$", part)
        parts.append(part)
    source = "".join(parts)
    if chance.random() < 0.1:
        begin = chance.randrange(len(source) + 1)
        source = source[:begin] + chance.choice(["", "{", "%}", "'", "\0", "\n# "]) + source[begin + 1 :]
    return source
