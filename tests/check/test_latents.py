"""The check of kernels over latents: right ones pass, wrong ones do not leave the compiler."""

from __future__ import annotations

import pytest
import torch

from mllm_compile.check.kernels import check_written_pieces
from mllm_compile.errors import CompileError
from mllm_compile.runtime.attention.latent.tiles import PREFILL_TILE
from mllm_compile.runtime.attention.layer import LayerSpec
from mllm_compile.runtime.program.link import link
from mllm_compile.runtime.program.spec import LatentForms, Program

PAGE, HEADS, WIDTH, VALUE_WIDTH = 16, 20, 24, 16
LAYER = LayerSpec("layers.0.attn", 0, HEADS, 1, WIDTH, VALUE_WIDTH, WIDTH**-0.5, 0.0, -1, None, is_latent=True)


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


def check(decode, prefill):
    forms = {LAYER.name: LatentForms("decode", "prefill")}
    program = Program((), (LAYER,), (), "logits", latent_attention=forms)
    linked = link(program, {"decode": decode, "prefill": prefill}, {}, torch.device("cpu"))
    check_written_pieces(linked, PAGE, torch.bfloat16, torch.zeros(2, 300))


def test_right_kernels_pass():
    check(decode, prefill)


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
