"""llguidance: grammars by derivatives of regular expressions and an Earley parser, in Rust.

It counts the work of every mask and gives up beyond a limit, so a hostile grammar costs its own request alone. A
grammar is its source and a matcher in its first state, which is copied for each answer. Forced tokens are switched off:
with them it would tokenize, by a call into Python, and allow one of several tokens that are right.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from math import prod
from typing import Any

import llguidance
import llguidance.numpy
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark

from mllm_compile.runtime.sampling.grammar import MaskWork
from mllm_compile.structured.form import Form, Refused, todays_tag
from mllm_compile.structured.json_schema import first_fault, subschemas
from mllm_compile.structured.lark_tags import lark_of_tag
from mllm_compile.structured.vocabulary import Vocabulary

# Models that never tire of whitespace fill an answer with it; eight levels of four fit.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{0,32}"
_HEADER = '%llguidance {"no_forcing": true}\n'
_MOST_STATES = 50_000  # of a grammar's lexer, one or two kB each
_MOST_MULTIPLE = (1 << 32) - 1
# Its own dates know no leap years.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|"
    "02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_CALENDARS = {"date": f"^{_DATE}$", "date-time": f"^{_DATE}T{_TIME}$", "time": f"^{_TIME}$"}
_MOST_SAID = 500  # characters of the library's errors: they repeat what was given


def make(vocabulary: Vocabulary, threads: int) -> LlguidanceBackend:
    """The backend of a vocabulary."""
    return LlguidanceBackend(vocabulary, threads)


@dataclass(frozen=True, eq=False)
class LlguidanceGrammar:
    """A compiled form."""

    masks: LlguidanceBackend
    first: llguidance.LLMatcher
    first_time: int | None = None

    def matcher(self) -> llguidance.LLMatcher:
        """The state of a new answer."""
        return self.first.deep_copy()


class LlguidanceBackend:
    """Backend of one vocabulary; see backend.py."""

    def __init__(self, vocabulary: Vocabulary, threads: int) -> None:
        self.vocabulary = vocabulary
        tokens = _Tokens(vocabulary)
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(tokens), len(vocabulary.tokens), list(vocabulary.eos_token_ids)
        )
        self._limits = llguidance.LLParserLimits(verbose_errors=False, max_lexer_states=_MOST_STATES)
        self._executor = llguidance.LLExecutor(threads)

    def compile(self, form: Form) -> LlguidanceGrammar:
        """Backend.compile."""
        matcher = llguidance.LLMatcher(self._tokenizer, _HEADER + _lark(form), log_level=0, limits=self._limits)
        if matcher.is_error():
            raise Refused(_said(matcher))
        return LlguidanceGrammar(self, matcher)

    def fill(self, work: Sequence[MaskWork], masks: np.ndarray) -> dict[int, str]:
        """MaskMaker.fill."""
        going = [(part.matcher, part.token_ids[0]) for part in work if len(part.token_ids) == 1]
        if going:
            self._executor.consume_token_par(going)  # a matcher that fails is in a state of error from then on
        for part in work:
            if len(part.token_ids) > 1:
                part.matcher.consume_tokens(part.token_ids)
        alive = [part for part in work if not part.matcher.is_error()]
        if plain := [(part.matcher, part.row) for part in alive if not part.drafted]:
            llguidance.numpy.fill_next_token_bitmask_par(self._executor, plain, masks)
        if drafted := [part for part in alive if part.drafted]:
            for part in drafted:
                masks[part.rows] = 0
            llguidance.numpy.fill_next_token_bitmask_par_with_draft_tokens(
                self._executor, [(part.matcher, part.row, list(part.drafted)) for part in drafted], masks
            )
        return {
            part.row: f"llguidance cannot go on with the grammar: {_said(part.matcher)}"
            for part in work
            if part.matcher.is_error()
        }


class _Tokens:
    """The vocabulary as llguidance reads it."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        # Special tokens are told apart by their names, which no text has.
        self.tokens = [data or b"<%d>" % token_id for token_id, data in enumerate(vocabulary.tokens)]
        self.special_token_ids = vocabulary.special_token_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]

    def __call__(self, text: bytes) -> list[int]:
        """Refuses to tokenize: only forced tokens would need it."""
        raise RuntimeError("no text is tokenized for a grammar")


def _lark(form: Form) -> str:
    """The form as a grammar in llguidance's dialect of Lark.

    Raises:
        Refused: it has none.
    """
    if form.kind == "json":
        whitespace = {"whitespace_pattern": form.whitespace or _WHITESPACE}
        options = {"whitespace_flexible": False} if form.is_compact else whitespace
        return f"start: {_json_rule(json.loads(form.text), options)}"
    if form.kind == "regex":
        return f"start: /{llguidance.regex_to_lark(form.text, use_ascii='')}/"
    if form.kind == "choice":
        # One terminal, in capitals: alternatives of a rule are counted, and limited.
        # In ASCII: its lexer takes no DEL in a text, but its escape.
        choices = (json.dumps(text).replace("\x7f", r"\u007f") for text in json.loads(form.text))
        return f"start: CHOICE\nCHOICE: {' | '.join(choices)}"
    if form.kind == "grammar":
        return _lark_of_grammar(form.text)
    tag = todays_tag(form.text)
    return lark_of_tag(
        tag["format"],
        lambda schema: _json_rule(schema, {"whitespace_pattern": _WHITESPACE}),
        lambda pattern: llguidance.regex_to_lark(pattern, use_ascii=""),
    )


def _json_rule(schema: Any, options: dict[str, Any]) -> str:
    schema = _kept_schema({} if schema is True else {"anyOf": []} if schema is False else schema)
    return f"%json {json.dumps(schema | {'x-guidance': options})}"


def _kept_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema as llguidance has to be given it.

    Raises:
        Refused: it has what llguidance does not keep to.
    """
    fault = first_fault(schema)
    if fault is None and _multiples_overflow(schema):
        fault = "several multipleOf whose common multiple is beyond 2**32"
    if fault is not None:
        raise Refused(f"llguidance does not keep to all of the JSON schema: {fault}")
    for part in subschemas(schema):
        pattern = _CALENDARS.get(str(part.get("format")))
        if pattern is not None and isinstance(part.get("allOf", []), list):
            del part["format"]
            part["allOf"] = [*part.get("allOf", []), {"pattern": pattern}]
    return schema


def _multiples_overflow(schema: dict[str, Any]) -> bool:
    """True if parts that may hold together have multiples whose common one is more than llguidance counts."""
    parts = list(subschemas(schema))
    factors = {Decimal(repr(part["multipleOf"])) for part in parts if "multipleOf" in part}
    if len(factors) < 2 or not any(key in part for part in parts for key in ("allOf", "anyOf", "oneOf", "$ref")):
        return False
    digits = max(0, *(-int(factor.as_tuple().exponent) for factor in factors))
    return prod(int(factor.scaleb(digits)) for factor in factors) > _MOST_MULTIPLE


def _lark_of_grammar(text: str) -> str:
    if "%llguidance" in text:
        raise Refused("a grammar sets no options of llguidance here. Remove the line with %llguidance.")
    if "::=" not in text:
        return text
    try:
        return any_to_lark(text)
    except RecursionError:
        raise Refused("the grammar is nested too deep") from None
    except Exception as error:  # its own, and Python's at what it makes of the text
        raise Refused(f"the grammar cannot be read as GBNF: {_cut(str(error))}") from None


def _said(matcher: llguidance.LLMatcher) -> str:
    """Its error in one line, without what it shows of the grammar."""
    error = matcher.get_error()
    if error.startswith("NoExtension"):
        return "no text has this form, or none goes on from here"
    return _cut(re.sub(r"^at \d+\(\d+\): |<non-verbose/>.*|<backtrace>.*|\n *1 \| .*", "", error, flags=re.DOTALL))


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _MOST_SAID else f"{text[:_MOST_SAID]}…"
