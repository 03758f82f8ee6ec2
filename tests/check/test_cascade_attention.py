"""The check of the program's own kernels for decodes of one prefix: right ones pass, wrong ones are told."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.check.cascade_attention import check_cascade_attention
from mllm_compile.check.served import Served
from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import LayerKernels
from mllm_compile.runtime.program.link import link
from mllm_compile.runtime.program.spec import Program

PAGE = 16
LAYER = LayerSpec("layers.0.attn", 0, 4, 2, 16, 16, 0.3, 0.0, -1, None)


def decode(inputs, first_row=0, forgets=0):
    """The kernels' computation, in float32, from the same scratch."""
    q, keys, values, table, seq_lens, out, partial, tops, totals, done, shared_len, *shared, log_sums = inputs
    count, heads, dim = q.shape
    assert partial.shape[:1] == tops.shape[:1] == totals.shape[:1] == (count,)
    assert shared[0].shape == (*shared[1].shape, dim) and shared[1].shape == shared[2].shape
    assert log_sums.shape == (count, heads) and done.shape == (count, keys.shape[1]) and not done.any()
    num_shared = int(shared_len)
    for row, length in enumerate(seq_lens.tolist()):
        places = torch.arange(length)
        pages = torch.where(places < num_shared, table[first_row][places // PAGE], table[row][places // PAGE]).long()
        slots = (pages * PAGE + places % PAGE)[forgets if length > num_shared + 100 else 0 :]
        k, v = (x[slots].float().repeat_interleave(heads // keys.shape[1], 1) for x in (keys, values))
        weights = (torch.einsum("hd,lhd->hl", q[row].float(), k) * LAYER.sm_scale).softmax(-1)
        out[row] = torch.einsum("hl,lhd->hd", weights, v).to(out.dtype)


def check(piece) -> None:
    program = Program((), (LAYER,), (), "logits", layer_kernels={LAYER.name: LayerKernels(cascade="cascade")})
    linked = link(program, {"cascade": piece}, {}, torch.device("cpu"))
    check_cascade_attention(linked, Served(PAGE, torch.bfloat16, torch.bfloat16, torch.device("cpu")))


def test_right_kernels_pass():
    check(decode)


def decode_the_last_alone(inputs):
    decode(inputs)
    inputs[5][:-1] = torch.nan


@pytest.mark.parametrize(
    "wrong",
    [
        lambda inputs: decode(inputs, forgets=32),
        lambda inputs: inputs[5].fill_(torch.nan),
        decode_the_last_alone,
    ],
    ids=["keys left out", "no numbers", "no numbers but of the last request"],
)
def test_wrong_ones_are_told_with_what_does_without_them(wrong):
    with pytest.raises(CompileError, match=r"shared tokens in layers\.0\.attn is off by .*cascade_attention: false"):
        check(wrong)
