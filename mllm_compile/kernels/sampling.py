"""The choice of tokens as pieces of the program: kernels of runtime/, for the model's vocabulary.

The most probable tokens and draws, from the program's logits (ops/tokens/greedy.py, ops/tokens/draw.py); draws from
scores that filters or penalties have changed; and log-probabilities of tokens from both (ops/tokens/score.py).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from mllm_compile.config.resolved import ResolvedConfig
from mllm_compile.inductor.job import PieceInput
from mllm_compile.kernels.piece import WrittenPiece
from mllm_compile.runtime.program.spec import Program, StoredSamplingPieces
from mllm_compile.runtime.sampling.counter_rng import padded_vocab_size


def add_sampling_pieces(
    config: ResolvedConfig, program: Program, logits: torch.Tensor
) -> tuple[Program, tuple[WrittenPiece, ...]]:
    """Adds pieces that choose tokens to the program, and returns them too; on CUDA, where the kernels run.

    Args:
        logits: [S, V], as the graph gives them: not every model's are of the model's own dtype.
    """
    if config.compile.backend == "eager" or not config.runtime.device.startswith("cuda"):
        return program, ()
    dtype = str(logits.dtype).removeprefix("torch.")
    pieces = sampling_pieces(dtype, int(logits.shape[1]))
    return replace(program, sampling=StoredSamplingPieces(dtype, *(piece.name for piece in pieces))), pieces


def sampling_pieces(dtype: str, vocab_size: int) -> tuple[WrittenPiece, ...]:
    """(greedy, draw from logits, draw from scores, score by logits, score by scores), of logits [S, vocab_size]."""
    logits = PieceInput.contiguous(("S", vocab_size), dtype)
    scores = PieceInput.contiguous(("S", padded_vocab_size(vocab_size)), "float32")
    temperatures = PieceInput.contiguous(("S",), "float32")
    seeds = positions = PieceInput.contiguous(("S",), "int64")
    of_tokens = {"factors": temperatures, "token_ids": seeds}
    return (
        _piece("greedy", "greedy_tokens", {"logits": logits}),
        _piece(
            "draw_from_logits",
            "draw_tokens",
            {"logits": logits, "temperatures": temperatures, "seeds": seeds, "positions": positions},
        ),
        _piece("draw_from_scores", "draw_tokens", {"logits": scores, "seeds": seeds, "positions": positions}),
        _piece("score_by_logits", "score_tokens", {"scores": logits, **of_tokens}),
        _piece(
            "score_by_scores",
            "score_tokens",
            {"scores": PieceInput.contiguous(("S", vocab_size), "float32"), **of_tokens},
        ),
    )


def _piece(name: str, op: str, signature: dict[str, PieceInput]) -> WrittenPiece:
    return WrittenPiece.calling(op, signature, name=name, legend="S rows of logits")
