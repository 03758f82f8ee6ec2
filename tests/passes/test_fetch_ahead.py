"""passes/fetch_ahead.py: experts are given the weights of the linears behind them."""

from __future__ import annotations

import pytest

from mllm_compile.passes import fetch_ahead
from mllm_compile.passes.base import PassTarget
from mllm_compile.passes.fetch_ahead import FetchAhead
from tests.passes.support.stand_ins import ALL, stand_in_ops, streamed_ops_on_cpu
from tests.passes.test_stream_experts import calls, forms_of_experts, own_weights, streamed


@pytest.fixture(scope="module", autouse=True)
def kernels_on_cpu():
    with streamed_ops_on_cpu(), stand_in_ops(ALL):
        yield


def test_the_weights_behind_gate_up_are_given_to_it():
    middle, last = forms_of_experts(streamed(own_weights, FetchAhead))
    *_, (_, weight, *_) = calls(middle, "stream_linear")
    ((_, down, *_),) = calls(middle, "stream_expert_down_norm")
    assert calls(middle, "stream_expert_up")[0][4:6] == (down, weight)
    ((_, down, *_),) = calls(last, "stream_expert_down")
    assert calls(last, "stream_expert_up")[0][4:6] == (down, None), "no linear of ours stands behind the last ones"


def test_a_weight_that_would_fill_the_cache_is_left_alone(monkeypatch):
    monkeypatch.setattr(fetch_ahead, "_MOST_BYTES", 1000)
    for form in forms_of_experts(streamed(own_weights, FetchAhead)):
        ((_, _, _, _, down, ahead, *_),) = calls(form, "stream_expert_up")
        assert down is not None and ahead is None


def test_a_gpu_without_the_kernels_does_without():
    target = PassTarget("cuda", True, False, True, "bfloat16", "bfloat16")
    assert "CUDA C++" in (FetchAhead.obstacle(target) or "")
