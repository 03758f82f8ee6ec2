"""Attention of packed texts as pieces of the program, on CUDA: by the kernel of runtime/ops/segments/texts.py.

A captured step attends by it, as its grid follows from the number of tokens. So does any step of layers that have
windows, values of distances, capped scores, sinks or float32, which the kernels for Hopper lack
(passes/attend_segments.py). Layers alike share a piece.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece, made_by_kind
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import OF_SCORES, PackedAttentionStep, Step, TextPiece

_WIDEST = 256  # columns of a head that a block holds


def add_text_attention(
    config: ResolvedConfig, program: Program, operands: Mapping[str, Mapping[str, PieceInput]]
) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds pieces for attention over packed rows to the program of texts, where Triton's kernels run; returns them too.

    Args:
        operands: layer → its q, k, v, and what its scores get beside (compiler/pieces.packed_operands).
    """
    if not config.runtime.device.startswith("cuda") or config.compile.backend == "eager":
        return program, ()
    packed = [step for step in program.steps if isinstance(step, PackedAttentionStep)]
    served = [_Layer(step, operands[step.layer]) for step in packed if _is_served(operands[step.layer])]
    pieces, written = made_by_kind(served, _Layer.kind, lambda kind, index: _piece(*kind, name=f"texts_{index}"))

    def with_piece(step: Step) -> Step:
        if not isinstance(step, PackedAttentionStep) or step.layer not in pieces:
            return step
        rows = [operands[step.layer][name].stride for name in "qkv"]
        strides = tuple((int(row), int(head)) for row, head, _ in rows)
        return replace(step, of_texts=TextPiece(pieces[step.layer].name, strides))

    return replace(program, steps=tuple(map(with_piece, program.steps))), tuple(written)


def _is_served(operands: Mapping[str, PieceInput]) -> bool:
    q, v = operands["q"], operands["v"]
    return q.shape[2] == v.shape[2] and int(q.shape[2]) <= _WIDEST


class _Layer:
    """A layer of the program, and what its piece is decided by."""

    def __init__(self, step: PackedAttentionStep, operands: Mapping[str, PieceInput]) -> None:
        self.name, self._step, self._operands = step.layer, step, operands

    def kind(self) -> tuple[tuple[tuple[str, PieceInput], ...], float, int, int, float]:
        step = self._step
        return tuple(self._operands.items()), step.sm_scale, step.window_left, step.window_right, step.soft_cap


def _piece(
    operands: tuple[tuple[str, PieceInput], ...], sm_scale: float, left: int, right: int, cap: float, *, name: str
) -> WrittenPiece:
    given = dict(operands)
    q, k, v = (given.pop(one) for one in "qkv")
    of_rows = PieceInput.contiguous(("T",), "int64")
    out = PieceInput.contiguous(q.shape, q.dtype)
    lacking = {one: None for one in OF_SCORES if one not in given}
    return WrittenPiece.calling(
        "text_attention",
        {"q": q, "k": k, "v": v, "starts": of_rows, "ends": of_rows, **given, "out": out},
        name=name,
        legend="T tokens",
        options=lacking | {"sm_scale": sm_scale, "window_left": left, "window_right": right, "soft_cap": cap},
        gives_tensor=False,
    )
