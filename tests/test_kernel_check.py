"""The check of pieces that the compiler wrote itself: right ones pass, wrong ones do not leave the compiler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from mllm_compile.errors import CompileError
from mllm_compile.kernel_check import check_written_pieces
from mllm_compile.runtime.counter_rng import draw_tokens, padded_vocab_size
from mllm_compile.runtime.program import DecodeForms, LayerSpec, Program, SamplingForms
from mllm_compile.runtime.trace_ops import attention_reference

PAGE_SIZE, VOCAB = 16, 300
LAYER = LayerSpec("layers.0.attn", 0, 8, 2, 32, 32, 0.2, 0.0, -1, None)


def attention(layer: LayerSpec) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    """The kernel in plain torch."""

    def run(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        q, keys, values, table, seq_lens, out = inputs[:6]
        for row, length in enumerate(seq_lens.tolist()):
            places = torch.arange(length)
            slots = table[row][places // PAGE_SIZE] * PAGE_SIZE + places % PAGE_SIZE
            heads = q[row].expand(length, -1, -1)
            params = layer.sm_scale, layer.logits_soft_cap, layer.window_left
            out[row] = attention_reference(heads, keys[slots], values[slots], None, *params)[-1]
        return []

    return run


def check_attention(layer: LayerSpec, few, many, dtype: torch.dtype = torch.bfloat16) -> None:
    program = Program((), (layer,), (), "logits", decode_attention={layer.name: DecodeForms("few", "many")})
    check_written_pieces(program, {"few": few, "many": many}, PAGE_SIZE, dtype, torch.zeros(2, VOCAB))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "layer", [LAYER, replace(LAYER, window_left=20), replace(LAYER, logits_soft_cap=2.0), replace(LAYER, num_heads=2)]
)
def test_right_attention_passes(layer, dtype):
    check_attention(layer, attention(layer), attention(layer), dtype)


@pytest.mark.parametrize(
    "wrong",
    [
        attention(replace(LAYER, sm_scale=0.21)),
        attention(replace(LAYER, window_left=200)),
        lambda inputs: attention(LAYER)([*inputs[:3], inputs[3].roll(1, 0), *inputs[4:]]),
        lambda inputs: inputs[5].fill_(float("nan")),
        lambda inputs: inputs[5].zero_(),
    ],
    ids=["scale", "window", "pages", "no numbers", "nothing"],
)
@pytest.mark.parametrize("form", ["few", "many"])
def test_wrong_attention_is_refused_in_either_form(form, wrong):
    pieces = {"few": attention(LAYER), "many": attention(LAYER), form: wrong}
    with pytest.raises(CompileError, match=rf"decode attention {form} of {LAYER.name} .*split_decode: false"):
        check_attention(LAYER, **pieces)


LOGITS = torch.randn(24, VOCAB, generator=torch.Generator().manual_seed(0)).bfloat16()


def from_logits(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    logits, temperatures, seeds, positions = inputs
    scores = torch.full((len(logits), padded_vocab_size(VOCAB)), -torch.inf)
    scores[:, :VOCAB] = logits * temperatures.reciprocal()[:, None]
    return [draw_tokens(scores, seeds, positions)]


RIGHT = {
    "greedy": lambda inputs: [inputs[0].argmax(-1)],
    "from_logits": from_logits,
    "from_scores": lambda inputs: [draw_tokens(*inputs)],
}


def check_sampling(**wrong) -> None:
    program = Program((), (), (), "logits", sampling=SamplingForms("bfloat16", *RIGHT))
    check_written_pieces(program, RIGHT | wrong, PAGE_SIZE, torch.bfloat16, LOGITS)


def test_right_choices_pass_and_so_does_a_draw_between_near_blocks():
    def nearly(inputs):
        tokens = from_logits(inputs)[0]
        tokens[3] += 1
        return [tokens]

    check_sampling()
    check_sampling(from_logits=nearly)


@pytest.mark.parametrize(
    ("piece", "wrong"),
    [
        ("greedy", lambda inputs: [inputs[0].argmin(-1)]),
        ("greedy", lambda inputs: [torch.cat([inputs[0].argmax(-1)[:-1], torch.tensor([0])])]),
        ("from_logits", lambda inputs: from_logits([inputs[0], inputs[1] * 2, *inputs[2:]])),
        ("from_scores", lambda inputs: draw_tokens(inputs[0], inputs[1], inputs[2] + 1)[None]),
    ],
)
def test_wrong_choices_are_refused(piece, wrong):
    with pytest.raises(CompileError, match=f"kernels of {piece} choose other tokens"):
        check_sampling(**{piece: wrong})


def test_a_program_without_such_pieces_has_nothing_to_check():
    check_written_pieces(Program((), (LAYER,), (), "logits"), {}, PAGE_SIZE, torch.float32, LOGITS)
