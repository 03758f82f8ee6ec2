"""Valid prompts, and lists with bad ones among them."""

import logging
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from mllm_compile.engine.async_engine import AsyncEngine
from mllm_compile.engine.engine import Engine
from mllm_compile.engine.requests import bad_phrases
from mllm_compile.errors import ConfigError, RequestError
from mllm_compile.text.template_protocol import MAX_CHARACTERS
from tests.engine.cases import params
from tests.fakes import EOS, VOCAB_SIZE, ByteTokenizer, expected_tokens, fake_engine


@pytest.mark.parametrize(
    "prompt",
    [
        {"prompt": "abc"},
        {"prompt_token_ids": list(b"abc")},
        {"prompt_token_ids": list(b"abc"), "prompt": "what it was", "multi_modal_data": None},
        {"prompt": "abc", "cache_salt": "mine"},
    ],
)
def test_vllms_dicts_are_prompts_alone_in_lists_and_in_streams(engine, prompt):
    expected = expected_tokens(b"abc", 8)
    alone, listed = engine.generate(prompt, params())[0], engine.generate(["x", prompt], params())[1]
    assert alone.token_ids == listed.token_ids == expected
    assert [token for output in engine.stream(prompt, params()) for token in output.token_ids] == expected
    assert alone.prompt_token_ids == list(b"abc")
    assert alone.prompt == prompt.get("prompt")


@pytest.mark.parametrize("prompt", ["abc", list(b"abc"), {"prompt_token_ids": list(b"abc")}])
def test_the_callers_thread_makes_the_ids_that_the_engines_thread_computes_with(engine, prompt):
    (submission,) = engine.builder.build(prompt, params(n=2, temperature=1.0))
    ids = [sequence.request.prompt_ids for sequence in submission.sequences]
    assert ids[0] is ids[1] is not None
    assert ids[0].tolist() == submission.prompt_token_ids == list(b"abc")
    assert submission.sequences[0].request.all_token_ids is ids[0]


@pytest.mark.parametrize(
    "make", [np.array, torch.tensor, partial(np.array, dtype=np.uint16)], ids=["np", "torch", "u16"]
)
def test_arrays_and_tensors_are_token_ids(engine, make):
    ids = make(list(b"abc"))
    expected = expected_tokens(b"abc", 8)
    (alone,) = engine.generate(ids, params())
    assert (alone.prompt_token_ids, alone.token_ids) == (list(b"abc"), expected)
    assert [output.token_ids for output in engine.generate([ids, "abc"], params())] == [expected, expected]
    assert [output.token_ids for output in engine.generate(make([list(b"abc")] * 2), params())] == [expected, expected]
    assert engine.generate({"prompt_token_ids": ids}, params())[0].token_ids == expected
    assert [token for output in engine.stream(ids, params()) for token in output.token_ids] == expected


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (np.array([1.0, 2.0]), "integers, got float 1.0"),
        (torch.tensor([True, False]), "integers, got bool True"),
        (np.array([[[1]]]), "integers, got list"),
        (np.array([-1]), "token 0 is -1"),
        (np.array([], dtype=np.int64), "prompt is empty"),
        (np.array(5), "a list of token ids, got int 5"),
    ],
)
def test_an_array_that_holds_no_token_ids_is_refused(engine, prompt, said):
    assert said in str(engine.generate([prompt, "abc"], params())[0].error)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ({}, "has prompt or prompt_token_ids"),
        ({"prompt": None}, "has prompt or prompt_token_ids"),
        ({"text": "abc"}, "multi_modal_data, got 'text'"),
        ({"prompt": "abc", "multi_modal_data": {"image": 1}}, "this engine takes text alone"),
        ({"prompt": 5}, "is a text, got int 5"),
        ({"prompt": ""}, "empty text"),
        ({"prompt_token_ids": "abc"}, "token ids are integers, got str"),
        ({"prompt_token_ids": [1, -2]}, "token 1 is -2"),
        ({"prompt_token_ids": []}, "prompt is empty"),
        ({"prompt": "abc", "cache_salt": 5}, "cache_salt is a text"),
        ({"prompt": "abc", 5: 5}, "got 5"),
    ],
)
def test_a_dict_that_is_no_prompt_is_refused(engine, prompt, said):
    with pytest.raises(RequestError, match=said):
        engine.generate(prompt, params())
    assert said.replace("\\", "") in engine.generate([prompt, "abc"], params())[0].error


def test_a_check_gives_the_ids_or_the_error_that_a_build_would(engine):
    given = ["abc", {"prompt_token_ids": [1, 2], "cache_salt": "mine"}, "", [VOCAB_SIZE], {"prompt": 5}]
    checked, built = engine.builder.check(given, params()), engine.builder.build(given, params())
    assert checked[:2] == [list(b"abc"), [1, 2]] == [one.prompt_token_ids for one in built[:2]]
    assert [str(error) for error in checked[2:]] == [str(one.failure) for one in built[2:]]
    assert engine.generate("abc", params())[0].token_ids == expected_tokens(b"abc", 8), "nothing of it is queued"
    with pytest.raises(RequestError, match="stop_token_ids"):
        engine.builder.check(["abc"], params(stop_token_ids=[VOCAB_SIZE]))


def test_a_text_beyond_any_model_is_refused_before_it_is_tokenized(engine, monkeypatch):
    monkeypatch.setattr(ByteTokenizer, "encode", None)
    long = "\N{GRINNING FACE}" * (MAX_CHARACTERS + 1)
    assert "at most 8,388,608" in str(engine.generate([long, [1, 2]], params())[0].error)


def test_prompts_of_different_salts_share_no_kv(engine):
    def cached(**salt):
        return engine.generate({"prompt": "the same beginning", **salt}, params())[0].num_cached_tokens

    assert [cached(), cached(cache_salt="a"), cached(cache_salt="b"), cached(cache_salt="a")] == [0, 0, 0, 16]


def test_refused_prompts_of_a_list_are_told_once(engine, caplog):
    prompts = ["", "abc", {"prompt_token_ids": [-1]}, 5, "", [1] * 300, {"x": 1}]
    with caplog.at_level(logging.WARNING, "mllm_compile"):
        outputs = engine.generate(prompts, params())
    assert [output.finish_reason for output in outputs] == ["error", "length", *["error"] * 5]
    assert len(caplog.records) == 1
    said = caplog.records[0].message
    assert "6 of 7 prompts were refused" in said
    assert "2 × the prompt is an empty text" in said
    assert "and 2 other reasons" in said
    caplog.clear()
    engine.generate(["abc", "abd"], params())
    assert not caplog.records


class SpacedTokenizer(ByteTokenizer):
    """A word behind a space is one token, as byte-pair tokenizers have it."""

    def encode(self, text, add_special_tokens=True):
        ids = list(text.encode())
        return [ids[1] + 100, *ids[2:]] if text.startswith(" ") else ids


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["ab"], ((97, 98), (197, 98))),
        ([" ab"], ((97, 98), (197, 98))),
        (["a", "a"], ((97,), (197,))),
        (["\x9f"], ((0xC2, 0x9F),)),  # behind a space past this vocabulary
    ],
)
def test_bad_words_are_vllms_token_sequences(words, expected):
    assert bad_phrases(SpacedTokenizer(), words, VOCAB_SIZE) == expected
    plain = bad_phrases(ByteTokenizer(), ["ab"], VOCAB_SIZE)
    assert plain == ((97, 98),), "a space that is a token of its own makes no other word"


def test_bad_words_reach_the_sampler_with_each_request(runner):
    with fake_engine(runner) as engine:
        engine.generate(["abc", "abd"], params(bad_words=["no", "never"]))
        requests = {request for batch in runner.batches for request in batch.requests}
        assert {request.bad_phrases for request in requests} == {(tuple(b"no"), tuple(b"never"))}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bad_words": ["x" * 33]}, "bad_words: expected texts of 1 to 32 tokens, got 33"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids: expected token ids under"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "allowed_token_ids: expected a token that does not end"),
    ],
)
def test_rules_that_cannot_be_kept_are_refused_on_arrival(engine: Engine, changes, said):
    wanted = replace(params(), **changes)
    with pytest.raises(RequestError, match=said):
        engine.generate("abc", wanted)
    with pytest.raises(RequestError, match=said):
        engine.stream("abc", wanted)


def test_bad_words_need_a_tokenizer(runner):
    with (
        fake_engine(runner, tokenizer=None) as engine,
        pytest.raises(RequestError, match="bad_words: the model has no"),
    ):
        engine.generate([1, 2], params(bad_words=["no"], detokenize=False))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("use_tqdm", "Did you mean progress\\?"),
        ("lora_request", r"Load it by load_adapter\(name, path\), and give adapter=name"),
        ("prompt_token_ids", "Give token ids as prompts"),
        ("temperature", r"Give sampling_params: SamplingParams\(temperature=…\)"),
        ("temprature", "Known: prompts, sampling_params, progress, priority"),
    ],
)
def test_an_argument_that_a_call_does_not_have_is_answered_with_the_one_to_use(runner, name, said):
    with fake_engine(runner) as engine, pytest.raises(RequestError, match=rf"a call has no argument {name}\. {said}"):
        engine.generate("abc", **{name: None})


def test_nor_do_the_calls_that_give_streams_have_it(runner):
    known = r"Known: prompt, sampling_params, request_id, priority"
    with fake_engine(runner) as engine:
        for call in (engine.stream, AsyncEngine(engine).generate):
            with pytest.raises(RequestError, match=r"a call has no argument lora_request\. Load it by load_adapter"):
                call("abc", lora_request=None)
            with pytest.raises(RequestError, match=rf"a call has no argument use_tqdm\. {known}"):
                call("abc", use_tqdm=False)


@pytest.mark.parametrize("kind", [Engine, AsyncEngine])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("model", r"Give the model first: Engine\('Qwen/Qwen3-0\.6B'\)"),
        ("gpu_memory_utilization", r"did you mean runtime\.mem_fraction_static of its config\?"),
        (
            "max_model_len",
            r"runtime\.max_model_len .*such as {'model': {'path': …}, 'runtime': {'max_model_len': …}}\.",
        ),
        ("dtype", r"model\.dtype .*such as {'model': {'path': …, 'dtype': …}}\."),
        ("enforce_eager", r"cudagraph\.mode: none .*'cudagraph': {'mode': …}"),
        ("pipeline_parallel_size", r"did you mean runtime\.pipeline_parallel_size of its config\?"),
        ("swap_area_of_pages", "known: "),
    ],
)
def test_an_argument_that_an_engine_does_not_have_is_answered_with_the_key_of_its_config(kind, name, said):
    with pytest.raises(ConfigError, match=rf"an engine has no argument {name}.*{said}"):
        kind(**{name: "x"})
