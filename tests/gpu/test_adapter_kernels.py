"""The Triton kernels of adapters on a GPU, in packages as pieces are compiled, against float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mllm_compile.inductor.compile_piece import compile_piece
from mllm_compile.inductor.job import PieceInput
from mllm_compile.runtime.ops.lora.reference import add_lora_reference
from mllm_compile.runtime.program.pieces import load_piece

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

MARGIN = 1.2  # ours may be this much further from float32 than torch in bfloat16 is
SLOTS = 8
SOURCE = """
import torch

class Piece(torch.nn.Module):
    def forward(self, y, x, a, b, slots):
        out = []
        for is_few in (True, False):
            shrunk = torch.ops.mllm.lora_shrink.default(x, a, slots, is_few, False)
            out.append(torch.ops.mllm.lora_expand.default(y, shrunk, b, slots, {starts}, {rows}, is_few, False))
        return tuple(out)
"""
SHAPES = [  # inputs, outputs, first outputs and numbers of parts, rank
    (4096, 6144, [0, 4096, 5120], [4096, 1024, 1024], 16),
    (4096, 6144, [0, 5120], [4096, 1024], 64),
    (1100, 96, [32], [64], 8),
    (12288, 4096, [0], [4096], 16),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_are_as_near_to_float32_as_torch_is(shape: Any, tmp_path: Path) -> None:
    inputs, outputs, starts, rows, rank = shape
    source = tmp_path / "piece.py"
    source.write_text(SOURCE.format(starts=starts, rows=rows))
    factors = (SLOTS, rank * len(rows), inputs), (SLOTS, sum(rows), rank)
    shapes = ("T", outputs), ("T", inputs), *factors
    given = [PieceInput.contiguous(one, "bfloat16") for one in shapes] + [PieceInput.contiguous(("T",), "int32")]
    compile_piece(source, given, "cuda:0", {"T": 8192}, tmp_path / "piece.pt2", tmp_path)
    piece = load_piece("piece.pt2", (tmp_path / "piece.pt2").read_bytes())
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (torch.randn(one, generator=generator, device="cuda") for one in factors)
    a, b = (a / inputs**0.5).bfloat16(), b.bfloat16()
    for tokens in (1, 2, 8, 17, 64, 65, 300, 2048, 4100):
        for most in (1, SLOTS):  # one adapter, and several
            y, x = (torch.randn(tokens, size, generator=generator, device="cuda") for size in (outputs, inputs))
            y, x = y.bfloat16(), x.bfloat16()
            slots = torch.randint(-1, most, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
            slots[0] = most - 1
            exact = add_lora_reference(y.float(), x.float(), a.float(), b.float(), slots, starts, rows)
            torchs = add_lora_reference(y, x, a, b, slots, starts, rows)
            theirs = (torchs.float() - exact).norm() / exact.norm()
            whole, first = [y, x, a, b, slots], [y[:1], x[:1], a, b, slots[:1]]
            every = (piece(one) for one in (whole, whole, first))
            for form, (ours, again, alone) in zip(("few", "many"), zip(*every, strict=True), strict=True):
                assert torch.equal(ours, again)
                assert torch.equal(ours[slots < 0], y[slots < 0])
                off = (ours.float() - exact).norm() / exact.norm()
                assert off <= MARGIN * theirs + 1e-6, (form, tokens, most, float(off), float(theirs))
                assert torch.equal(alone, ours[:1]), "a token's numbers do not depend on the others"


GATED = """
import torch

class Piece(torch.nn.Module):
    def forward(self, y, x, a, b, slots):
        found, parts = [], ([0, 12288], [12288, 12288])
        for is_few in (True, False):
            shrunk = torch.ops.mllm.lora_shrink.default(x, a, slots, is_few, False)
            out = torch.ops.mllm.lora_expand.default(y, shrunk, b, slots, *parts, is_few, False)
            found.append(torch.ops.mllm.silu_mul.default(out))
            found.append(torch.ops.mllm.lora_expand_gated.default(y, shrunk, b, slots, *parts, is_few, False))
        return tuple(found)
"""


def test_the_kernel_that_ends_with_the_activation_has_the_bits_of_both(tmp_path: Path) -> None:
    source, generator = tmp_path / "piece.py", torch.Generator("cuda").manual_seed(0)
    source.write_text(GATED)
    shapes = ("T", 24576), ("T", 4096), (SLOTS, 32, 4096), (SLOTS, 24576, 16)
    given = [PieceInput.contiguous(one, "bfloat16") for one in shapes] + [PieceInput.contiguous(("T",), "int32")]
    compile_piece(source, given, "cuda:0", {"T": 8192}, tmp_path / "piece.pt2", tmp_path)
    piece = load_piece("piece.pt2", (tmp_path / "piece.pt2").read_bytes())
    for tokens in (1, 8, 17, 64, 300, 2048):
        sizes = [(tokens if size == "T" else size, *rest) for size, *rest in shapes]
        y, x, a, b = (torch.randn(size, generator=generator, device="cuda").bfloat16() for size in sizes)
        slots = torch.randint(-1, SLOTS, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
        apart_of_few, of_few, apart, of_many = piece([y, x, a / 64, b, slots])
        assert torch.equal(apart_of_few, of_few), tokens
        assert torch.equal(apart, of_many), tokens


CHAINED = """
import torch

class Piece(torch.nn.Module):
    def forward(self, x, o, residual, weight, gate_up, a_o, b_o, a_gate_up, b_gate_up, a_down, slots):
        shrunk = torch.ops.mllm.lora_shrink.default(x, a_o, slots, True, True)
        h = residual + torch.ops.mllm.lora_expand.default(o, shrunk, b_o, slots, [0], [4096], True, True)
        out, scaled, squares, products = torch.ops.mllm.lora_expand_norm.default(
            o, shrunk, b_o, slots, residual, weight, False, a_gate_up)
        parts = [0, 12288], [12288, 12288]
        norm = squares, 1e-6, 4096
        gated = torch.ops.mllm.lora_expand_gated.default(gate_up, products, b_gate_up, slots, *parts, True, True, *norm)
        again, last = torch.ops.mllm.lora_expand_gated_chained.default(
            gate_up, products, b_gate_up, slots, *parts, *norm, a_down)
        of_gated = torch.ops.mllm.lora_shrink.default(gated, a_down, slots, True, True)
        of_scaled = torch.ops.mllm.lora_shrink.default(scaled, a_gate_up, slots, True, True)
        return h, out, scaled, squares, gated, again, products, of_scaled, last, of_gated
"""


def test_a_kernel_between_linears_has_the_numbers_of_those_that_it_stands_for(tmp_path: Path) -> None:
    source, generator = tmp_path / "piece.py", torch.Generator("cuda").manual_seed(0)
    source.write_text(CHAINED)
    of_adapters = (SLOTS, 16, 4096), (SLOTS, 4096, 16), (SLOTS, 32, 4096), (SLOTS, 24576, 16), (SLOTS, 16, 12288)
    shapes = (*[("T", 4096)] * 3, (4096,), ("T", 24576), *of_adapters)
    given = [PieceInput.contiguous(one, "bfloat16") for one in shapes] + [PieceInput.contiguous(("T",), "int32")]
    compile_piece(source, given, "cuda:0", {"T": 256}, tmp_path / "piece.pt2", tmp_path)
    piece = load_piece("piece.pt2", (tmp_path / "piece.pt2").read_bytes())
    for tokens in (1, 8, 17, 64, 65, 256):
        sizes = [tuple(tokens if size == "T" else size for size in shape) for shape in shapes]
        tensors = [torch.randn(size, generator=generator, device="cuda") for size in sizes]
        tensors = [(one / 64 if len(one.shape) == 3 else one).bfloat16() for one in tensors]
        slots = torch.randint(-1, SLOTS, (tokens,), generator=generator, device="cuda", dtype=torch.int32)
        torch.cuda.synchronize()  # slots are read early
        h, out, scaled, squares, gated, again, *products = piece([*tensors, slots])
        assert torch.equal(h, out)
        assert torch.equal(gated, again)
        assert torch.equal(scaled, (h.float() * tensors[3].float()).bfloat16())
        assert torch.allclose(squares.sum(-1), h.float().pow(2).sum(-1), rtol=1e-4)
        for ours, theirs in (products[:2], products[2:]):
            found, expected = (one.sum(0)[slots >= 0] for one in (ours, theirs))
            assert (found - expected).norm() <= 1e-3 * expected.norm()
