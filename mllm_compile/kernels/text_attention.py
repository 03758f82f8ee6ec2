"""Attention of packed texts as pieces of the program, on CUDA: by the kernel of runtime/ops/segments/texts.py.

A captured step attends by it, as its grid follows from the number of tokens, and so does any step of layers that have
windows, a bias or float32, which the kernels for Hopper lack (passes/attend_segments.py). Layers alike share a piece.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece, made_by_kind
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import PackedAttentionStep, Step, TextPiece

_WIDEST = 256  # columns of a head that a block holds


def add_text_attention(
    config: ResolvedConfig, program: Program, operands: Mapping[str, Sequence[PieceInput]]
) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds pieces for attention over packed rows to the program of texts, where Triton's kernels run; returns them too.

    Args:
        operands: layer → its q, k, v, and bias where it has one.
    """
    if not config.runtime.device.startswith("cuda") or config.compile.backend == "eager":
        return program, ()
    packed = [step for step in program.steps if isinstance(step, PackedAttentionStep)]
    served = [_Layer(step, tuple(operands[step.layer])) for step in packed if _is_served(operands[step.layer])]
    pieces, written = made_by_kind(served, _Layer.kind, lambda kind, index: _piece(*kind, name=f"texts_{index}"))

    def with_piece(step: Step) -> Step:
        if not isinstance(step, PackedAttentionStep) or step.layer not in pieces:
            return step
        strides = tuple((int(one.stride[0]), int(one.stride[1])) for one in operands[step.layer][:3])
        return replace(step, of_texts=TextPiece(pieces[step.layer].name, strides))

    return replace(program, steps=tuple(map(with_piece, program.steps))), tuple(written)


def _is_served(operands: Sequence[PieceInput]) -> bool:
    q, _, v = operands[:3]
    return q.shape[2] == v.shape[2] and int(q.shape[2]) <= _WIDEST


class _Layer:
    """A layer of the program, and what its piece is decided by."""

    def __init__(self, step: PackedAttentionStep, operands: tuple[PieceInput, ...]) -> None:
        self.name, self._step, self._operands = step.layer, step, operands

    def kind(self) -> tuple[tuple[PieceInput, ...], float, int, int]:
        return self._operands, self._step.sm_scale, self._step.window_left, self._step.window_right


def _piece(operands: tuple[PieceInput, ...], sm_scale: float, left: int, right: int, *, name: str) -> WrittenPiece:
    q, k, v, *bias = operands
    of_rows = PieceInput.contiguous(("T",), "int64")
    out = PieceInput.contiguous(q.shape, q.dtype)
    given = {"q": q, "k": k, "v": v, "starts": of_rows, "ends": of_rows}
    return WrittenPiece.calling(
        "text_attention",
        given | ({"bias": bias[0]} if bias else {}) | {"out": out},
        name=name,
        legend="T tokens",
        options=({} if bias else {"bias": None}) | {"sm_scale": sm_scale, "window_left": left, "window_right": right},
        gives_tensor=False,
    )
