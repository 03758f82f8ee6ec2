"""CUDA graphs of packed texts, played on a CPU: a replay gives what the program gives, for texts of any lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mllm_compile import Engine
from mllm_compile.runtime.ops.segments.reference import segment_attention_with_output
from mllm_compile.runtime.pooling import graphs
from mllm_compile.runtime.pooling.graphs import ENDS, STARTS, can_capture, step_rows
from mllm_compile.runtime.pooling.runner import PoolingRunner
from mllm_compile.runtime.pooling.texts import PackedText, PoolingParams
from mllm_compile.runtime.program.executor import ProgramExecutor
from mllm_compile.runtime.program.linked_steps import Segments
from mllm_compile.runtime.program.loaded import LoadedModel, PoolingExecutors
from mllm_compile.runtime.program.spec import Program
from mllm_compile.runtime.program.steps import PackedAttentionStep, PieceStep, TextPiece
from tests.model.pooling_models import pooling_config, save_pooling_model
from tests.runtime.cuda_graph.played_cases import Capturer
from tests.sample import slow_but_a_sample

SIZES = (16, 64, 256)


def attention_piece(step: PackedAttentionStep) -> Any:
    """The Triton piece of a step, by torch's operations."""

    def attend(given: Sequence[torch.Tensor]) -> tuple[()]:
        q, k, v, starts, _, *bias, out = given
        edges = (starts.diff() != 0).nonzero().flatten() + 1
        bounds = torch.cat([torch.tensor([0]), edges, torch.tensor([len(q)])]).int()
        windows, cap = (step.window_left, step.window_right), step.soft_cap
        segment_attention_with_output(q, k, v, bounds, out, step.sm_scale, "", 0, *windows, *bias, soft_cap=cap)
        return ()

    return attend


class Runners:
    """A tiny model of a class: its engine's runner, and one whose attention is by pieces, with graphs."""

    def __init__(self, class_name: str, folder: Path) -> None:
        save_pooling_model(class_name, folder / "model")
        self.engine = Engine(pooling_config(folder / "model", folder / "cache"))
        core: Any = self.engine.pooling.core
        self.plain: PoolingRunner = core._runner
        body = self.plain._body
        linked = zip(body.program.steps, body._steps, strict=True)
        pieces = {step.piece: one.compiled for step, one in linked if isinstance(step, PieceStep)}
        steps = []
        for number, step in enumerate(body.program.steps):
            if isinstance(step, PackedAttentionStep):
                pieces[f"texts_{number}"] = attention_piece(step)
                step = replace(step, of_texts=TextPiece(f"texts_{number}", ((64, 16),) * 3))
            steps.append(step)
        self.program: Program = replace(body.program, steps=tuple(steps))
        model = LoadedModel(
            executor=ProgramExecutor(self.program, pieces, body.weights),
            layers=(),
            pooling=PoolingExecutors(self.plain.facts, self.plain._head),
            **dict.fromkeys(("num_attention_heads", "num_kv_heads", "head_dim", "hidden_size", "vocab_size"), 1),
            num_hidden_layers=1,
            context_len=1,
        )
        self.captured = PoolingRunner(model, torch.device("cpu"), SIZES)


@pytest.mark.parametrize("class_name", slow_but_a_sample(("BertModel", "ModernBertModel", "MPNetModel"), 1))
def test_a_replay_gives_what_the_program_gives(class_name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(graphs, "GraphCapturer", Capturer)
    runners = Runners(class_name, tmp_path)
    asked = PoolingParams("embed", ("mean",), True), PoolingParams("token_embed", ("mean",))
    draws = np.random.default_rng(0)
    assert runners.captured.graphs is not None
    for lengths in ((16,), (1, 3, 2), (40, 1, 60, 7), (90, 150), (5,) * 12):
        texts = [PackedText(draws.integers(3, 90, length), asked[at % 2]) for at, length in enumerate(lengths)]
        for ours, theirs in zip(runners.captured.run(texts), runners.plain.run(texts), strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert runners.captured.graphs.size_for(257) is None
    long = [PackedText(draws.integers(3, 90, 200), asked[0]), PackedText(draws.integers(3, 90, 100), asked[0])]
    np.testing.assert_allclose(runners.captured.run(long), runners.plain.run(long), atol=1e-5)
    assert Program.from_json(runners.program.to_json()) == runners.program
    assert can_capture(runners.program) and not can_capture(runners.plain._body.program)
    rows = torch.zeros(5, 2, dtype=torch.int64)
    segments = Segments(torch.tensor([0, 2], dtype=torch.int32), 2, rows[3:], is_captured=True)
    with pytest.raises(RuntimeError, match="cannot be captured: the program has no piece"):
        runners.plain._body.run_tower(graphs.body_inputs(rows, segments, True))
    runners.engine.close()


def test_rows_say_where_each_text_is_and_padding_is_texts_of_its_own() -> None:
    rows = step_rows(np.array([5, 6, 7]), np.array([2, 1]), np.array([0, 2, 3]), np.array([0, 1, 1]), 5)
    assert rows.tolist() == [[5, 6, 7, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 2, 3, 4], [2, 2, 3, 4, 5]]
    assert (STARTS, ENDS) == (3, 4)
