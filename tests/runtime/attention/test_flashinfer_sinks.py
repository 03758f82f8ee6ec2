"""Sinks with kernels that know of none: the factor, and that every wrapper of a batch gets it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from mllm_compile.runtime.attention.flashinfer.planned import Planned
from mllm_compile.runtime.attention.flashinfer.prefill import CapturedPrefill
from mllm_compile.runtime.attention.flashinfer.sinks import run_with_sinks, weigh_by_sinks
from mllm_compile.runtime.attention.flashinfer_backend import DecodeMetadata, FlashInferAttnBackend, PrefillMetadata
from mllm_compile.runtime.attention.split.split_decode import LinkedDecode, SplitDecode
from tests.runtime.attention.attention_cases import attend, make_case, make_layer

SINKS = torch.tensor([0.5, -1.0, 20.0, -30.0])


class Wrapper:
    """As FlashInfer's are called: attention over one request's keys, and its logarithms of sums to base 2."""

    def __init__(self, layer) -> None:
        self.layer = layer
        self.asked: list[bool] = []

    def run(self, q, *keys_and_values, out, lse=None, return_lse=False):
        if len(keys_and_values) == 1:  # pages; these tests make one a request
            (pages,) = keys_and_values
            keys, values = (cache[1, : len(q)] for cache in pages)
        else:
            keys, values = keys_and_values
        group = self.layer.num_heads // self.layer.num_kv_heads
        keys, values = (x.repeat_interleave(group, 1) for x in (keys, values))
        logits = torch.einsum("qhd,khd->qhk", q, keys) * self.layer.sm_scale
        is_later = torch.arange(len(keys)) > torch.arange(len(keys) - len(q), len(keys))[:, None]
        logits = logits.masked_fill(is_later[:, None], -math.inf)
        out.copy_(torch.einsum("qhk,khd->qhd", logits.softmax(-1), values))
        assert return_lse is (lse is not None)
        self.asked.append(return_lse)
        if lse is not None:
            lse.copy_(logits.logsumexp(-1) / math.log(2))


def backend_with(layer) -> FlashInferAttnBackend:
    backend = FlashInferAttnBackend.__new__(FlashInferAttnBackend)  # making one needs FlashInfer
    backend._group_of, backend._planned, backend._image_blocks = {layer.name: 0}, Planned(), None
    return backend


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize("use_ragged", [True, False])
def test_prompts_attend_as_the_plain_computation_does(use_ragged, sinks):
    layer = make_layer(sinks=sinks)
    case = make_case(layer, [0], [7], page_size=8)
    wrapper, backend = Wrapper(layer), backend_with(layer)
    backend._planned.set(None, PrefillMetadata([wrapper], use_ragged), num_decodes=0)
    out = attend(backend, layer, case.batch, case.q, case.k, case.v)
    torch.testing.assert_close(out, case.expected)
    assert wrapper.asked == [sinks is not None]


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_so_do_decodes_that_flashinfer_plans(sinks):
    layer = make_layer(sinks=sinks)
    case = make_case(layer, [0], [1], page_size=8)
    wrapper, backend = Wrapper(layer), backend_with(layer)
    backend._planned.set(DecodeMetadata([wrapper]), None, num_decodes=1)
    torch.testing.assert_close(attend(backend, layer, case.batch, case.q, case.k, case.v), case.expected)
    assert wrapper.asked == [sinks is not None]


def test_kernels_of_the_program_are_given_the_sinks_in_the_type_of_the_queries():
    layer = make_layer(sinks=SINKS)
    given = []
    tables = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    decode = SplitDecode(LinkedDecode(given.append), *tables, [])
    case = make_case(layer, [0], [1], page_size=8, dtype=torch.bfloat16)
    backend = backend_with(layer)
    backend._planned.set(DecodeMetadata([decode]), None, num_decodes=1)
    attend(backend, layer, case.batch, case.q, case.k, case.v)
    assert torch.equal(given[0][-1], SINKS.bfloat16())
    assert len(given[0]) == 7


def test_a_captured_step_leaves_the_rows_of_others_bitwise_as_they_are():
    """Its kernel writes neither output nor sums of rows that are decodes or padding."""
    layer, wrote = make_layer(sinks=SINKS), slice(2, 5)

    class Captured:
        _plan_info = (*range(0, 128, 16), False)

        def run(self, q, pages, *, out, lse, return_lse):
            out[wrote], lse[wrote] = 1.0, 0.0

    prefill = CapturedPrefill(Captured(), None, (6, 6), np.zeros(7), (4, 2, 16), 8, 132)
    out = torch.randn(6, 4, 16).bfloat16()
    before = out.clone()
    run_with_sinks(prefill, out, None, out=out, sinks=layer.sink_logits)
    assert torch.equal(out[:2], before[:2])
    assert torch.equal(out[5:], before[5:])
    expected = torch.sigmoid(-SINKS)[None, :, None].expand(3, 4, 16)
    torch.testing.assert_close(out[wrote].float(), expected, rtol=2**-8, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factor_is_what_a_softmax_with_one_logit_more_leaves(dtype):
    torch.manual_seed(0)
    logits, sinks = 5 * torch.randn(9, 4, 30), (10 * torch.randn(4)).to(dtype)
    out = logits.softmax(-1)
    weigh_by_sinks(out, logits.logsumexp(-1) / math.log(2), sinks)
    both = torch.cat((logits, sinks.float()[:, None].expand(9, 4, 1)), -1)
    torch.testing.assert_close(out, both.softmax(-1)[..., :-1])
