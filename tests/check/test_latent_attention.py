"""The check of kernels over latents: right ones pass, wrong ones do not leave the compiler."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mllm_compile.check.kernels import check_written_pieces
from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.latent.expanded import attend_in_torch
from mllm_compile.runtime.attention.latent.tiles import PREFILL_TILE
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.attention.layer_kernels import LatentKernels, LayerKernels
from mllm_compile.runtime.program.link import link
from mllm_compile.runtime.program.spec import Program

PAGE, HEADS, WIDTH, VALUE_WIDTH = 16, 20, 24, 16
LAYER = LayerSpec("layers.0.attn", 0, HEADS, 1, WIDTH, VALUE_WIDTH, WIDTH**-0.5, 0.0, -1, None, is_latent=True)
# The same with its up-projection: keys of 12 + 8 columns, values of 10.
EXPANDING = replace(LAYER, up_projection="layers.0.kv_b_proj.weight", up_key_dim=12, up_value_dim=10)


def attend(q, latents, pages, limits):
    """[N, H, C] of q [N, H, D], each over the first so many latents of its request's pages."""
    places = torch.arange(int(limits.max()))
    keys = latents[pages[places // PAGE] * PAGE + places % PAGE, 0].float()
    logits = torch.einsum("nhd,ld->nhl", q.float(), keys) * LAYER.sm_scale
    logits = logits.masked_fill(places >= limits[:, None, None], -torch.inf)
    return (logits.softmax(-1) @ keys[:, :VALUE_WIDTH]).to(q.dtype)


def decode(inputs, forgets=0):
    q, latents, table, seq_lens, out = inputs[:5]
    for row in range(len(q)):
        limits = (seq_lens[row : row + 1] - forgets * (seq_lens[row] > 1000)).clamp(min=1)
        out[row] = attend(q[row, None], latents, table[row], limits)[0]


def prefill(inputs, sees=0):
    q, latents, table, seq_lens, tiles, out = inputs
    for row, first, count, start in tiles.tolist():
        members = torch.arange(start, min(start + PREFILL_TILE.rows, count * HEADS))
        limits = (seq_lens[row] - count + members // HEADS + 1 + sees).clamp(max=int(seq_lens[row]))
        rows = first * HEADS + members
        got = attend(q.flatten(0, 1)[rows, None], latents, table[row], limits)
        out.flatten(0, 1)[rows] = got[:, 0]


def expanded(inputs, sees=0):
    tiles = inputs[3].clone()
    tiles[:, 4] += sees
    attend_in_torch([*inputs[:3], tiles, *inputs[4:]], LAYER.sm_scale)


def check(decode, prefill, expanded=None):
    layer, pieces = LAYER, {"decode": decode, "prefill": prefill}
    if expanded is not None:
        layer, pieces = EXPANDING, pieces | {"expanded": expanded}
    program = Program(
        (), (layer,), (), "logits", layer_kernels={LAYER.name: LayerKernels(latent=LatentKernels(*pieces))}
    )
    linked = link(program, pieces, {}, torch.device("cpu"))
    check_written_pieces(linked, PAGE, torch.bfloat16, torch.zeros(2, 300))


def test_right_kernels_pass():
    check(decode, prefill)
    check(decode, prefill, expanded)


def test_wrong_ones_over_keys_and_values_are_told_with_what_does_without_them():
    said = r"over latents of layers\.0\.attn .*208 new tokens over keys and values .*disable_passes: \[expand_latents\]"
    with pytest.raises(CompileError, match=said):
        check(decode, prefill, lambda inputs: expanded(inputs, sees=1))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ((lambda inputs: decode(inputs, forgets=64), prefill), r"batch of 1 requests with 1 new"),
        ((decode, lambda inputs: prefill(inputs, sees=1)), r"batch of 4 requests with 208 new"),
        ((decode, lambda inputs: inputs[-1].fill_(torch.nan)), r"off by nan"),
    ],
    ids=["keys left out", "a later token seen", "no numbers"],
)
def test_wrong_ones_are_told_with_what_does_without_them(wrong, what):
    with pytest.raises(CompileError, match=rf"over latents of layers\.0\.attn .*{what}") as raised:
        check(*wrong)
    assert "compile.disable_passes: [absorb_latents]" in str(raised.value)
