"""A piece's outputs have the strides of the trace: the next piece is compiled for them."""

from __future__ import annotations

import torch
from torch._inductor.fx_passes import pad_mm

from mllm_compile.inductor.compile_piece import compile_piece
from mllm_compile.inductor.job import PieceInput
from mllm_compile.runtime.program.pieces import load_piece

SOURCE = """
import torch
class Piece(torch.nn.Module):
    def forward(self, x, w):
        return (torch.nn.functional.linear(x, w),)
"""


def test_a_linear_of_four_outputs_leaves_them_side_by_side_though_padding_might_be_faster(tmp_path, monkeypatch):
    # As on a GPU with Triton, whose benchmark finds the padded product faster.
    monkeypatch.setattr(pad_mm, "check_device", lambda *tensors: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    monkeypatch.setattr(torch._inductor.config, "force_shape_pad", True)
    (tmp_path / "piece.py").write_text(SOURCE)
    inputs = [PieceInput.contiguous(("T", 512), "bfloat16"), PieceInput.contiguous((4, 512), "bfloat16")]
    compile_piece(tmp_path / "piece.py", inputs, "cpu", {"T": 64}, tmp_path / "piece.pt2", tmp_path)
    piece = load_piece("piece.pt2", (tmp_path / "piece.pt2").read_bytes())
    x, weight = torch.randn(8, 512).bfloat16(), torch.randn(4, 512).bfloat16()
    (out,) = piece([x, weight])
    assert out.stride() == (4, 1)
    torch.testing.assert_close(out, torch.nn.functional.linear(x, weight))
