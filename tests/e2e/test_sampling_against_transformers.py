"""Sampling parameters through the whole engine, in float32 on a CPU, against what Transformers' generate does."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile import Engine, SamplingParams
from tests.tiny_model import TINY, Reference, tiny_config

TEXTS = ['The "for" statement is used to', "Return a new list containing", "posixpath.join(a, *p)\n    Join two or"]
ENDING = "<|im_start|>user\nWhat does shutil.copytree do?<|im_end|>\n<|im_start|>assistant\n"
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def reference() -> Reference:
    return Reference()


@pytest.fixture(scope="module")
def engine(eager_cache: Path) -> Iterator[Engine]:
    """Prompts of more than 16 tokens are computed in chunks."""
    config = tiny_config(eager_cache, compile={"backend": "eager"}, runtime={"max_num_batched_tokens": 16})
    with Engine(config) as engine:
        yield engine


def generated(reference: Reference, text: str, **options: Any) -> list[int]:
    """Transformers' greedy continuation of the text."""
    ids = torch.tensor([reference.encode(text)])
    options = {"do_sample": False, "max_new_tokens": 24} | options
    return reference.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


def tokens(engine: Engine, text: str, params: SamplingParams) -> list[int]:
    return engine.generate(text, params)[0].token_ids


@pytest.mark.parametrize("penalty", [1.3, 0.8])
def test_the_repetition_penalty_gives_transformers_tokens(engine, reference, penalty):
    for text in TEXTS:
        expected = generated(reference, text, repetition_penalty=penalty)
        assert tokens(engine, text, replace(GREEDY, repetition_penalty=penalty)) == expected


def test_min_tokens_is_transformers_min_new_tokens(engine, reference):
    short = generated(reference, ENDING, max_new_tokens=40)
    assert len(short) < 40, "it ends by itself"
    at_least = len(short) + 5
    expected = generated(reference, ENDING, max_new_tokens=40, min_new_tokens=at_least)
    output = engine.generate(ENDING, SamplingParams(temperature=0, max_tokens=40, min_tokens=at_least))[0]
    assert output.token_ids == expected
    assert len(expected) >= at_least


def test_logit_bias_is_transformers_sequence_bias(engine, reference):
    for text in TEXTS:
        plain = generated(reference, text)
        bias = {plain[0]: -6.0, plain[3]: -100.0, plain[5]: 4.5}
        expected = generated(reference, text, sequence_bias={(token,): value for token, value in bias.items()})
        assert expected != plain
        assert tokens(engine, text, replace(GREEDY, logit_bias=bias)) == expected


def test_frequency_and_presence_penalties_count_the_output_alone(engine, reference):
    for text in TEXTS:
        ids, seen = reference.encode(text), Counter()
        prompt_length = len(ids)
        for _ in range(24):
            logits = reference.logprobs(ids)[-1]
            for token, count in seen.items():
                logits[token] -= 0.9 * count + 0.4
            ids.append(int(logits.argmax()))
            seen[ids[-1]] += 1
        params = replace(GREEDY, frequency_penalty=0.9, presence_penalty=0.4, ignore_eos=True)
        assert tokens(engine, text, params) == ids[prompt_length:]


def test_parameters_of_one_request_leave_the_others_alone(engine, reference):
    each = [
        replace(GREEDY, repetition_penalty=1.3),
        GREEDY,
        replace(GREEDY, logit_bias={5: -100.0}, min_tokens=3, frequency_penalty=1.0),
        SamplingParams(temperature=1.1, top_k=9, top_p=0.8, min_p=0.05, seed=3, max_tokens=24),
    ]
    together = engine.generate([TEXTS[0], TEXTS[1], TEXTS[2], TEXTS[0]], each)
    assert together[0].token_ids == generated(reference, TEXTS[0], repetition_penalty=1.3)
    assert together[1].token_ids == generated(reference, TEXTS[1])
    for text, params, output in zip([TEXTS[2], TEXTS[0]], each[2:], together[2:], strict=True):
        assert output.token_ids == tokens(engine, text, params)


# --- where an answer ends -------------------------------------------------------------------------------------------


def test_a_stop_token_ends_the_answer_and_is_its_last_token(engine, reference):
    plain = generated(reference, TEXTS[0])
    stop = plain[7]
    output = engine.generate(TEXTS[0], replace(GREEDY, stop_token_ids=[stop]))[0].outputs[0]
    assert output.token_ids == plain[: plain.index(stop) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == reference.text(output.token_ids[:-1])
    shown = engine.generate(TEXTS[0], replace(GREEDY, stop_token_ids=[stop], include_stop_str_in_output=True))[0]
    assert shown.text == reference.text(output.token_ids)


def test_a_stop_text_ends_the_answer_where_it_begins_alike_in_a_stream(engine, reference):
    text = reference.text(generated(reference, TEXTS[0]))
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    where = text.index(stop)
    for include, expected in ((False, text[:where]), (True, text[: where + len(stop)])):
        params = replace(GREEDY, stop=[stop, "not there"], include_stop_str_in_output=include)
        output = engine.generate(TEXTS[0], params)[0].outputs[0]
        assert (output.text, output.finish_reason, output.stop_reason) == (expected, "stop", stop)
        assert "".join(part.text for part in engine.stream(TEXTS[0], params)) == expected


def test_before_min_tokens_a_stop_text_does_not_end_the_answer(engine, reference):
    plain = generated(reference, TEXTS[0])
    text = reference.text(plain)
    stop = text[:6].strip()  # complete within the first tokens
    assert stop
    ended = engine.generate(TEXTS[0], replace(GREEDY, stop=stop))[0]
    longer = engine.generate(TEXTS[0], replace(GREEDY, stop=stop, min_tokens=len(ended.token_ids) + 1))[0]
    assert len(ended.token_ids) < len(longer.token_ids)
    assert longer.text.startswith(text[:6])


# --- n, defaults and log-probabilities ------------------------------------------------------------------------------


def test_n_answers_match_n_requests_with_seeds_one_apart(engine):
    params = SamplingParams(n=3, temperature=1.0, seed=11, max_tokens=12, logprobs=0)
    output = engine.generate(TEXTS[1], params)[0]
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    for i, completion in enumerate(output.outputs):
        assert completion.token_ids == tokens(engine, TEXTS[1], replace(params, n=1, seed=11 + i))
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3


def test_prompt_log_probabilities_in_chunks_and_beside_others_are_transformers(engine, reference):
    text = "If the file cannot be opened, an OSError is raised. The argument is\n" * 3
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=4, logprobs=4)
    outputs = engine.generate([text, *TEXTS], [params] + [replace(GREEDY, prompt_logprobs=1)] * 3)
    assert len(outputs[0].prompt_token_ids) > 3 * 16
    for output in outputs:
        ids = [*output.prompt_token_ids, *output.token_ids]
        expected = reference.logprobs(ids)
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
        for row, entry in enumerate(output.prompt_logprobs[1:]):
            assert ids[row + 1] in entry
            for token, scored in entry.items():
                assert scored.logprob == pytest.approx(expected[row, token].item(), abs=1e-4)
    one_token = outputs[0]
    expected = reference.logprobs(one_token.prompt_token_ids)[-1]
    for token, scored in one_token.logprobs[0].items():
        assert scored.logprob == pytest.approx(expected[token].item(), abs=1e-4)


def test_without_parameters_the_model_s_generation_config_decides(reference, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(TINY, folder)
    settings = {"eos_token_id": [2, 0], "do_sample": False, "repetition_penalty": 1.3, "max_new_tokens": 9}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    model = {"path": str(folder), "dtype": "float32"}
    with Engine(tiny_config(tmp_path, model=model, compile={"backend": "eager"})) as engine:
        expected = generated(reference, TEXTS[0], repetition_penalty=1.3, max_new_tokens=9)
        assert engine.generate(TEXTS[0])[0].token_ids == expected
        assert engine.generate(TEXTS[0], SamplingParams(temperature=0))[0].token_ids == generated(
            reference, TEXTS[0], max_new_tokens=16
        ), "parameters of one's own start from SamplingParams' defaults, not from the model's"
