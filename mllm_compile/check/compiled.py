"""The pieces and kernels that a compile has written, linked for a self-check ahead of their manifest."""

from __future__ import annotations

from pathlib import Path

import torch

from mllm_compile.runtime.program.link import LinkedProgram, link
from mllm_compile.runtime.program.pieces import load_piece
from mllm_compile.runtime.program.spec import Program
from mllm_compile.store.artifact import BINARIES, PIECES


def linked_of_folder(program: Program, folder: Path, piece_suffix: str, device: torch.device) -> LinkedProgram:
    """The program with the pieces and kernels of a folder.

    Args:
        piece_suffix: of the pieces' files.
    """
    binaries = {path.stem: path.read_bytes() for path in (folder / BINARIES).glob("*")}
    files = {piece: folder / PIECES / (piece + piece_suffix) for piece in program.every_piece_id()}
    pieces = {piece: load_piece(path.name, path.read_bytes()) for piece, path in files.items()}
    return link(program, pieces, binaries, device)
