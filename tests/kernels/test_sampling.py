"""Pieces that choose tokens: where they run, and the logits that they take."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mllm_compile.kernels.sampling import add_sampling_pieces
from mllm_compile.runtime.program.pieces import piece_class
from mllm_compile.runtime.program.spec import Program, StoredSamplingPieces

PROGRAM = Program((), (), (), "logits")


def config(backend: str, device: str) -> Any:
    return SimpleNamespace(compile=SimpleNamespace(backend=backend), runtime=SimpleNamespace(device=device))


@pytest.mark.parametrize(("backend", "device"), [("eager", "cuda:0"), ("inductor", "cpu")])
def test_without_kernels_torch_chooses(backend, device):
    assert add_sampling_pieces(config(backend, device), PROGRAM, torch.zeros(1, 300)) == (PROGRAM, ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_are_written_for_the_logits_that_the_graph_gives(dtype, tmp_path):
    logits = torch.zeros(5, 300, dtype=dtype)
    program, pieces = add_sampling_pieces(config("inductor", "cuda:0"), PROGRAM, logits)
    name = str(dtype).removeprefix("torch.")
    names = "greedy", "draw_from_logits", "draw_from_scores", "score_by_logits", "score_by_scores"
    assert program.sampling == StoredSamplingPieces(name, *names)
    greedy, from_logits, from_scores, score, score_floats = pieces
    assert [(spec.shape, spec.dtype) for spec in greedy.inputs] == [(("S", 300), name)]
    assert [(spec.shape, spec.dtype) for spec in from_logits.inputs[:2]] == [(("S", 300), name), (("S",), "float32")]
    assert (from_scores.inputs[0].shape, from_scores.inputs[0].dtype) == (("S", 512), "float32")
    assert [(one.inputs[0].shape, one.inputs[0].dtype) for one in (score, score_floats)] == [
        (("S", 300), name),
        (("S", 300), "float32"),
    ]
    for piece in pieces:
        assert piece.name in program.piece_ids()
        assert piece_class(piece.source, tmp_path / "piece.py").forward.__code__.co_argcount == len(piece.inputs) + 1
