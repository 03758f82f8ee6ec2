"""The work of a captured decode around the model, as pieces of the program: kernels of
runtime/ops/tokens/decode_loop.py."""

from __future__ import annotations

from dataclasses import replace

import torch

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece
from mllm_compile.runtime.ops.tokens.replay_slots import REPLAY_SLOTS, REQUEST_FIELDS
from mllm_compile.runtime.program.spec import Program, StoredDecodeLoopPieces
from mllm_compile.runtime.sampling.state import NUM_FLOATS, NUM_INTS

_LEGEND = "S rows, M most rows of any step, R rows of the slot table"


def add_decode_loop(
    config: ResolvedConfig, program: Program, logits: torch.Tensor
) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds these pieces to the program if its own kernels choose tokens and decode in all layers, so that only the
    pieces need a step's requests; returns the pieces too.

    Args:
        logits: [S, V], as the graph gives them.
    """
    kernels = (program.kernels_of_layer(layer.name) for layer in program.layers)
    decode_all = all(one.decode or one.latent for one in kernels)
    has_one_size = config.runtime.deterministic and not config.runtime.any_rows
    if program.sampling is None or not decode_all or has_one_size:
        return program, ()
    pieces = decode_loop_pieces(program.sampling.dtype, int(logits.shape[1]), config.runtime.page_size)
    return replace(program, decode_loop=StoredDecodeLoopPieces(*(piece.name for piece in pieces))), pieces


def decode_loop_pieces(dtype: str, vocab_size: int, page_size: int) -> tuple[WrittenPiece, WrittenPiece]:
    """(begin, end); logits are [S, vocab_size] of that type."""
    replay_slot, last_tokens = _int64(2), _int64("R")
    begin = WrittenPiece.calling(
        "begin_decode",
        {
            "replay_slot": replay_slot,
            "requests": PieceInput.contiguous((REPLAY_SLOTS, "M", REQUEST_FIELDS), "int32"),
            "last_tokens": last_tokens,
            "req_to_token": PieceInput.contiguous(("R", "C"), "int32"),
            **dict.fromkeys(("input_ids", "positions", "out_cache_loc", "rows"), _int64("S")),
            "seq_lens": PieceInput.contiguous(("S",), "int32"),
            "page_table": PieceInput.contiguous(("S", "W"), "int32"),
        },
        name="begin_decode",
        legend=f"{_LEGEND} and C columns, W pages of a row",
        options={"page_size": page_size},
        gives_tensor=False,
    )
    end = WrittenPiece.calling(
        "end_decode",
        {
            "logits": PieceInput.contiguous(("S", vocab_size), dtype),
            "floats": PieceInput.contiguous((NUM_FLOATS, "R"), "float32"),
            "ints": _int64(NUM_INTS, "R"),
            "rows": _int64("S"),
            "seq_lens": PieceInput.contiguous(("S",), "int32"),
            "replay_slot": replay_slot,
            "last_tokens": last_tokens,
            "chosen": _int64(REPLAY_SLOTS, "M"),
        },
        name="end_decode",
        legend=_LEGEND,
    )
    return begin, end


def _int64(*shape: int | str) -> PieceInput:
    return PieceInput.contiguous(shape, "int64")
