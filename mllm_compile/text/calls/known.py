"""Syntaxes of calls that a chat template does not show by rendering one, known by what its source says.

Most templates do show theirs, and derive.py reads it there. Some write a history's calls in another way than they ask
the model for, or not at all; some have a name that no probe can find.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from mllm_compile.text.calls.syntax import (
    CallSyntax,
    Channels,
    JsonObject,
    NameThenJson,
    Parameters,
    Reasoning,
)


class Known(NamedTuple):
    """A syntax, and the texts that a template's source has, all of them, if its model writes it."""

    name: str
    needs: tuple[str, ...]
    calls: CallSyntax | Channels


_LLAMA = JsonObject(arguments=("parameters",))
_PYTHON = Parameters(after_name="(", begin="", between="=", end="", separator=", ", are_python=True)
_PYTHON_LIST = CallSyntax(_PYTHON, begin="[", end="]", separator=", ", call_end=")")

# The first that fits is taken: what needs more is ahead of what needs less.
KNOWN = (
    Known("harmony", ("<|channel|>", "<|message|>", "<|start|>"), Channels()),
    Known(
        "kimi",
        ("<|tool_call_argument_begin|>",),
        CallSyntax(
            NameThenJson(between="<|tool_call_argument_begin|>", name_in_id=True),
            begin="<|tool_calls_section_begin|>",
            end="<|tool_calls_section_end|>",
            call_begin="<|tool_call_begin|>",
            call_end="<|tool_call_end|>",
        ),
    ),
    Known(
        "deepseek-v3",
        ("<｜tool▁sep｜>", "```json"),
        CallSyntax(
            NameThenJson(between="\n```json\n"),
            begin="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
            call_begin="<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
            call_end="\n```<｜tool▁call▁end｜>",
        ),
    ),
    Known(
        "deepseek-v3.1",
        ("<｜tool▁sep｜>",),
        CallSyntax(
            NameThenJson(between="<｜tool▁sep｜>"),
            begin="<｜tool▁calls▁begin｜>",
            end="<｜tool▁calls▁end｜>",
            call_begin="<｜tool▁call▁begin｜>",
            call_end="<｜tool▁call▁end｜>",
        ),
    ),
    Known(
        "minimax",
        ("<minimax:tool_call>",),
        CallSyntax(
            Parameters(after_name='">', begin='<parameter name="', between='">', end="</parameter>"),
            begin="<minimax:tool_call>",
            end="</minimax:tool_call>",
            call_begin='<invoke name="',
            call_end="</invoke>",
        ),
    ),
    Known(
        "qwen3-coder",
        ("<tool_call>", "<function=", "<parameter="),
        CallSyntax(
            Parameters(after_name=">\n", begin="<parameter=", between=">\n", end="\n</parameter>\n"),
            call_begin="<tool_call>\n<function=",
            call_end="</function>\n</tool_call>",
        ),
    ),
    Known(
        "glm-4.5",
        ("<tool_call>", "<arg_key>", "<arg_value>"),
        CallSyntax(
            Parameters(after_name="\n", begin="<arg_key>", between="</arg_key>\n<arg_value>", end="</arg_value>\n"),
            call_begin="<tool_call>",
            call_end="</tool_call>",
        ),
    ),
    Known(
        "functools",
        ("functools[",),
        CallSyntax(JsonObject(), begin="functools[", end="]", separator=", "),
    ),
    Known(
        "granite",
        ("<|tool_call|>",),
        CallSyntax(JsonObject(), begin="<|tool_call|>[", end="]", separator=", "),
    ),
    Known(
        "mistral-v11",
        ("[TOOL_CALLS]", "[ARGS]"),
        CallSyntax(NameThenJson(between="[ARGS]"), call_begin="[TOOL_CALLS]"),
    ),
    Known(
        "mistral",
        ("[TOOL_CALLS]",),
        CallSyntax(JsonObject(id=("id",)), begin="[TOOL_CALLS][", end="]", separator=", "),
    ),
    Known("hermes", ("<tool_call>",), CallSyntax(JsonObject(), call_begin="<tool_call>\n", call_end="\n</tool_call>")),
    Known(
        "pythonic",
        ("[func_name1(params_name1=params_value1",),
        replace(_PYTHON_LIST, also_begin=("<|python_start|>", "<|python_tag|>")),
    ),
    Known(
        "lfm2",
        ("List of tools: ", "<|tool_list_start|>"),
        replace(_PYTHON_LIST, begin="<|tool_call_start|>[", end="]<|tool_call_end|>"),
    ),
    Known(
        "llama3",
        ("<|python_tag|>", '"parameters"'),
        CallSyntax(_LLAMA, separator="; ", also_begin=("<|python_tag|>",)),
    ),
    Known(
        "llama3 without a tag",
        ('{"name": function name, "parameters": dictionary',),
        CallSyntax(_LLAMA, separator="; "),
    ),
)

# Texts around reasoning, for a template that drops earlier answers' reasoning: the texts that it contains.
KNOWN_REASONING = (
    Reasoning("<think>", "</think>"),
    Reasoning("[THINK]", "[/THINK]"),
    Reasoning("<seed:think>", "</seed:think>"),
    Reasoning("<|START_THINKING|>", "<|END_THINKING|>"),
)


def known_calls(source: str) -> Known | None:
    """The first known syntax that a template's source has the texts of."""
    return next((known for known in KNOWN if all(text in source for text in known.needs)), None)


def known_reasoning(source: str) -> Reasoning | None:
    """The known texts around reasoning that a template's source has the latter of."""
    return next((reasoning for reasoning in KNOWN_REASONING if reasoning.end in source), None)
