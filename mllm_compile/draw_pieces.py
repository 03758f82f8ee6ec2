"""The draw of tokens as pieces of the program: the kernels of runtime/draw_ops.py, for the model's vocabulary.

Two: from the program's logits and a temperature, and from scores that filters or penalties have been at.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mllm_compile.piece_compiler import PieceInput
from mllm_compile.resolve import ResolvedConfig
from mllm_compile.runtime.counter_rng import padded_vocab_size
from mllm_compile.runtime.program import DrawForms, Program
from mllm_compile.written_piece import WrittenPiece

_SOURCE = '''"""{name}"""

import torch


class Piece(torch.nn.Module):
    # logits: [S, {width}] {dtype}; temperatures: [S] float32; seeds, positions: [S] int64

    def forward(self, {inputs}):
        return (torch.ops.mllm.draw_tokens({operands}),)
'''


def add_draw_pieces(
    config: ResolvedConfig, program: Program, logits: torch.Tensor
) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """The program with pieces that draw tokens, and those pieces; on CUDA, where the kernels run.

    Args:
        logits: [S, V], as the graph gives them: not every model's are of the model's own dtype.
    """
    if config.compile.backend == "eager" or not config.runtime.device.startswith("cuda"):
        return program, ()
    dtype = str(logits.dtype).removeprefix("torch.")
    from_logits, from_scores = draw_pieces(dtype, int(logits.shape[1]))
    return replace(program, draw=DrawForms(dtype, from_logits.name, from_scores.name)), (from_logits, from_scores)


def draw_pieces(dtype: str, vocab_size: int) -> tuple[WrittenPiece, WrittenPiece]:
    """(from logits [S, vocab_size] of that type, from scores)."""
    from_scores = _piece("draw_from_scores", "float32", padded_vocab_size(vocab_size), has_temperature=False)
    return _piece("draw_from_logits", dtype, vocab_size, has_temperature=True), from_scores


def _piece(name: str, dtype: str, width: int, has_temperature: bool) -> WrittenPiece:
    names = ("logits", "temperatures", "seeds", "positions") if has_temperature else ("logits", "seeds", "positions")
    operands = ("logits", "temperatures" if has_temperature else "None", "seeds", "positions")
    source = _SOURCE.format(name=name, width=width, dtype=dtype, inputs=", ".join(names), operands=", ".join(operands))
    inputs = [PieceInput.contiguous(("S", width), dtype)]
    inputs += [PieceInput.contiguous(("S",), "float32")] if has_temperature else []
    inputs += [PieceInput.contiguous(("S",), "int64")] * 2
    return WrittenPiece(name, source, tuple(inputs))
