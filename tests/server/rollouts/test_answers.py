"""/inference/v1/generate and SGLang's /generate against the same engine in process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mllm_compile import Engine, SamplingParams
from tests.server.harness import Server

PROMPT = [1, 5, 9, 14, 3, 27]
RAW, PROCESSED = "raw_logprobs", "processed_logprobs"


@pytest.fixture(scope="module")
def server(rollout_server: Server) -> Server:
    return rollout_server


@pytest.fixture(scope="module")
def engine(tiny_yaml: Path) -> Iterator[Engine]:
    with Engine(str(tiny_yaml)) as engine:
        yield engine


def tokens(server: Server, sampling: dict, **fields):
    return server.post("/inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling, **fields})


@pytest.mark.parametrize("mode", [None, RAW])
def test_ids_and_scores_are_the_engines_own(server, engine, mode):
    fields = {
        "temperature": 0.7,
        "top_p": 0.8,
        "seed": 3,
        "max_tokens": 12,
        "logprobs": 2,
        "return_sampling_mask": True,
    }
    answer = tokens(server, fields | ({} if mode is None else {"logprobs_mode": mode})).json
    (choice,) = answer["choices"]
    params = SamplingParams(**fields, logprobs_mode=mode or PROCESSED)
    (own,) = engine.generate({"prompt_token_ids": PROMPT}, params)[0].outputs
    assert choice["token_ids"] == own.token_ids
    content = choice["logprobs"]["content"]
    assert [one["token_id"] for one in content] == own.token_ids
    for told, scores in zip(content, own.logprobs, strict=True):
        ours = scores[told["token_id"]]
        assert (told["logprob"], told["rank"]) == (max(ours.logprob, -9999.0), ours.rank)
        assert [one["token_id"] for one in told["top_logprobs"]] == [
            token for token, one in sorted(scores.items(), key=lambda item: item[1].rank) if one.rank <= 2
        ]
    kept = choice["sampling_mask"]
    assert kept == [one.tolist() for one in own.sampling_mask]
    assert all(token in of_token for token, of_token in zip(own.token_ids, kept, strict=True))
    assert choice["weight_versions"][0]["end"] == len(own.token_ids)


def test_processed_log_probabilities_sum_to_one_over_the_kept_tokens(engine):
    params = SamplingParams(temperature=1.3, top_k=6, seed=1, max_tokens=4, logprobs=-1, logprobs_mode=PROCESSED)
    (own,) = engine.generate({"prompt_token_ids": PROMPT}, params)[0].outputs
    for scores in own.logprobs:
        probs = np.exp([one.logprob for one in scores.values()])
        assert probs.sum() == pytest.approx(1.0, abs=1e-5)
        assert (probs > 0).sum() == 6


def test_without_max_tokens_an_answer_goes_on_to_its_end(server):
    greedy = {"temperature": 0, "ignore_eos": True}
    (long,) = tokens(server, greedy | {"max_tokens": 40}).json["choices"]
    last = next(token for token in long["token_ids"][20:] if token not in long["token_ids"][:20])
    (choice,) = tokens(server, greedy | {"stop_token_ids": [last]}).json["choices"]
    assert choice["finish_reason"] == "stop"
    assert choice["token_ids"] == long["token_ids"][: long["token_ids"].index(last) + 1]


def test_prompt_log_probabilities_come_beside_a_cached_prefix(server):
    cold = tokens(server, {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}).json
    tokens(server, {"max_tokens": 1, "temperature": 0})
    again = tokens(server, {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 0}).json
    assert again["prompt_logprobs"] == cold["prompt_logprobs"]
    assert cold["prompt_logprobs"][0] is None
    assert len(cold["prompt_logprobs"]) == len(PROMPT)


def test_several_answers_and_the_clients_names(server):
    answer = tokens(server, {"n": 3, "max_tokens": 3, "seed": 5}, request_id="mine", cache_salt="7").json
    assert answer["request_id"] == "mine"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sampling_params": {"nonsense": 1}}, "nonsense is no field of SamplingParams"),
        ({"sampling_params": {"logprobs": -1}}, "logprobs: expected an integer from 0 to 20, got -1"),
        ({"sampling_params": {"logprobs_mode": "raw_logits"}}, "logprobs_mode: expected raw_logprobs"),
        ({"sampling_params": {"return_sampling_mask": True}}, "return_sampling_mask: expected logprobs beside it"),
        ({"token_ids": [10**9]}, "expected ids from 0 to"),
        ({"token_ids": []}, "empty"),
        ({"stream": True}, "stream: expected false"),
        ({"token_ids": "text"}, "token_ids: expected"),
    ],
)
def test_what_cannot_be_is_refused_by_its_name(server, body, message):
    answer = server.post("/inference/v1/generate", {"token_ids": PROMPT, **body})
    assert answer.status == 400
    assert message in answer.error["message"]


def test_sglangs_answer_has_tempered_scores(server, engine):
    sampling = {"temperature": 0.6, "top_k": 5, "sampling_seed": 4, "max_new_tokens": 6, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 1}
    answer = server.post("/generate", body | {"logprob_start_len": 0}).json
    params = SamplingParams(temperature=0.6, top_k=5, seed=4, max_tokens=6, ignore_eos=True, logprobs=-1)
    (own,) = engine.generate({"prompt_token_ids": PROMPT}, params)[0].outputs
    assert answer["output_ids"] == own.token_ids
    assert answer["text"] == own.text
    info = answer["meta_info"]
    assert info["finish_reason"] == {"type": "length", "length": 6}
    assert info["input_token_logprobs"][0][0] is None
    assert [one[1] for one in info["input_token_logprobs"]] == PROMPT
    for (told, token, _), scores in zip(info["output_token_logprobs"], own.logprobs, strict=True):
        raw = np.array([scores[index].logprob for index in range(len(scores))])
        tempered = raw / 0.6 - np.log(np.exp(raw / 0.6).sum())
        assert told == pytest.approx(tempered[token], abs=1e-4)


def test_sglangs_lists_are_answered_by_lists(server):
    body = {"sampling_params": {"temperature": 0, "max_new_tokens": 2}}
    one = server.post("/generate", body | {"text": "Return a new list"}).json
    two = server.post("/generate", body | {"text": ["Return a new list", "def"]}).json
    assert one["text"] == two[0]["text"]
    assert len(two) == 2
    assert server.post("/generate", body).status == 400
    whole = server.post("/generate", body | {"input_ids": PROMPT, "return_logprob": True, "top_logprobs_num": -1})
    assert "logprobs: expected an integer from 0 to 20, got -1" in whole.error["message"]


def test_a_completion_tells_versions_where_it_is_asked_to(server):
    body = {"prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    assert "weight_versions" not in server.post("/v1/completions", body).json["choices"][0]
    (choice,) = server.post("/v1/completions", body | {"return_weight_versions": True}).json["choices"]
    assert choice["weight_versions"][0]["end"] == 3
    events = server.post("/v1/completions", body | {"return_weight_versions": True, "stream": True}).events
    assert events[-2]["choices"][0]["weight_versions"][0]["end"] == 3


def test_without_the_option_such_paths_say_how_to_have_them(tiny_server):
    answer = tiny_server.post("/inference/v1/generate", {"token_ids": PROMPT})
    assert answer.status == 404
    assert "--enable-rl" in answer.error["message"]
