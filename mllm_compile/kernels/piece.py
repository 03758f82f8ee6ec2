"""A piece that no graph was traced for: its source is written by the compiler."""

from __future__ import annotations

from dataclasses import dataclass

from mllm_compile.inductor.job import PieceInput


@dataclass(frozen=True)
class WrittenPiece:
    """A piece's name, its source, and its inputs as the piece compiler needs them."""

    name: str
    source: str
    inputs: tuple[PieceInput, ...]
