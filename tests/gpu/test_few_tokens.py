"""The linears for few tokens and the activation's kernel, in packages as pieces are compiled, against float32."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.functional import linear, silu

from mllm_compile.inductor.compile_piece import compile_piece
from mllm_compile.inductor.job import PieceInput
from mllm_compile.runtime.ops import op
from mllm_compile.runtime.program.pieces import load_piece

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

EPS = 1e-6
MARGIN = 1.2  # ours may be this much further from float32 than torch in bfloat16 is
SHAPES = [(1024, 2048, 3072), (4096, 2304, 4352), (8192, 1024, 2048)]  # hidden, all heads, feed-forward
SOURCE = """
import torch

class Piece(torch.nn.Module):
    def forward(self, a, residual, o, norm, gate_up, down, next_norm, qkv):
        h, scaled, squares = torch.ops.mllm.few_linear_residual_norm.default(a, o, residual, norm)
        y = torch.ops.mllm.few_linear.default(scaled, gate_up, squares, 1e-6, True)
        h, scaled, squares = torch.ops.mllm.few_linear_residual_norm.default(y, down, h, next_norm)
        return (h, torch.ops.mllm.few_linear.default(scaled, qkv, squares, 1e-6, False))
"""
PLAIN_SOURCE = """
import torch

class Piece(torch.nn.Module):
    def forward(self, x, weight, residual):
        y = torch.ops.mllm.few_linear.default(x, weight, None, 0.0, False)
        z = torch.ops.mllm.silu_mul.default(y)
        return (y, z, torch.ops.mllm.few_linear_residual.default(x, weight, residual))
"""


def compiled(folder: Path, source: str, shapes: list[tuple[int | str, ...]], dtypes: Sequence[str] = ()):
    (folder / "piece.py").write_text(source)
    dtypes = dtypes or ["bfloat16"] * len(shapes)
    inputs = [PieceInput.contiguous(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    sizes = {"T": 8192, "S": 8192, "P": 2**31 - 1}
    compile_piece(folder / "piece.py", inputs, "cuda:0", sizes, folder / "piece.pt2", folder)
    return load_piece("piece.pt2", (folder / "piece.pt2").read_bytes())


def shapes_of(hidden: int, heads: int, ffn: int) -> list[tuple[int | str, ...]]:
    weights = [(hidden, heads), (hidden,), (2 * ffn, hidden), (hidden, ffn), (hidden,), (6 * hidden // 4, hidden)]
    return [(1, "T", heads), (1, "T", hidden), *weights]


def random_inputs(shapes: list[tuple[int | str, ...]], num_tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    made = []
    for shape in shapes:
        sizes = [num_tokens if size == "T" else size for size in shape]
        x = torch.randn(sizes, generator=generator, device="cuda")
        scale = 0.02 if len(sizes) == 2 else 1.0
        made.append((x * scale + (1.0 if len(sizes) == 1 else 0.0)).to(torch.bfloat16))
    return made


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


def layer(a, residual, o, norm, gate_up, down, next_norm, qkv):
    h = residual + linear(a, o)
    gate, up = linear(rms(h, norm), gate_up).chunk(2, -1)
    h = h + linear(silu(gate) * up, down)
    return h, linear(rms(h, next_norm), qkv)


def off_by(ours: torch.Tensor, exact: torch.Tensor) -> float:
    """Of the worst token."""
    return ((ours.float() - exact).norm(dim=-1) / exact.norm(dim=-1)).max().item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layers_linears_are_as_near_to_float32_as_torch_in_bf16(tmp_path, shape):
    shapes = shapes_of(*shape)
    piece = compiled(tmp_path, SOURCE, shapes)
    for num_tokens in (1, 2, 7, 16, 17, 70):
        values = random_inputs(shapes, num_tokens)
        exact = layer(*(value.double() for value in values))
        theirs = layer(*values)
        for ours, bf16, want in zip(piece(list(values)), theirs, exact, strict=True):
            assert off_by(ours, want.float()) <= MARGIN * off_by(bf16, want.float()), num_tokens


def test_a_plain_linear_one_with_a_residual_and_the_activation(tmp_path):
    shapes: list[tuple[int | str, ...]] = [("T", 512), (9216, 512), ("T", 9216)]
    piece = compiled(tmp_path, PLAIN_SOURCE, shapes)
    for num_tokens in (1, 16, 300):
        x, weight, residual = random_inputs(shapes, num_tokens)
        weight = weight / 0.02 * 0.1
        product, activated, with_residual = piece([x, weight, residual])
        exact = linear(x.float(), weight.float())
        assert off_by(product, exact) < 4e-3
        gate, up = product.chunk(2, -1)
        assert off_by(activated, (silu(gate) * up).float()) < 4e-3
        assert off_by(with_residual, exact + residual.float()) < 4e-3


def test_a_token_is_the_same_in_any_company(tmp_path):
    """A row of the product depends on its own row of x alone."""
    shapes = shapes_of(*SHAPES[0])
    piece = compiled(tmp_path, SOURCE, shapes)
    values = random_inputs(shapes, 16)
    together = piece(list(values))
    alone = piece([values[0][:, 5:6].contiguous(), values[1][:, 5:6].contiguous(), *values[2:]])
    for one, row in zip(alone, together, strict=True):
        assert torch.equal(one[:, 0], row[:, 5])


def test_a_norms_weight_with_one_added_is_rounded_once():
    x, weight, residual, norm = (
        torch.randn(size, device="cuda").bfloat16() for size in ((5, 2048), (1024, 2048), (5, 1024), (1024,))
    )
    h, scaled, _ = op("few_linear_residual_norm")(x, weight, residual, norm, True)
    exact = h.double() * (1 + norm.double())
    assert ((scaled.double() - exact).abs() <= 2**-8 * exact.abs()).all()


def test_one_token_behind_a_norm_with_one_added_is_as_near_to_float32_as_torchs():
    x, norm, weight = (torch.randn(size, device="cuda").bfloat16() for size in ((1, 1, 2048), (2048,), (1024, 2048)))

    def theirs(dtype: torch.dtype) -> torch.Tensor:
        wide = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + EPS) * (1 + norm.float())
        return linear(wide.to(dtype), weight.to(dtype))

    exact = theirs(torch.float32)
    ours = op("norm_linear")(x, norm, weight, EPS, True)
    assert off_by(ours, exact) <= MARGIN * off_by(theirs(torch.bfloat16), exact)
