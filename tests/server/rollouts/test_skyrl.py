"""SkyRL's own paths: its envelopes of sampling masks, and its form of a reset."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tests.server.harness import eventually
from tests.server.rollouts.test_wires import long
from tests.server.rollouts.trainer import PROMPT

PATH = "/skyrl/v1/generate"
SAMPLING = {"temperature": 1.0, "seed": 7, "max_tokens": 8, "top_k": 5, "ignore_eos": True}


def array_of(envelope):
    assert next(iter(envelope)) == "data"  # which its reader looks for in the bytes
    return np.frombuffer(base64.b64decode(envelope["data"]), envelope["dtype"]).reshape(envelope["shape"])


def test_the_tokens_that_filters_kept_are_rows_of_one_width(trainer):
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING | {"top_p": 0.6}, "return_sample_support": True}
    (choice,) = trainer.post(PATH, body)["choices"]
    support = array_of(choice["rollout_sample_support"])
    assert (support.dtype, support.shape) == (np.int32, (8, 5))
    sampling = body["sampling_params"] | {"logprobs": 0, "return_sampling_mask": True}
    told = trainer.sample(sampling_params=sampling)
    kept = told["sampling_mask"]
    assert [row[row >= 0].tolist() for row in support] == kept
    assert {len(one) for one in kept} != {5}, "some rows are padded"
    assert all((row[len(one) :] == -1).all() for row, one in zip(support, kept, strict=True))
    assert choice["token_ids"] == told["token_ids"]
    assert choice["logprobs"]["content"] == [{"logprob": one["logprob"]} for one in told["logprobs"]["content"]]
    assert choice["routed_experts"] is None


def test_a_greedy_token_has_an_empty_row(trainer):
    body = {"token_ids": PROMPT, "sampling_params": SAMPLING | {"temperature": 0}, "return_sample_support": True}
    (choice,) = trainer.post(PATH, body)["choices"]
    assert (array_of(choice["rollout_sample_support"]) == np.full((8, 5), -1)).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "return_routed_experts: expected false: experts are not kept"),
        ({"return_sample_support": True}, "expected top_k above 1 beside it, got 'None'"),
        ({"return_sample_support": True, "sampling_params": {"top_k": 1}}, "above 1 beside it, got '1'"),
        (
            {"return_sample_support": True, "sampling_params": {"top_k": 1 << 40, "max_tokens": 2}},
            "up to 16,777,216 ids",
        ),
        ({"return_sample_support": True, "sampling_params": {"top_k": 1 << 24}}, "Lower top_k, max_tokens or n"),
        ({"return_sample_support": True, "sampling_params": {"top_k": 1 << 22, "max_tokens": 2, "n": 3}}, "for 3 of"),
        ({"sampling_params": {"routed_experts_prompt_start": -1}}, "at least 0, got -1"),
        ({"sampling_params": {"routed_experts_prompt_start": "a"}}, "expected an integer, got 'a'"),
    ],
)
def test_what_is_not_kept_is_refused(trainer, fields, message):
    assert message in trainer.refused(PATH, {"token_ids": PROMPT, **fields}).error["message"]


@pytest.mark.parametrize(
    ("query", "body"), [("", {"reset_running_requests": True}), ("?reset_running_requests=true", None)]
)
def test_a_reset_may_take_the_keys_of_running_requests_too(trainer, query, body):
    whole = long(trainer, 60).wait()["choices"][0]["token_ids"]
    before = trainer.server.said.count(" preempted 1 ")
    asked = long(trainer, 60)
    trainer.post("/pause?mode=keep&clear_cache=false")  # it runs still when the reset comes
    assert trainer.post("/reset_prefix_cache" + query, body) == {"success": True}
    trainer.post("/resume")
    assert asked.wait()["choices"][0]["token_ids"] == whole
    eventually(lambda: trainer.server.said.count(" preempted 1 ") == before + 1, "the log tells of it")
