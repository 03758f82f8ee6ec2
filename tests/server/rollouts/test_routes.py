"""Experts of tokens as trainers read them over the wires."""

from __future__ import annotations

import base64
import io

import numpy as np
import pytest

from mllm_compile.runtime.sampling.params import SamplingParams
from mllm_compile.server.flow.choice import Choice, PromptRun
from mllm_compile.server.rl.extras import int32_of, npy_of, packed_experts
from mllm_compile.server.wire.messages import StepRest, decode_step, encode_step

ROUTES = np.arange(7 * 3 * 2, dtype=np.int16).reshape(7, 3, 2)


@pytest.fixture
def choice() -> Choice:
    rest = StepRest(experts=[(4, 0, ROUTES.tobytes(), list(ROUTES.shape))])
    (told,) = decode_step(encode_step(b"", b"", rest))[2].experts
    choice = Choice(PromptRun(4, [1, 2, 3], None, False), 0, SamplingParams(), None)
    assert npy_of(choice, 0) is None
    assert int32_of(choice, 0) is None
    assert packed_experts(choice, 0) is None
    choice.experts = told[2:]
    return choice


@pytest.mark.parametrize("first", [0, 3, 7, 9])
def test_all_forms_have_the_experts_from_a_token_on(choice, first):
    file = io.BytesIO(base64.b64decode(npy_of(choice, first)))
    assert np.array_equal(np.load(file, allow_pickle=False), ROUTES[first:])
    flat = np.frombuffer(base64.b64decode(int32_of(choice, first)), np.int32)
    assert np.array_equal(flat, ROUTES[first:].ravel())
    packed = packed_experts(choice, first)
    array = np.frombuffer(base64.b64decode(packed["data"]), packed["dtype"]).reshape(packed["shape"])
    assert (next(iter(packed)), packed["dtype"]) == ("data", "uint8")
    assert np.array_equal(array, ROUTES[first:])


def test_skyrls_form_is_of_the_smallest_type_that_holds_the_numbers(choice):
    choice.experts = ((ROUTES + 250).tobytes(), list(ROUTES.shape))
    packed = packed_experts(choice, 0)
    assert packed["dtype"] == "int16"
    assert np.array_equal(np.frombuffer(base64.b64decode(packed["data"]), np.int16), (ROUTES + 250).ravel())


def test_a_model_without_experts_refuses_to_tell_them(trainer):
    body = {"token_ids": [1, 2], "sampling_params": {"max_tokens": 1, "return_routed_experts": True}}
    assert "return_routed_experts" in trainer.refused("/inference/v1/generate", body).error["message"]
    wrong = {"routed_experts_prompt_start": -1}
    for fields in (wrong, {"sampling_params": wrong}):  # vLLM has it among the parameters
        body = {"token_ids": [1, 2], **fields}
        assert "at least 0" in trainer.refused("/inference/v1/generate", body).error["message"]
    of_params = {"max_tokens": 1, "routed_experts_prompt_start": 1}
    assert trainer.post("/inference/v1/generate", {"token_ids": [1, 2], "sampling_params": of_params})["choices"]
