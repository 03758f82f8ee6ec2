"""The work of a captured verify step around the model, as pieces of the program: kernels of
runtime/ops/tokens/verify.py."""

from __future__ import annotations

from dataclasses import replace

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece
from mllm_compile.runtime.ops.tokens.verify_fields import DRAFTED_FIELDS, NUM_SETTINGS, RESULT_FIELDS, VERIFY_FIELDS
from mllm_compile.runtime.program.spec import Program, StoredVerifyPieces
from mllm_compile.runtime.sampling.state import NUM_INTS

_LEGEND = "S requests, B tokens of each, R rows of the slot table and C columns, P tokens of a text, W pages of a row"


def add_verify_steps(config: ResolvedConfig, program: Program) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds these pieces to the program if it is to speculate and has a decode loop, whose kernels choose tokens;
    returns the pieces too."""
    if program.decode_loop is None or config.speculative.method == "none":
        return program, ()
    pieces = verify_pieces(config.runtime.page_size)
    return replace(program, verify=StoredVerifyPieces(*(piece.name for piece in pieces))), pieces


def verify_pieces(page_size: int) -> tuple[WrittenPiece, WrittenPiece]:
    """(begin, end)."""
    fields = PieceInput.contiguous(("S", VERIFY_FIELDS), "int32")
    drafted = PieceInput.contiguous(("S", DRAFTED_FIELDS), "int32")
    last_tokens = PieceInput.contiguous(("R",), "int64")
    lengths = PieceInput.contiguous(("R",), "int32")
    history = PieceInput.contiguous(("R", "P"), "int32")
    of_tokens = PieceInput.contiguous(("S", "B"), "int64")
    begin = WrittenPiece.calling(
        "begin_verify",
        {
            "fields": fields,
            "settings": PieceInput.contiguous((NUM_SETTINGS,), "int32"),
            "last_tokens": last_tokens,
            "lengths": lengths,
            "history": history,
            "req_to_token": PieceInput.contiguous(("R", "C"), "int32"),
            **dict.fromkeys(("input_ids", "positions", "out_cache_loc", "rows"), of_tokens),
            "seq_lens": PieceInput.contiguous(("S", "B"), "int32"),
            "page_table": PieceInput.contiguous(("S", "B", "W"), "int32"),
            "drafted": drafted,
        },
        name="begin_verify",
        legend=_LEGEND,
        options={"page_size": page_size},
        gives_tensor=False,
    )
    end = WrittenPiece.calling(
        "end_verify",
        {
            "tokens": of_tokens,
            "fields": fields,
            "drafted": drafted,
            "synthetic": PieceInput.contiguous((2,), "float32"),
            "ints": PieceInput.contiguous((NUM_INTS, "R"), "int64"),
            "last_tokens": last_tokens,
            "lengths": lengths,
            "history": history,
            "results": PieceInput.contiguous(("S", RESULT_FIELDS), "int64"),
        },
        name="end_verify",
        legend=_LEGEND,
        gives_tensor=False,
    )
    return begin, end
