"""The check of the program's own kernels for prompts: right ones pass, wrong ones are told."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mllm_compile.check.prefill_attention import check_prefill_attention
from mllm_compile.check.served import Served
from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import DecodeVariant, LayerKernels
from mllm_compile.runtime.attention.split.prefill_tiles import TILE_TOKENS
from mllm_compile.runtime.attention.split.splits import OF_MANY
from mllm_compile.runtime.ops.trace import attention_reference
from mllm_compile.runtime.program.link import link
from mllm_compile.runtime.program.spec import Program

PAGE = 16
LAYER = LayerSpec("layers.0.attn", 0, 4, 2, 16, 16, 0.3, 0.0, -1, None, alibi_slopes=(0.5, 0.25, 0.1, 0.01), chunk=0)
IN_CHUNKS = replace(LAYER, alibi_slopes=(), chunk=128)


def piece_of(layer: LayerSpec):
    """The kernel's computation, tile by tile."""

    def attend(inputs):
        q, keys, values, table, seq_lens, tiles, out, *slopes = inputs
        assert bool(slopes) == bool(layer.alibi_slopes)
        for row, first, count, start in tiles.tolist():
            length = int(seq_lens[row])
            slots = (table[row].long()[:, None] * PAGE + torch.arange(PAGE)).flatten()[:length]
            queries = torch.cat((q.new_zeros(length - count, *q.shape[1:]), q[first : first + count]))
            parts = (queries.float(), keys[slots].float(), values[slots].float(), None, layer.sm_scale, 0.0, -1)
            own = attention_reference(*parts, alibi_slopes=slopes[0].tolist() if slopes else None, chunk=layer.chunk)[
                length - count :
            ]
            end = min(start + TILE_TOKENS, count)
            out[first + start : first + end] = own[start:end].to(out.dtype)

    return attend


def check(layer: LayerSpec, piece) -> None:
    kernels = LayerKernels(decode=(DecodeVariant(None, "decode", OF_MANY),), prefill="prefill")
    program = Program((), (layer,), (), "logits", layer_kernels={layer.name: kernels})
    linked = link(program, {"decode": piece, "prefill": piece}, {}, torch.device("cpu"))
    check_prefill_attention(linked, Served(PAGE, torch.bfloat16, torch.bfloat16, torch.device("cpu")))


@pytest.mark.parametrize("layer", [LAYER, IN_CHUNKS], ids=["ALiBi", "chunks"])
def test_a_right_kernel_passes(layer):
    check(layer, piece_of(layer))


def all_but_the_first_prompt(inputs):
    piece_of(LAYER)(inputs)
    first = int(inputs[5][0, 1])
    inputs[6][first] = torch.nan


@pytest.mark.parametrize(
    ("layer", "wrong"),
    [
        (LAYER, piece_of(replace(LAYER, sm_scale=0.2))),
        (IN_CHUNKS, piece_of(replace(IN_CHUNKS, chunk=64))),
        (LAYER, lambda inputs: inputs[6].fill_(torch.nan)),
        (LAYER, all_but_the_first_prompt),
    ],
    ids=["another scale", "other chunks", "no numbers", "no numbers of the first prompt"],
)
def test_a_wrong_one_is_told(layer, wrong):
    with pytest.raises(CompileError, match=r"attention of prompts in layers\.0\.attn is off by .*torch"):
        check(layer, wrong)
