"""Answers of a form whose tokens were drafted: those without drafts, whatever is drafted, at temperature 1."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import jsonschema
import pytest
import regex

from mllm_compile.engine.start.assemble import assemble
from mllm_compile.process.progress import NullReporter
from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.runtime.sampling.structured_params import StructuredOutputsParams
from mllm_compile.runtime.schedule.request import Request
from mllm_compile.runtime.schedule.scheduler import Scheduler
from mllm_compile.runtime.speculation.drafter import Speculation
from mllm_compile.runtime.speculation.texts import TextDrafter
from tests.runtime.step.test_verify_steps import KINDS, ReplayingDrafter
from tests.sample import slow_but_a_sample
from tests.structured.conftest import BACKENDS
from tests.structured.test_answers import PERSON
from tests.tiny_model import tiny_config

MOST = 5
# Reasoning of any text, then calls of one tool, as servers ask for it.
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "<think>", "content": {"type": "any_text"}, "end": "</think>"},
            {
                "type": "tag",
                "begin": "<call>",
                "content": {"type": "json_schema", "json_schema": PERSON},
                "end": "</call>",
            },
        ],
    },
}
FORMS: list[dict[str, Any]] = [
    {"json": PERSON},
    {"json": PERSON, "disable_any_whitespace": True},
    {"regex": "[a-z]{3,9}-[0-9]{2}( [a-z]+){4}"},
    {"choice": ["yes, but not now", "no, as it is late", "perhaps"]},
    {"structural_tag": json.dumps(TAG)},
    {"json_object": True},
]


def serve(parts: Any, forms: Sequence[dict[str, Any]], speculation: Speculation | None) -> list[Request]:
    """The answers to a prompt for each form, of a scheduler of its own; the last two have none, and rules beside."""
    scheduler, requests = Scheduler(parts.scheduler.config, speculation=speculation), []
    for index, form in enumerate([*forms, None, forms[0]]):
        asked = None if form is None else StructuredOutputsParams(**form)
        rules = {"min_tokens": 60, "frequency_penalty": 0.5, "logprobs": 2} if index > len(forms) else {}
        prompt = parts.tokenizer.encode(f"{index}. Return a new list containing")
        requests.append(
            Request(
                request_id=str(index),
                prompt_token_ids=prompt,
                params=SamplingParams(temperature=1.0, seed=index, max_tokens=100, **rules),
                eos_token_ids=frozenset(parts.eos_token_ids),
                grammar=None if asked is None else parts.grammars.compile(asked),
            )
        )
        scheduler.add(requests[-1])
    while scheduler.has_work():
        batch = scheduler.schedule()
        output = parts.step_runner.submit(batch).wait()
        result = scheduler.update(batch, output.token_ids, output.broken_rows.tolist(), output.runs)
        output.record_logprobs(result.accepted, result.counts)
    return requests


def check_form(form: dict[str, Any], text: str) -> None:
    if form is FORMS[4]:
        thought, text = text.split("</think><call>")
        assert thought.startswith("<think>")
        text, form = text.removesuffix("</call>"), {"json": PERSON}
    if "json" in form:
        jsonschema.validate(json.loads(text), form["json"])
    elif "regex" in form:
        assert regex.fullmatch(form["regex"], text)
    elif "choice" in form:
        assert text in form["choice"]
    else:
        assert isinstance(json.loads(text), dict)


@pytest.mark.parametrize(("backend", "kind"), slow_but_a_sample([*product(BACKENDS, KINDS)], 1))
def test_answers_of_each_form_are_those_without_drafts(backend, kind, eager_cache):
    speculative = {"method": "ngram", "num_speculative_tokens": MOST}
    config = tiny_config(
        eager_cache, compile={"backend": "eager"}, structured_outputs={"backend": backend}, speculative=speculative
    )
    parts = assemble(config, NullReporter(), num_pages=40)  # fewer than all need at once: some are preempted
    try:
        parts.prepare_thread()
        plain = serve(parts, FORMS, None)
        ended = [(form, one) for form, one in zip(FORMS, plain, strict=False) if one.finish_reason == "stop"]
        assert len(ended) >= 3
        for form, one in ended:
            check_form(form, parts.tokenizer.decode(one.output_token_ids, skip_special_tokens=True))
        answers = {tuple(one.prompt_token_ids): one.output_token_ids for one in plain}
        drafter = TextDrafter(ReplayingDrafter(answers, kind, Random(1)))
        speculation = Speculation(drafter=drafter, num_tokens=MOST, vocab_size=parts.vocab_size)
        drafted = serve(parts, FORMS, speculation)
        for ours, theirs in zip(drafted, plain, strict=True):
            assert ours.output_token_ids == theirs.output_token_ids, ours.params
            assert (ours.finish_reason, ours.grammar_fault) == (theirs.finish_reason, None)
        assert all(one.num_drafted_tokens > 0 for one in drafted if len(one.output_token_ids) > 9)
        assert kind == "wrong" or sum(one.num_accepted_tokens for one in drafted) > 0
    finally:
        parts.shutdown()
