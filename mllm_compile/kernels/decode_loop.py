"""The work of a captured decode around the model, as pieces of the program: kernels of runtime/ops/decode_loop.py."""

from __future__ import annotations

from dataclasses import replace

import torch

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece
from mllm_compile.runtime.ops.turns import NUM_TURNS, REQUEST_FIELDS
from mllm_compile.runtime.program.spec import DecodeLoopForms, Program
from mllm_compile.runtime.sampling.state import NUM_FLOATS, NUM_INTS

_BEGIN = '''"""begin_decode"""

import torch


class Piece(torch.nn.Module):
    # S rows, M most rows of any step, R rows of the slot table and C columns, W pages of a row
    # turns: [2] int64; requests: [{turns}, M, {fields}] int32; last_tokens: [R] int64; req_to_token: [R, C] int32
    # input_ids, positions, out_cache_loc, rows: [S] int64; seq_lens: [S] int32; page_table: [S, W] int32

    def forward(
        self, turns, requests, last_tokens, req_to_token, input_ids, positions, out_cache_loc, rows, seq_lens,
        page_table
    ):
        torch.ops.mllm.begin_decode(
            turns, requests, last_tokens, req_to_token, input_ids, positions, out_cache_loc, rows, seq_lens, page_table,
            page_size={page_size}
        )
        return ()
'''

_END = '''"""end_decode"""

import torch


class Piece(torch.nn.Module):
    # S rows, M most rows of any step, R rows of the slot table
    # logits: [S, {vocab_size}] {dtype}; floats: [{floats}, R] float32; ints: [{ints}, R] int64; rows: [S] int64
    # seq_lens: [S] int32; turns: [2] int64; last_tokens: [R] int64; chosen: [{turns}, M] int64

    def forward(self, logits, floats, ints, rows, seq_lens, turns, last_tokens, chosen):
        return (torch.ops.mllm.end_decode(logits, floats, ints, rows, seq_lens, turns, last_tokens, chosen),)
'''


def add_decode_loop(
    config: ResolvedConfig, program: Program, logits: torch.Tensor
) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds these pieces to the program if its own kernels choose tokens and decode in all layers, so that only the
    pieces need a step's requests; returns the pieces too.

    Args:
        logits: [S, V], as the graph gives them.
    """
    layers_without = {layer.name for layer in program.layers} - set(program.decode_attention)
    if program.sampling is None or layers_without or config.runtime.deterministic:
        return program, ()
    pieces = decode_loop_pieces(program.sampling.dtype, int(logits.shape[1]), config.runtime.page_size)
    return replace(program, decode_loop=DecodeLoopForms(*(piece.name for piece in pieces))), pieces


def decode_loop_pieces(dtype: str, vocab_size: int, page_size: int) -> tuple[WrittenPiece, WrittenPiece]:
    """(begin, end); logits are [S, vocab_size] of that type."""
    begin = _BEGIN.format(turns=NUM_TURNS, fields=REQUEST_FIELDS, page_size=page_size)
    end = _END.format(vocab_size=vocab_size, dtype=dtype, floats=NUM_FLOATS, ints=NUM_INTS, turns=NUM_TURNS)
    turns, last_tokens = _int64(2), _int64("R")
    return (
        WrittenPiece(
            "begin_decode",
            begin,
            (
                turns,
                PieceInput.contiguous((NUM_TURNS, "M", REQUEST_FIELDS), "int32"),
                last_tokens,
                PieceInput.contiguous(("R", "C"), "int32"),
                *[_int64("S")] * 4,
                PieceInput.contiguous(("S",), "int32"),
                PieceInput.contiguous(("S", "W"), "int32"),
            ),
        ),
        WrittenPiece(
            "end_decode",
            end,
            (
                PieceInput.contiguous(("S", vocab_size), dtype),
                PieceInput.contiguous((NUM_FLOATS, "R"), "float32"),
                _int64(NUM_INTS, "R"),
                _int64("S"),
                PieceInput.contiguous(("S",), "int32"),
                turns,
                last_tokens,
                _int64(NUM_TURNS, "M"),
            ),
        ),
    )


def _int64(*shape: int | str) -> PieceInput:
    return PieceInput.contiguous(shape, "int64")
