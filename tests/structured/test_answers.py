"""Answers of a form through the whole engine: the embedded model, also with random weights, over both backends."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import regex
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mllm_compile import AsyncEngine, Engine, RequestError, SamplingParams, StructuredOutputsParams
from tests.fakes import all_pages_are_back
from tests.structured.conftest import BACKENDS
from tests.structured.test_grammars import HOSTILE
from tests.tiny_model import engine_of_pages, tiny_config

PROMPT = "Return a new list containing"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "format": "uuid"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
        "size": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def form(**given_form):
    return StructuredOutputsParams(**given_form)


def params(**changes):
    return SamplingParams(**({"temperature": 1.0, "seed": 1, "max_tokens": 200} | changes))


def config(cache: Path, backend: str = "llguidance", **sections):
    return tiny_config(cache, compile={"backend": "eager"}, structured_outputs={"backend": backend}, **sections)


@pytest.fixture(scope="module")
def llguidance_engine(eager_cache):
    with Engine(config(eager_cache, "llguidance")) as engine:
        yield engine
        assert all_pages_are_back(engine)


@pytest.fixture(scope="module")
def xgrammar_engine(eager_cache):
    with Engine(config(eager_cache, "xgrammar")) as engine:
        yield engine
        assert all_pages_are_back(engine)


@pytest.fixture(params=BACKENDS)
def engine(request):
    return request.getfixturevalue(f"{request.param}_engine")


def fits(value, schema) -> bool:
    """True if a schema that is drawn here describes the JSON data."""
    if "anyOf" in schema:
        return any(fits(value, one) for one in schema["anyOf"])
    if "enum" in schema:
        return any(value == one and type(value) is type(one) for one in schema["enum"])
    kind = schema["type"]
    if kind == "object":
        known = schema["properties"]
        is_known = isinstance(value, dict) and value.keys() <= known.keys() and value.keys() >= set(schema["required"])
        return is_known and all(fits(value[name], known[name]) for name in value)
    if kind == "array":
        is_sized = isinstance(value, list) and schema.get("minItems", 0) <= len(value) <= schema["maxItems"]
        return is_sized and all(fits(one, schema["items"]) for one in value)
    if kind == "string":
        if schema.get("format") == "uuid":
            return (
                isinstance(value, str)
                and regex.fullmatch(r"[0-9A-Fa-f]{8}(-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}", value) is not None
            )
        return isinstance(value, str) and schema["minLength"] <= len(value) <= schema["maxLength"]
    if kind in ("integer", "number"):
        is_number = isinstance(value, int if kind == "integer" else (int, float)) and not isinstance(value, bool)
        return is_number and schema.get("minimum", value) <= value <= schema.get("maximum", value)
    return type(value) is {"boolean": bool, "null": type(None)}[kind]


SCALARS = st.one_of(
    st.builds(
        lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more},
        st.integers(-99, 99),
        st.integers(0, 500),
    ),
    st.builds(
        lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more},
        st.integers(0, 2),
        st.integers(0, 3),
    ),
    st.builds(
        lambda values: {"enum": values},
        st.lists(st.sampled_from(["x", "é日", 'a"b', "", 1, -7, True, None]), min_size=1, unique_by=repr),
    ),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
)
NAMES = st.sampled_from(["a", "b c", "naïve", 'q"', "\\", "items", "type"])
SCHEMAS = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(
            lambda properties, chance: {
                "type": "object",
                "properties": properties,
                "required": [name for name in properties if chance.random() < 0.7],
                "additionalProperties": False,
            },
            st.dictionaries(NAMES, inner, max_size=3),
            st.randoms(use_true_random=False),
        ),
        st.builds(
            lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
            inner,
            st.integers(0, 1),
            st.integers(0, 2),
        ),
        st.builds(lambda schemas: {"anyOf": schemas}, st.lists(inner, min_size=1, max_size=2)),
    ),
    max_leaves=5,
)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_that_ends_is_json_that_the_schema_describes(engine, temperature):
    asked = form(json=PERSON, disable_any_whitespace=temperature == 0)  # or greedy answers are whitespace
    each = [params(temperature=temperature, seed=seed, structured_outputs=asked) for seed in range(6)]
    outputs = engine.generate([f"{PROMPT} {number}" for number in range(6)], each)
    ended = [output for output in outputs if output.finish_reason == "stop"]
    assert len(ended) >= 3
    assert all(fits(json.loads(output.text), PERSON) for output in ended)


def check_random_schemas(engine, schemas, **changes):
    each = [
        params(seed=index, structured_outputs=form(json=schema, disable_any_whitespace=True), **changes)
        for index, schema in enumerate(schemas)
    ]
    for schema, output in zip(schemas, engine.generate([PROMPT] * len(schemas), each), strict=True):
        if "maxLength" in str(schema) and engine.config.structured_outputs.backends == ("xgrammar",):
            assert "xgrammar does not keep to all of the JSON schema: minLength" in output.error
            continue
        assert output.error is None, schema
        if output.finish_reason == "stop":
            assert fits(json.loads(output.text), schema), (schema, output.text)


# No shrinking: it would take minutes, and the schema is named.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SOME = settings(max_examples=2, phases=PHASES, suppress_health_check=list(HealthCheck))
MANY = settings(max_examples=40, phases=PHASES, suppress_health_check=list(HealthCheck))


@given(st.lists(SCHEMAS, min_size=16, max_size=16), st.sampled_from([1.0, 100.0]))
@SOME
def test_answers_to_random_schemas_are_json_that_they_describe(engine, schemas, temperature):
    """At temperature 100 any token is about as likely as another."""
    check_random_schemas(engine, schemas, temperature=temperature)


@pytest.mark.slow
@given(st.lists(SCHEMAS, min_size=16, max_size=16), st.sampled_from([1.0, 100.0]))
@MANY
def test_answers_to_many_random_schemas_are_json_that_they_describe(engine, schemas, temperature):
    check_random_schemas(engine, schemas, temperature=temperature)


@pytest.fixture(scope="module", params=BACKENDS)
def senseless_engine(request, tmp_path_factory):
    """The embedded model with random weights."""
    with Engine(config(tmp_path_factory.mktemp("senseless"), request.param, model={"load_format": "dummy"})) as engine:
        yield engine


@pytest.mark.slow
@given(st.lists(SCHEMAS, min_size=16, max_size=16))
@MANY
def test_a_model_of_random_weights_answers_in_form_too(senseless_engine, schemas):
    check_random_schemas(senseless_engine, schemas)


@pytest.mark.parametrize(
    ("given_form", "pattern"),
    [
        ({"regex": r"[a-z]{3}-[0-9]{2}"}, r"[a-z]{3}-[0-9]{2}"),
        ({"choice": ["yes", "no", "naïve €5"]}, "yes|no|naïve €5"),
        ({"grammar": 'root ::= "SELECT " c\nc ::= "a" | "b"'}, "SELECT (a|b)"),
        ({"grammar": 'start: "SELECT " C\nC: "a" | "b"'}, "SELECT (a|b)"),
    ],
)
def test_answers_match_their_regex_choice_or_grammar(engine, given_form, pattern):
    for output in engine.generate(
        [PROMPT] * 4, [params(seed=s, structured_outputs=form(**given_form)) for s in range(4)]
    ):
        assert (output.finish_reason, output.outputs[0].stop_reason) == ("stop", None)
        assert regex.fullmatch(pattern, output.text)


def test_a_json_object_is_one(engine):
    output = engine.generate(PROMPT, params(temperature=0, structured_outputs=form(json_object=True)))[0]
    assert output.finish_reason == "length" or isinstance(json.loads(output.text), dict)
    assert output.text.startswith("{")


def test_both_backends_give_the_same_answers(llguidance_engine, xgrammar_engine):
    each = [
        params(seed=seed, structured_outputs=asked)
        for seed, asked in enumerate([form(json=PERSON), form(regex="[a-z ]{5,20}x"), form(choice=["one", "two"])])
    ]
    answers = [engine.generate([PROMPT] * 3, each) for engine in (llguidance_engine, xgrammar_engine)]
    assert len({tuple(tuple(output.token_ids) for output in outputs) for outputs in answers}) == 1


def test_several_answers_to_a_prompt_each_have_the_form(llguidance_engine):
    output = llguidance_engine.generate(PROMPT, params(n=5, structured_outputs=form(regex="[a-z]{4}[0-9]{4}")))[0]
    texts = [completion.text for completion in output.outputs]
    assert all(regex.fullmatch("[a-z]{4}[0-9]{4}", text) for text in texts)
    assert len(set(texts)) > 1


def test_a_stream_a_chat_and_asyncio_give_the_same_answer(llguidance_engine):
    asked = params(structured_outputs=form(json=PERSON))
    whole = llguidance_engine.generate(PROMPT, asked)[0].text
    assert "".join(output.text for output in llguidance_engine.stream(PROMPT, asked)) == whole

    async def read():
        engine = AsyncEngine(llguidance_engine)
        return "".join([output.text async for output in engine.generate(PROMPT, asked)])

    assert asyncio.run(read()) == whole
    chat = llguidance_engine.chat(
        [{"role": "user", "content": "hi"}], params(structured_outputs=form(regex="[a-c]{5}"))
    )
    assert regex.fullmatch("[a-c]{5}", chat[0].text)


def test_preempted_answers_and_prompts_in_chunks_are_the_same(eager_cache):
    each = [params(seed=seed, max_tokens=60, structured_outputs=form(regex=r"([a-z]+ ){30}")) for seed in range(4)]
    prompts = [f"{PROMPT} {number} " * 6 for number in range(4)]

    def answers(num_pages=None, **runtime):
        with engine_of_pages(
            config(eager_cache, runtime=runtime | {"enable_prefix_cache": False}), num_pages
        ) as engine:
            outputs = engine.generate(prompts, each)
            return [output.token_ids for output in outputs], engine.stats().preemptions

    plain, none = answers()
    tight, some = answers(num_pages=24)
    assert (none, some > 0) == (0, True)
    assert tight == plain
    assert answers(max_num_batched_tokens=16)[0] == plain


def test_a_step_of_fixed_shapes_masks_the_right_rows(eager_cache):
    asked = [params(seed=seed, structured_outputs=form(regex="[a-z]{10,20}x")) for seed in range(3)]
    with Engine(config(eager_cache, runtime={"deterministic": True})) as engine:
        together = engine.generate([PROMPT, "def", "a"], asked)
        alone = [engine.generate(prompt, one)[0] for prompt, one in zip([PROMPT, "def", "a"], asked, strict=True)]
    assert [output.token_ids for output in together] == [output.token_ids for output in alone]
    assert all(regex.fullmatch("[a-z]{10,20}x", output.text) for output in together)


def test_neighbours_without_a_form_keep_their_answers(llguidance_engine):
    plain = SamplingParams(temperature=0, max_tokens=30)
    seeded = params(max_tokens=30)
    alone = [llguidance_engine.generate(PROMPT, one)[0].token_ids for one in (plain, seeded)]
    formed = params(structured_outputs=form(json=PERSON))
    outputs = llguidance_engine.generate([PROMPT] * 4, [formed, plain, formed, seeded])
    assert [outputs[1].token_ids, outputs[3].token_ids] == alone


def test_a_form_that_allows_any_text_changes_no_token(llguidance_engine):
    for one in (SamplingParams(temperature=0, max_tokens=40), params(max_tokens=40, seed=4), params(top_k=20, seed=2)):
        plain = llguidance_engine.generate(PROMPT, one)[0]
        assert "\ufffd" not in plain.text
        formed = llguidance_engine.generate(PROMPT, replace(one, structured_outputs=form(regex=r"(.|\n)*")))[0]
        assert formed.token_ids == plain.token_ids


def test_min_tokens_stop_texts_and_log_probabilities_beside_a_form(llguidance_engine):
    long = llguidance_engine.generate(PROMPT, params(min_tokens=20, structured_outputs=form(regex="[a-z]*")))[0]
    assert len(long.token_ids) >= 20
    short = llguidance_engine.generate(PROMPT, params(min_tokens=20, structured_outputs=form(regex="abc")))[0]
    assert (short.text, short.finish_reason) == ("abc", "stop")
    stopped = llguidance_engine.generate(PROMPT, params(stop="x", structured_outputs=form(regex="[a-w]{3}x[a-z]+")))[0]
    assert regex.fullmatch("[a-w]{3}", stopped.text)
    assert stopped.outputs[0].stop_reason == "x"


def test_log_probabilities_are_of_the_models_own_distribution(llguidance_engine):
    own = llguidance_engine.generate(PROMPT, params(logprobs=-1, max_tokens=1))[0].logprobs[0]
    asked = params(logprobs=3, structured_outputs=form(regex="[0-9]"))
    masked = llguidance_engine.generate(PROMPT, asked)[0].logprobs[0]
    assert len(masked) == 4, "three likelier ones, and the digit"
    for token_id, score in masked.items():
        assert (score.logprob, score.rank) == (own[token_id].logprob, own[token_id].rank)


def test_an_aborted_answer_leaves_the_others_alone(llguidance_engine):
    endless = params(max_tokens=400, structured_outputs=form(regex="[a-z ]{2000}"))
    stream = llguidance_engine.stream(PROMPT, endless, request_id="to be aborted")
    next(stream)
    output = llguidance_engine.generate(PROMPT, params(structured_outputs=form(choice=["fine"])))[0]
    llguidance_engine.abort("to be aborted")
    assert output.text == "fine"
    assert [*stream][-1].finish_reason == "abort"


def test_hostile_forms_end_in_errors_of_their_own_while_neighbours_go_on(llguidance_engine):
    formed = [params(structured_outputs=form(**one)) for one in HOSTILE.values()]
    good = params(structured_outputs=form(json=PERSON))
    outputs = llguidance_engine.generate([PROMPT] * (len(formed) + 2), [good, *formed, SamplingParams(max_tokens=5)])
    assert [output.error is None for output in outputs] == [True, *[False] * len(formed), True]
    for output in outputs[1:-1]:
        assert output.finish_reason == "error"
        assert output.error.startswith("structured_outputs: ")
    assert llguidance_engine.stats().broken_logits == 0


def test_a_grammar_that_gives_up_on_the_way_ends_its_request_alone_with_its_reason(llguidance_engine):
    # 2**40 states after a text that no random draw has.
    late = form(regex="def f[(]x[)]:" + "(a|b)*a" + "(a|b){24}" * 2 + "[^c]{900}" * 40)
    neighbour, output = llguidance_engine.generate(
        [PROMPT, PROMPT], [params(structured_outputs=form(choice=["fine"])), params(structured_outputs=late)]
    )
    assert neighbour.text == "fine"
    assert output.error is None or "llguidance cannot go on with the grammar" in output.error


def test_a_form_is_refused_where_the_model_has_no_tokenizer():
    from tests.fakes import fake_engine

    with fake_engine() as engine, pytest.raises(RequestError, match=r"structured_outputs: the model has no tokenizer"):
        engine.generate([1, 2], params(structured_outputs=form(regex="a")))


def test_an_engine_that_is_asked_for_no_form_imports_nothing_and_starts_no_process(eager_cache):
    code = """
import sys
from pathlib import Path
from mllm_compile import Engine, SamplingParams
from tests.tiny_model import tiny_config
with Engine(tiny_config(Path(sys.argv[1]), compile={"backend": "eager"})) as engine:
    engine.generate("def", SamplingParams(max_tokens=2))
    from mllm_compile.process import helper_process
    imported = {"llguidance", "xgrammar", "tvm_ffi"} & set(sys.modules)
    processes = [process for one in helper_process._everyone for process in one._processes]
    print(imported, processes, engine.builder.grammars._vocabulary)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(eager_cache)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "set() [] None"


def test_draws_are_from_the_models_distribution_of_what_is_allowed(llguidance_engine):
    own = llguidance_engine.generate(PROMPT, params(logprobs=-1, max_tokens=1))[0].logprobs[0]
    weight = {one.decoded_token: math.exp(one.logprob) for one in own.values() if one.decoded_token in ("s", "[")}
    likely = weight["s"] / sum(weight.values())
    count = 200
    each = [params(seed=seed, max_tokens=1, structured_outputs=form(regex=r"[s\[]")) for seed in range(count)]
    texts = [output.text for output in llguidance_engine.generate([PROMPT] * count, each)]
    assert set(texts) == {"s", "["}
    assert abs(texts.count("s") - count * likely) < 4 * math.sqrt(count * likely * (1 - likely))
